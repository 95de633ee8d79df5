"""What a request must pass before a route sees it: a key, a size, a time. It gets an id, is counted and logged."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import uuid

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .logs import Record
from .metrics import Metrics
from .refusals import error_answer

logger = logging.getLogger(__name__)

OPEN = frozenset({"/", "/health", "/ready"})
"""Routes that need no key."""

QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are asked all the time: logged at DEBUG only."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Settings(BaseModel):
    """What the service allows, and how it answers unless a request says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # it may be a key

    api_keys: tuple[SecretStr, ...] = ()  # any of them opens the service; without any it is open
    max_documents: int = Field(default=1000, ge=1)  # of a request
    max_query_characters: int = Field(default=10_000, ge=1)
    max_document_characters: int = Field(default=1_000_000, ge=1)
    max_document_tokens: int | None = Field(default=None, ge=1)
    """A longer document is refused, unless the request asks for it to be cut. Needs a model that counts tokens."""
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


class Gate:
    """ASGI middleware: lets requests in that have a key and are not too large."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._keys = [key.get_secret_value().strip().encode() for key in settings.api_keys]
        self._salt = os.urandom(16)  # without it, whoever reads the logs could try all addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key, given = self._key(headers), headers.get("x-request-id", "")
        id_ = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = Record(id_, self._client(scope, key), scope["method"])
        scope["state"] = {**scope.get("state", {}), "record": record}
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            answer = self.app if key or not self._keys or scope["path"] in OPEN else _no_key()
            await answer(scope, _Body(receive, self.settings, record), send_marked)
        except Exception:  # whatever it is, the client gets an answer and the next request is served
            logger.exception("A request failed.", extra={"id": record.id})
            if not started:
                await error_answer(500, "The service failed; its log says more.")(scope, receive, send_marked)
        finally:
            record.route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe(record)
            record.write(logging.DEBUG if record.route in QUIET else logging.INFO)

    def _key(self, headers: Headers) -> bytes | None:
        """The key that a request brings, if it is one of ours."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        # All are compared, so that the time taken tells nothing about which one it is.
        right = [key for key in self._keys if hmac.compare_digest(key, given.strip().encode("latin-1"))]
        return right[0] if right and kind.lower() == "bearer" else None

    def _client(self, scope: Scope, key: bytes | None) -> str:
        name = key if key is not None else (scope.get("client") or ("",))[0].encode()
        return hashlib.blake2b(name, digest_size=6, key=self._salt).hexdigest()


def _no_key() -> Response:
    response = error_answer(401, "This service needs an API key: send it as 'Authorization: Bearer KEY'.")
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


class _Body:
    """Receives a request's body while it is small enough and comes in time."""

    def __init__(self, receive: Receive, settings: Settings, record: Record) -> None:
        self._receive, self._settings, self._record = receive, settings, record
        self._bytes, self._complete = 0, False

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
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._settings.max_body_bytes:
            most = self._settings.max_body_bytes
            raise HTTPException(413, f"The body is too large; it may have {most:,} bytes.")
        return message
