"""Checks host and key of a request before a route sees it. Logs and counts the request."""

import hashlib
import logging
import os
import re
import uuid
from dataclasses import dataclass, field
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .error_responses import error_response
from .logs import RequestRecord
from .messages import Budget
from .metrics import Metrics
from .settings import Keys, Settings

logger = logging.getLogger(__name__)

# Routes that need no key.
OPEN = frozenset({"/", "/health", "/ready", "/.well-known/ready", "/v1/cluster/auth"})

# Routes that monitoring asks for all the time: logged at DEBUG only.
QUIET = frozenset({"/health", "/ready", "/metrics"})

# All bodies and answers in memory may together have this many times the bytes of the largest body.
BODIES = 5

# Headers of every answer. A browser must not guess content types, and must not show the service's
# pages inside a page of another site.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

# Names by which a service without keys is called: addresses, and names that are not public. A page
# of another site could let its own public name point to the service, and send requests from a
# visitor's browser (DNS rebinding).
_OWN_NAME = re.compile(r"(\[.*\]|[\d.]+|([^.:]+\.)*(local|localhost|internal)|[^.:]*)\.?(:\d+)?")


@dataclass
class RequestMiddleware:
    """ASGI middleware: checks the host and the key of each request."""

    app: ASGIApp
    settings: Settings
    keys: Keys
    metrics: Metrics
    # Without a secret, readers of the logs could try all addresses.
    log_secret: bytes = field(default_factory=partial(os.urandom, 16), repr=False)

    def __post_init__(self) -> None:
        self.budget = Budget(BODIES * self.settings.max_body_bytes, "bytes")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # Clients of Azure send the key by itself.
        azure = f"Bearer {headers.get('api-key', '')}"
        scheme, _, sent = headers.get("authorization", azure).partition(" ")
        key = self.keys.find(sent.strip()) if scheme.lower() == "bearer" else None
        client = key or (scope.get("client") or ("",))[0]
        client = hashlib.blake2b(client.encode(), digest_size=6, key=self.log_secret).hexdigest()
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        record = RequestRecord(request_id, client, scope["method"])
        scope["state"] = {**scope.get("state", {}), "record": record, "budget": self.budget}

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.is_answered = True
                MutableHeaders(scope=message).update({**HEADERS, "x-request-id": record.id})
            await send(message)

        try:
            await self._app_for(scope, headers, key)(scope, receive, send_marked)
        except Exception:
            logger.exception("A request failed.", extra={"id": record.id})
            failure = error_response(500, "The service failed; its log says more.")
            if not record.is_answered:
                await failure(scope, receive, send_marked)
        finally:
            self.budget.give_back(client, record.bytes)
            record.route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe(record)
            record.write(logging.DEBUG if record.route in QUIET else logging.INFO)

    def _app_for(self, scope: Scope, headers: Headers, key: str | None) -> ASGIApp:
        """The app, or the error response of a request that may not reach the app."""
        is_open = not self.settings.closed
        if is_open and not _OWN_NAME.fullmatch(headers.get("host", "").lower()):
            return error_response(421, "A service without API keys answers to no public name.")
        if key or is_open or scope["path"] in OPEN:
            return self.app
        text = "This service needs an API key: send it as 'Authorization: Bearer KEY'."
        return error_response(401, text, headers={"WWW-Authenticate": "Bearer"})
