"""What a request must pass before a route sees it: host, key, size, time. It gets an id, is counted, logged, traced."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from .error_responses import error_response
from .logs import Record, request_span
from .metrics import Metrics

logger = logging.getLogger(__name__)

OPEN = frozenset({"/", "/health", "/ready", "/v1/cluster/auth"})  # routes that need no key
QUIET = frozenset(
    {"/health", "/ready", "/metrics"}
)  # routes that are asked all the time: logged at DEBUG only
VALUES = 100  # JSON values (texts, fields, lists) of a request for each document it may have; parsing more takes long
BODIES = 10  # bodies of the largest size that may be in memory at a time

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
"""Of every answer: a browser is to guess no type, and to show nothing of this in another site's page."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def keys_in(file: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; raises InputError if it cannot be read or has none."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file} could not be read: {error}") from error
    if not any(lines):
        raise InputError(f"--api-key-file {file} holds no key. Write one a line.")
    return tuple(line for line in lines if line)


class Settings(
    BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True
):  # it may be a key
    """What the service allows, and how it answers unless a request says otherwise."""

    api_keys: tuple[
        SecretStr, ...
    ] = ()  # any of them opens the service; without any, and a file, it is open
    api_key_file: Path | None = None  # more of them, one a line; read again when it changes
    separate_clients: bool = False  # of what is kept of documents, each finds only its own
    allowed_hosts: tuple[
        str, ...
    ] = ()  # names that clients may call the service by; see `is_own_name`
    max_documents: int = Field(default=1000, ge=1)  # of a request
    max_query_characters: int = Field(default=10_000, ge=1)
    max_document_characters: int = Field(default=1_000_000, ge=1)
    max_body_bytes: int = Field(default=20_000_000, ge=1)
    timeout: float | None = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds from a request's arrival to its answer; None for ever."""
    normalize: bool = False  # scores between 0 and 1
    drop: bool = False  # leave out what does not score above the model's native threshold, where clients allow it

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty")
        return keys

    @field_validator("api_key_file")
    @classmethod
    def _file_has_keys(cls, file: Path | None) -> Path | None:
        return file if file is None or keys_in(file) else None

    @property
    def closed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self.api_keys) or self.api_key_file is not None


class Keys:
    """Keys that open the service: fixed ones, and those of a file, which stay when it cannot be read any more.

    Raises InputError: the file cannot be read or holds no key.
    """

    def __init__(self, fixed: Sequence[str], file: Path | None) -> None:
        self._fixed, self._file = [key.strip().encode() for key in fixed], file
        self._seen = self._looks()
        self._read = [] if file is None else [key.encode() for key in keys_in(file)]

    def find(self, authorization: str) -> bytes | None:
        """The key in an ``Authorization`` header, if it is one of ours."""
        if self._file is not None and self._seen != (now := self._looks()):
            self._seen = now
            try:
                self._read = [key.encode() for key in keys_in(self._file)]
                logger.info("The API keys were read again: %d.", len(self._read))
            except InputError as error:
                logger.error("%s The keys that were read before stay.", error)
        kind, _, given = authorization.partition(" ")
        sent = given.encode(
            "latin-1"
        ).strip()  # of bytes: a letter's second byte may be a space of Latin-1
        # All are compared, so that the time taken tells nothing about which one it is.
        found = [key for key in (*self._fixed, *self._read) if hmac.compare_digest(key, sent)]
        return found[0] if found and kind.lower() == "bearer" else None

    def _looks(self) -> tuple[int, ...]:
        """What changes when the file does, or the link to it."""
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            found = None
        return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


