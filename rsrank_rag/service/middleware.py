"""Checks of a request before a route sees it: host, key, size, time. Logs and counts it."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, PositiveInt, SecretStr, field_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from .error_responses import error_response
from .logs import RequestRecord
from .metrics import Metrics
from .schemas.common import Drop

logger = logging.getLogger(__name__)

# Routes that need no key.
OPEN = frozenset({"/", "/health", "/ready", "/.well-known/ready", "/v1/cluster/auth"})

# Routes that monitoring asks for all the time: logged at DEBUG only.
QUIET = frozenset({"/health", "/ready", "/metrics"})

# All bodies in memory may together have this many times the bytes of the largest body.
BODIES = 10

# Seconds for which the rest of a body is read if the request was answered before the body's end.
LINGER = 5.0

# Headers of every answer. A browser must not guess content types, and must not show the service's
# pages inside a page of another site.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def keys_in(file: Path | None) -> list[str]:
    """The API keys in a file with one key a line; no keys if ``file`` is None.

    Lines that begin with ``#`` are comments.

    Raises:
        InputError: The file cannot be read, or holds no key.
    """
    if file is None:
        return []
    try:
        # Reading a pipe could wait for ever.
        if not file.is_file():
            raise OSError("there is no regular file of this name.")
        # Some editors begin a file with a byte order mark.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file} could not be read: {error}") from error
    keys = [line for line in map(str.strip, lines) if line and line[0] != "#"]
    if not keys:
        raise InputError(f"--api-key-file {file} holds no key. Write one a line.")
    return keys


# Input is hidden in errors, because it may be a key.
class Settings(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """What the service allows, and how it answers unless a request says otherwise.

    Attributes:
        api_keys: A request needs one of these keys. Without keys and a file, it needs none.
        api_key_file: More keys, one a line; read again when the file changes.
        separate_clients: Clients do not share cached prefixes.
        allowed_hosts: Names by which clients may call the service; see `is_own_name`.
        max_documents: Documents of a request.
        max_query_characters: Characters of a query.
        max_document_characters: Characters of a document.
        max_body_bytes: Bytes of a request's body.
        timeout: Seconds from a request's arrival to its answer; None for no limit.
        normalize: Answer with scores between 0 and 1.
        drop: Whether answers leave out documents that do not score above the native threshold.
            True: not in the answer to a request for as many documents as it holds. "always": in
            every answer. Set "always" only if every client reads the index of each row.
    """

    api_keys: tuple[SecretStr, ...] = ()
    api_key_file: Path | None = None
    separate_clients: bool = False
    allowed_hosts: tuple[str, ...] = ()
    max_documents: PositiveInt = 1000
    max_query_characters: PositiveInt = 10_000
    max_document_characters: PositiveInt = 1_000_000
    max_body_bytes: PositiveInt = 20_000_000
    timeout: float | None = Field(default=60.0, gt=0, allow_inf_nan=False)
    normalize: bool = False
    drop: Drop = False

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty")
        return keys

    @property
    def closed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def seconds_left(self, record: RequestRecord) -> float | None:
        """Seconds until a request's time is up; None for no limit."""
        return self.timeout and max(0.001, self.timeout - record.seconds)


class Keys:
    """Keys that open the service: fixed ones and those of a file.

    The file is read for each request: a changed file may have the same size and time as before.
    The keys of a file stay when the file cannot be read any more.

    Raises:
        InputError: The file cannot be read or holds no key.
    """

    def __init__(self, settings: Settings) -> None:
        self._fixed = [key.get_secret_value().strip() for key in settings.api_keys]
        self._file = settings.api_key_file
        self._from_file = keys_in(self._file)
        self._trouble = ""

    def find(self, authorization: str) -> bytes | None:
        """The key in an ``Authorization`` header; None if it does not open the service."""
        self._read()
        scheme, _, credentials = authorization.partition(" ")
        # Stripping the text instead could remove the last byte of a UTF-8 letter, because that byte
        # may be a space in Latin-1.
        sent = credentials.encode("latin-1").strip()
        # All keys are compared, so that the time does not depend on which one matches.
        keys = [key.encode() for key in self._fixed + self._from_file]
        matching = [key for key in keys if hmac.compare_digest(key, sent)]
        return matching[0] if matching and scheme.lower() == "bearer" else None

    def _read(self) -> None:
        trouble = ""
        try:
            self._from_file = keys_in(self._file)
        except InputError as error:
            trouble = f"{error} The keys that were read before stay."
        if trouble and trouble != self._trouble:
            logger.error(trouble)
        self._trouble = trouble


