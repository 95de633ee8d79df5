"""What runs around each request: keys, deadlines, error responses, logs and counters."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .counters import Metrics
from .messages import Budget
from .settings import Keys, Settings

logger = logging.getLogger(__name__)

# Routes that need no key.
OPEN = ("/", "/health", "/ready", "/.well-known/ready")

# All bodies and answers in memory may together have this many times the bytes of the largest body.
BODIES = 5


def error_response(
    status: int,
    message: str,
    documents: Mapping[int, str] = {},
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error. Clients of TEI read ``error``, of Cohere ``message``, of Jina ``detail``.

    >>> b'"detail":"Full."' in error_response(429, "Full.").body
    True
    """
    body: dict[str, Any] = {"error": message, "message": message, "detail": message}
    if documents:
        body["documents"] = [{"index": n, "message": text} for n, text in documents.items()]
    return JSONResponse(body, status, headers)


async def answer_error(request: Request, error: Any) -> Response:
    """The response to a `ServiceError`, or to a path or a method that there is not."""
    documents = getattr(error, "documents", {})
    return error_response(error.status_code, error.detail, documents, error.headers)


@dataclass
class RequestRecord:
    """One request, while it is answered.

    Attributes:
        client: The client's API key, or its address.
        budget: Where the bytes of bodies and answers are counted.
        bytes: Bytes of the body and the answer that were counted.
        started: When the request came, in seconds of `time.perf_counter`.
        status: The HTTP status of the answer, when it has begun.
        documents: Number of documents to score, when the body has been read.
    """

    client: str
    budget: Budget
    bytes: int = 0
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    documents: int | None = None

    def take_bytes(self, size: int) -> None:
        """Count bytes; raises as `Budget.take`."""
        self.budget.take(self.client, size, self.bytes)
        self.bytes += size


class RequestMiddleware:
    """ASGI middleware: checks the key of each request."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.keys = keys
        self.budget = Budget(BODIES * settings.max_body, "bytes")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        # Clients of Azure send the key by itself.
        azure = f"Bearer {request.headers.get('api-key', '')}"
        scheme, _, sent = request.headers.get("authorization", azure).partition(" ")
        key = self.keys.find(sent.strip()) if scheme.lower() == "bearer" else None
        app = self.app
        if key is None and self.settings.closed and scope["path"] not in OPEN:
            text = "This service needs an API key: send it as 'Authorization: Bearer KEY'."
            app = error_response(401, text)
        address = request.client.host if request.client else ""
        record = RequestRecord(key or address, self.budget)
        request.state.record = record

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await asyncio.wait_for(app(scope, receive, send_marked), self.settings.timeout)
        except Exception as error:
            if isinstance(error, asyncio.TimeoutError):
                # Either the body is late, or the scores are.
                status = 408 if record.documents is None else 504
                text = f"There was no answer in {self.settings.timeout:g} seconds."
            else:
                logger.exception("A request failed.")
                status, text = 500, "The service failed; its log says more."
            # The rest of a late body may never come.
            failure = error_response(status, text, headers={"Connection": "close"})
            if record.status is None:
                await failure(scope, receive, send_marked)
        finally:
            self.budget.give_back(record.client, record.bytes)
            self._write(scope, record)

    def _write(self, scope: Scope, record: RequestRecord) -> None:
        """Count and log a request."""
        route = scope["path"]
        if route not in [one.path for one in scope["app"].routes]:
            route = "other"
        # Without an answer, the client has left.
        status = record.status or 499
        seconds = time.perf_counter() - record.started
        self.metrics.seconds.labels(route, str(status)).observe(seconds)
        fields = {
            "route": route,
            "status": status,
            "documents": record.documents,
            "milliseconds": round(1000 * seconds),
        }
        logger.info("request", extra={"fields": fields})