class RequestMiddleware:
    """ASGI middleware: lets requests in that call the service by its name, have a key and are not too large."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._keys = Keys(
            [key.get_secret_value() for key in settings.api_keys], settings.api_key_file
        )
        self._salt = os.urandom(16)  # without it, whoever reads the logs could try all addresses
        self.held = 0  # bytes of all bodies that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key, given = (
            self._keys.find(headers.get("authorization", "")),
            headers.get("x-request-id", ""),
        )
        id_ = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        client = key if key is not None else (scope.get("client") or ("",))[0].encode()
        record = Record(
            id_, hashlib.blake2b(client, digest_size=6, key=self._salt).hexdigest(), scope["method"]
        )
        # The same in every run: what is kept on disk is to be found again.
        salt = hashlib.sha256(client).hexdigest() if self.settings.separate_clients else ""
        scope["state"] = {**scope.get("state", {}), "record": record, "salt": salt}
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                MutableHeaders(scope=message).update({**HEADERS, "x-request-id": record.id})
            await send(message)

        body = _Body(receive, self, record)
        with request_span(scope, headers, record, self.metrics.backend.name):
            try:
                await self._chosen(scope, headers, key)(scope, body, send_marked)
            except asyncio.CancelledError:  # by the server, whose time to end is up
                self.metrics.unanswered += 1
                if not started:
                    await error_response(503, "The service has ended.")(scope, receive, send_marked)
            except (
                Exception
            ):  # whatever it is, the client gets an answer and the next request is served
                logger.exception("A request failed.", extra={"id": record.id})
                if not started:
                    await error_response(500, "The service failed; its log says more.")(
                        scope, receive, send_marked
                    )
            finally:
                self.held -= body.bytes
                record.route = getattr(scope.get("route"), "path", "other")
                self.metrics.observe(record)
                record.write(logging.DEBUG if record.route in QUIET else logging.INFO)

    def _chosen(self, scope: Scope, headers: Headers, key: bytes | None) -> ASGIApp:
        if not is_own_name(headers.get("host", ""), self.settings):
            return error_response(
                421, "This service is not called so. Its operator can add the name: --allowed-host."
            )
        if (
            "transfer-encoding" in headers and "content-length" in headers
        ):  # a proxy may have read another end of it
            text = "A request has Content-Length or Transfer-Encoding, not both."
            return error_response(400, text, headers={"Connection": "close"})
        if key or not self.settings.closed or scope["path"] in OPEN:
            return self.app
        text = "This service needs an API key: send it as 'Authorization: Bearer KEY'."
        return error_response(401, text, headers={"WWW-Authenticate": "Bearer"})


def is_own_name(host: str, settings: Settings) -> bool:
    """Whether a request may call the service so.

    A page of another site can have a name of its own lead here, and then ask as if it were from here. It cannot bring
    a key, so with keys and no list of names any will do. Nor can it own a number, or a name that is none of the public
    ones.

    >>> hosts = ("127.0.0.1:8080", "[::1]", "rsrank", "a.local", "evil.example")
    >>> tuple(is_own_name(host, Settings()) for host in hosts)
    (True, True, True, True, False)
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if (
        not name
        or name in settings.allowed_hosts
        or (settings.closed and not settings.allowed_hosts)
    ):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return "." not in name or name.endswith((".localhost", ".local", ".internal"))


class _Body:
    """Receives a request's body while it is small enough, simple enough and comes in time."""

    def __init__(self, receive: Receive, gate: RequestMiddleware, record: Record) -> None:
        self._receive, self._gate, self._settings, self._record = (
            receive,
            gate,
            gate.settings,
            record,
        )
        self.bytes, self._values, self._complete = 0, 0, False
        self._in_text, self._rest = (
            0,
            b"",
        )  # whether a text goes on at the next piece; a backslash before it

    async def __call__(self) -> Message:
        if self._complete:  # what comes now is that the client has left, at any time
            return await self._receive()
        limit = self._settings.timeout
        try:
            left = None if limit is None else max(0.0, limit - self._record.seconds)
            message = await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"The body did not arrive in {limit:g} seconds.") from None
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._check(message.get("body", b""))
        return message

    def _check(self, piece: bytes) -> None:
        self.bytes += len(piece)
        self._gate.held += len(piece)
        self._values += self._values_in(piece)
        settings = self._settings
        if b"\0" in piece:  # in UTF-16, values would be counted wrong
            raise HTTPException(400, "The body is not JSON in UTF-8: it holds a zero byte.")
        if self.bytes > settings.max_body_bytes:
            raise HTTPException(
                413, f"The body is too large; it may have {settings.max_body_bytes:,} bytes."
            )
        if self._values > (most := VALUES * (settings.max_documents + 10)):
            raise HTTPException(
                413, f"The body has too many values; it may have {most:,} texts, lists and objects."
            )
        if self._gate.held > BODIES * settings.max_body_bytes:
            raise HTTPException(
                429, "Too much is being sent at a time. Try again later.", {"Retry-After": "1"}
            )

    def _values_in(self, piece: bytes) -> int:
        """About how many JSON values begin in this piece: what stands outside of texts is counted, not parsed."""
        piece = (self._rest + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
        self._rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= (len(parts) - 1) % 2
        return outside.count(b",") + outside.count(b"[") + outside.count(b"{")