@dataclass
class RequestMiddleware:
    """ASGI middleware: checks the host, the key and the size of each request."""

    app: ASGIApp
    settings: Settings
    keys: Keys
    metrics: Metrics
    # Without a secret, readers of the logs could try all addresses.
    log_secret: bytes = field(default_factory=partial(os.urandom, 16), repr=False)
    # Bytes of all bodies that are being read or answered.
    open_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # Clients of Azure send the key by itself.
        azure = f"Bearer {headers.get('api-key', '')}"
        key = self.keys.find(headers.get("authorization", azure))
        client = key or (scope.get("client") or ("",))[0].encode()
        client_hash = hashlib.blake2b(client, digest_size=6, key=self.log_secret).hexdigest()
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        record = RequestRecord(request_id, client_hash, scope["method"])
        # Without a secret, because prefixes on disk must be found again by the next run.
        salt = hashlib.sha256(client).hexdigest() if self.settings.separate_clients else ""
        scope["state"] = {**scope.get("state", {}), "record": record, "salt": salt}
        # Content-Length may be 0.
        length = headers.get("content-length", "0")
        body = _Body(receive, self, record, "transfer-encoding" in headers or length != "0")
        has_started = False

        async def send_marked(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                record.status = message["status"]
                marked = MutableHeaders(scope=message)
                marked.update({**HEADERS, "x-request-id": record.id})
                if self.metrics.backend.is_ending or body.is_open:
                    # The client sends its next request over a new connection.
                    marked["connection"] = "close"
            else:
                message["more_body"] = message.get("more_body", False) or body.is_open
            await send(message)

        failure = None
        try:
            await self._app_for(scope, headers, key)(scope, body, send_marked)
        except asyncio.CancelledError:
            # The server cancels what is not answered when its time to stop is over.
            self.metrics.unanswered += 1
            failure = error_response(503, "The service has ended.")
        except Exception:
            logger.exception("A request failed.", extra={"id": record.id})
            failure = error_response(500, "The service failed; its log says more.")
        if failure and not has_started:
            await failure(scope, receive, send_marked)
        self.open_bytes -= body.bytes
        record.route = getattr(scope.get("route"), "path", "other")
        self.metrics.observe(record)
        record.write(logging.DEBUG if record.route in QUIET else logging.INFO)
        if body.is_open:
            # The system resets a connection that is closed while its client sends, and the client
            # may lose the answer. So the answer ends when the body has been read.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_discard(receive), LINGER)
            await send({"type": "http.response.body"})

    def _app_for(self, scope: Scope, headers: Headers, key: bytes | None) -> ASGIApp:
        """The app, or the error response of a request that may not reach the app."""
        if not is_own_name(headers.get("host", ""), self.settings):
            return error_response(
                421, "This service has another name. Its operator can add this one: --allowed-host."
            )
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy before the service may have used the other header (request smuggling).
            return error_response(
                400, "A request has Content-Length or Transfer-Encoding, not both."
            )
        if key or not self.settings.closed or scope["path"] in OPEN:
            return self.app
        text = "This service needs an API key: send it as 'Authorization: Bearer KEY'."
        return error_response(401, text, headers={"WWW-Authenticate": "Bearer"})


def is_own_name(host: str, settings: Settings) -> bool:
    """Whether a request may call the service by this name.

    The check is against DNS rebinding: a page of another site lets its own public name point to
    this service, and then sends requests from a visitor's browser. So addresses and names that are
    not public are accepted. If the service has keys and no list of names, every name is accepted,
    because such a page has no key.

    >>> hosts = ("127.0.0.1:8080", "[::1]", "rsrank", "a.local", "evil.example")
    >>> tuple(is_own_name(host, Settings()) for host in hosts)
    (True, True, True, True, False)
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if not name or name in map(str.lower, settings.allowed_hosts):
        return True
    if settings.closed and not settings.allowed_hosts:
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return "." not in name or name.endswith((".localhost", ".local", ".internal"))


async def _discard(receive: Receive) -> None:
    """Read a body to its end."""
    while (await receive()).get("more_body"):
        pass


@dataclass
class _Body:
    """Receives a request's body, and counts its bytes.

    A call raises HTTPException if the body is late (status 408), too large (413), or would fill the
    memory together with other bodies (429).
    """

    receive: Receive
    middleware: RequestMiddleware
    record: RequestRecord
    # Whether the request has a body.
    exists: bool
    # Whether the body has arrived.
    is_complete: bool = False
    # Bytes that have arrived.
    bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a part of the body is still to come."""
        return self.exists and not self.is_complete

    async def __call__(self) -> Message:
        if self.is_complete:
            # After the body, only the message comes that the client has left.
            return await self.receive()
        settings = self.middleware.settings
        try:
            message = await asyncio.wait_for(self.receive(), settings.seconds_left(self.record))
        except asyncio.TimeoutError:
            text = f"The body did not arrive in {settings.timeout:g} seconds."
            raise HTTPException(408, text) from None
        self.is_complete = not message.get("more_body")
        size = len(message.get("body", b""))
        self.bytes += size
        self.middleware.open_bytes += size
        if self.bytes > settings.max_body_bytes:
            text = f"The body is too large; it may have {settings.max_body_bytes:,} bytes."
            raise HTTPException(413, text)
        if self.middleware.open_bytes > BODIES * settings.max_body_bytes:
            text = "Too much is being sent at a time. Try again later."
            raise HTTPException(429, text, {"Retry-After": "1"})
        return message
