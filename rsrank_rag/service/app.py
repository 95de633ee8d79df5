"""The HTTP service: a Starlette app in front of a `Scheduler`, and uvicorn in front of the app.

Slow heads, slow readers and floods of connections are a reverse proxy's business: see
docs/serving.md and examples/nginx.conf.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from ..errors import RSRankError, needs, problems_of
from ..reranker import Pair
from .messages import Outcome, ServiceError, Work, unavailable
from .scheduler import Scheduler

with needs("The service needs {}.", "serve", "prometheus_client", "starlette", "uvicorn"):
    import uvicorn
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from .counters import Metrics
    from .middleware import RequestMiddleware, answer_error
    from .schemas.answers import answer_to
    from .schemas.request import RankRequest
    from .settings import Keys, Settings

__all__ = ["Server", "Settings", "create_app"]

PAGE = Path(__file__).with_name("page.html")

# Paths to which clients send documents. Each takes the requests of all clients.
RANK_PATHS = (
    "/v1/rerank",
    "/v2/rerank",
    "/v1/reranking",
    "/rerank",
    "/api/rerank",
    "/v1/ranking",
)

# Bytes of an answer that are sent at once. The server waits with the next bytes until the client
# has taken most of these.
SLICE = 65_536

# The server does nothing else while it parses a body. One of so many bytes takes up to 1 ms, and
# one of 10 MB up to 0.1 s. So larger bodies are parsed one after the other, so many bytes a second.
LARGE_BODY = 100_000
PARSED_PER_SECOND = 10_000_000


def json_response(body: bytes) -> Response:
    """An answer with a body of JSON, in slices, so that a slow reader fills no buffer."""

    async def slices() -> AsyncIterator[bytes]:
        for place in range(0, len(body), SLICE):
            yield body[place : place + SLICE]

    return StreamingResponse(slices(), media_type="application/json")


def create_app(backend: Scheduler, settings: Settings | None = None) -> Starlette:
    """The service: an app that starts and stops a backend.

    ``app.state.failure`` is the error with which the backend did not start; None without such an
    error.

    Raises:
        InputError: A key cannot be used, or the file of API keys cannot be read or holds no key.
    """
    settings = settings or Settings()
    metrics = Metrics(backend)
    keys = Keys(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await backend.start()
            yield
        except RSRankError as error:
            # The caller that started the app reads the error here, because uvicorn and Ray Serve
            # only log it.
            app.state.failure = error
            raise
        finally:
            await backend.stop()

    routes = _Service(backend, settings, metrics).routes()
    errors: dict[Any, Any] = {ServiceError: answer_error, HTTPException: answer_error}
    app = Starlette(routes=routes, exception_handlers=errors, lifespan=lifespan)
    app.state.failure = None
    app.state.backend = backend
    app.add_middleware(RequestMiddleware, settings=settings, keys=keys, metrics=metrics)
    return app


class Server(uvicorn.Server):
    """uvicorn around an app of `create_app`.

    After SIGTERM or Ctrl-C, /ready is 503, and the server takes no connections and ends when the
    requests in flight have been answered. A second signal ends it at once. The exit status is 0.
    """

    def __init__(self, app: Starlette) -> None:
        self.backend = app.state.backend
        self.is_signalled = False
        super().__init__(
            uvicorn.Config(app, http="h11", ws="none", log_config=None, access_log=False)
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to stop the server.

        uvicorn would raise the signal again at the end. This method does not, because the exit
        status must be 0.
        """
        self.is_signalled = True
        self.backend.is_ending = True
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit or not self.started:
            self.backend.abort()


