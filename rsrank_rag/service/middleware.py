"""Checks host and key of a request before a route sees it. Logs and counts the request."""

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .error_responses import error_response
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
    "Content-Security-Policy": "frame-ancestors 'none'",
}

# Names by which a service without keys is called: addresses, and names that are not public. A page
# of another site could let its own public name point to the service, and send requests from a
# visitor's browser (DNS rebinding).
_OWN_NAME = re.compile(r"(\[.*\]|[\d.]+|([^.:]+\.)*(local|localhost|internal)|[^.:]*)\.?(:\d+)?")


@dataclass
class RequestRecord:
    """One request, while it is answered.

    Attributes:
        client: The client's API key, or its address.
        budget: Where the bytes of bodies and answers are counted.
        bytes: Bytes of the body and the answer that were counted.
        started: When the request came, in seconds of `time.perf_counter`.
        status: The HTTP status of the answer, when it has begun.
        fields: What is logged beside the route, the status and the time.
    """

    client: str
    budget: Budget
    bytes: int = 0
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    fields: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self.started

    def take_bytes(self, size: int) -> None:
        """Count bytes; raises as `Budget.take`."""
        self.budget.take(self.client, size, self.bytes)
        self.bytes += size


class RequestMiddleware:
    """ASGI middleware: checks the host and the key of each request."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.keys = Keys(settings)
        self.budget = Budget(BODIES * settings.max_body, "bytes")

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
        record = RequestRecord(key or (scope.get("client") or ("",))[0], self.budget)
        scope["state"] = {**scope.get("state", {}), "record": record}

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self._app_for(scope, headers, key)(scope, receive, send_marked)
        except Exception:
            logger.exception("A request failed.")
            failure = error_response(500, "The service failed; its log says more.")
            if record.status is None:
                await failure(scope, receive, send_marked)
        finally:
            self.budget.give_back(record.client, record.bytes)
            self._write(scope, record)

    def _app_for(self, scope: Scope, headers: Headers, key: str | None) -> ASGIApp:
        """The app, or the error response of a request that may not reach the app."""
        is_open = not self.settings.closed
        if is_open and not _OWN_NAME.fullmatch(headers.get("host", "").lower()):
            return error_response(421, "A service without API keys answers to no public name.")
        if key or is_open or scope["path"] in OPEN:
            return self.app
        text = "This service needs an API key: send it as 'Authorization: Bearer KEY'."
        return error_response(401, text, headers={"WWW-Authenticate": "Bearer"})

    def _write(self, scope: Scope, record: RequestRecord) -> None:
        """Count and log a request."""
        route = scope["path"]
        if route not in [one.path for one in scope["app"].routes]:
            route = "other"
        # Without an answer, the client has left.
        status = record.status or 499
        self.metrics.seconds.labels(route, str(status)).observe(record.seconds)
        fields: dict[str, Any] = {"route": route, "status": status, **record.fields}
        fields["milliseconds"] = round(1000 * record.seconds, 1)
        level = logging.DEBUG if route in QUIET else logging.INFO
        logger.log(level, "request", extra={"fields": fields})