@dataclass
class _Service:
    backend: Scheduler
    settings: Settings
    metrics: Metrics
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            *(Route(path, self.rank, methods=["POST"]) for path in RANK_PATHS),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/", self.page),
            Route("/metrics", self.metrics_page),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/.well-known/ready", self.ready),
            Route("/v1/models", self.models),
            Route("/info", self.info),
        ]

    async def rank(self, request: Request) -> Response:
        """Score documents for a query."""
        record, settings = request.state.record, self.settings
        body = await self._body(request)
        count = len(body.entries)
        if count > settings.max_documents:
            text = f"The request has {count:,} documents; it may have {settings.max_documents:,}."
            raise ServiceError(413, text)
        # A text takes no more bytes in the answer than in the request.
        record.take_bytes(body.copies * record.bytes)
        model = self.backend.description
        outcomes = await self._score(request, body.pairs(model))
        # In a thread, because documents may have thousands of sentences.
        answer = await asyncio.to_thread(
            lambda: to_json(answer_to(body, outcomes, model, self.backend.name, settings))
        )
        return json_response(answer)

    async def explain(self, request: Request) -> Response:
        """Take one score apart."""
        body = await self._body(request)
        if len(body.entries) != 1:
            raise ServiceError(400, "One document can be explained at a time.")
        (outcome,) = await self._score(request, [Pair(body.query, body.entries[0])], "explain")
        return json_response(to_json(outcome.explanation))

    async def models(self, request: Request) -> Response:
        """The model that is served, as OpenAI and NVIDIA list models."""
        model = {"id": self.backend.name, "object": "model"}
        return JSONResponse({"object": "list", "data": [model]})

    async def info(self, request: Request) -> Response:
        """The model and the service's limits. Clients of TEI read some of the fields."""
        model = self.backend.description
        info: dict[str, Any] = {
            "model_id": self.backend.name,
            "model_type": {"reranker": {"id2label": {}, "label2id": {}}},
            "threshold": model.rule.threshold,
        }
        # Dify's plugin for TEI fails on a null.
        if model.max_tokens is not None:
            info["max_input_length"] = model.max_tokens
        return JSONResponse(info)

    async def health(self, request: Request) -> Response:
        """Whether the service is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether requests are answered."""
        if not self.backend.is_ready:
            raise unavailable()
        return JSONResponse({"status": "ready"})

    async def metrics_page(self, request: Request) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """A page to try the model on."""
        return FileResponse(PAGE)

    async def _body(self, request: Request) -> RankRequest:
        """Read and validate a body, or raise the error that answers the request."""
        if "json" not in request.headers.get("content-type", ""):
            raise ServiceError(400, "The body must be sent with Content-Type: application/json.")
        try:
            body = await self._read(request)
            if len(body) > LARGE_BODY:
                async with self.parsing:
                    await asyncio.sleep(len(body) / PARSED_PER_SECOND)
            return RankRequest.model_validate_json(body)
        except ClientDisconnect:
            raise ServiceError(499, "The client has left.") from None
        except ValidationError as error:
            raise ServiceError(400, f"The body is no request. {problems_of(error)}.") from None

    async def _read(self, request: Request) -> bytearray:
        """A body, whose bytes are counted before they are in memory."""
        record, most = request.state.record, self.settings.max_body
        # A body that comes in chunks announces no length.
        announced = int(request.headers.get("content-length", "0"))
        body = bytearray()
        async for piece in request.stream():
            body += piece
            size = max(announced, len(body))
            if size > most:
                raise ServiceError(413, f"The body is too large; it may have {most:,} bytes.")
            record.take_bytes(size - record.bytes)
        return body

    async def _score(
        self, request: Request, pairs: Sequence[Pair], work: Work = "score"
    ) -> list[Outcome]:
        """Have the backend score pairs. If the client leaves, the work is cancelled.

        Raises:
            ServiceError: As `Scheduler.score`; or pairs have no score (status 422, or 500 if the
                model failed on each of them).
        """
        record = request.state.record
        record.documents = len(pairs)
        score = asyncio.ensure_future(self.backend.score(pairs, record.client, work))
        # The message after a body says that the client has left.
        gone = asyncio.ensure_future(request.receive())
        gone.add_done_callback(lambda _: score.cancel())
        try:
            outcomes = await score
        except asyncio.CancelledError:
            # If the client is there, the time is up.
            if not gone.done():
                raise
            raise ServiceError(499, "The client has left.") from None
        finally:
            gone.cancel()
        faults = {n: one.error for n, one in enumerate(outcomes) if one.scored is None}
        if not faults:
            return outcomes
        status = 500 if all(one.model_failed for one in outcomes) else 422
        first, text = min(faults.items())
        # A whole sentence is about the query.
        if text[0].isupper():
            raise ServiceError(status, text)
        raise ServiceError(status, f"Document {first} {text}", faults)
