"""The HTTP service: a FastAPI app in front of a `Scheduler`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from .. import __version__
from ..errors import InputError, RSRankError, needs
from ..reranker import Pair
from .messages import Outcome, ServiceError, unavailable
from .scheduler import Scheduler

with needs(
    "The service needs {}.",
    "serve",
    "fastapi",
    "prometheus_client",
    "pythonjsonlogger",
    "starlette",
):
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, StreamingResponse
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.requests import ClientDisconnect

    from .error_responses import Error, answer_errors, malformed
    from .metrics import Metrics
    from .middleware import RequestMiddleware
    from .schemas.answers import Answer, text_bytes
    from .schemas.request import ExplainRequest, RankRequest
    from .settings import Keys, Settings

__all__ = ["Settings", "create_app"]

PAGE = Path(__file__).with_name("page.html")

# Header of answers with scores: whether no document is above the native threshold.
NONE_RELEVANT = "X-RSRank-None-Relevant"

# Statuses of errors that requests with a key may get.
ERRORS = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)

# Paths to which clients send documents. Each takes the requests of all clients.
RANK_PATHS = (
    "/v1/rerank",
    "/v2/rerank",
    "/v1/reranking",
    "/rerank",
    "/reranking",
    "/api/rerank",
    "/v1/ranking",
)

# Bytes of an answer that are sent at once. The server waits with the next bytes until the client
# has taken most of these.
SLICE = 65_536

Body = TypeVar("Body", bound=BaseModel)


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    """A body in slices, so that a client that reads slowly fills no buffer."""
    for place in range(0, len(body), SLICE):
        yield body[place : place + SLICE]


def json_response(content: Any, **headers: str) -> Response:
    """An answer with a body of JSON."""
    body = to_json(content)
    headers["content-length"] = str(len(body))
    return StreamingResponse(_slices(body), headers=headers, media_type="application/json")


def create_app(backend: Scheduler, settings: Settings | None = None) -> FastAPI:
    """The service: an app that starts and stops a backend.

    ``app.state.failure`` is the error with which the backend did not start; None without such an
    error. The start fails with InputError if ``settings.drop`` is set and the model has no native
    threshold.

    Raises:
        InputError: A key cannot be used, or the file of API keys cannot be read or holds no key.
    """
    settings = settings or Settings()
    metrics = Metrics(backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await backend.start()
            if settings.drop and backend.description.rule.threshold is None:
                raise InputError(
                    f"{backend.name} has no native threshold, "
                    "so there is nothing by which to drop documents."
                )
            yield
        except RSRankError as error:
            # The caller that started the app reads the error here, because uvicorn and Ray Serve
            # only log it.
            app.state.failure = error
            raise
        finally:
            await backend.stop()

    app = FastAPI(
        title="rsrank_rag",
        description="Scores documents for a query and leaves the irrelevant ones out.",
        version=__version__,
        lifespan=lifespan,
        # These pages would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": Error} for status in ERRORS},
    )
    app.state.failure = None
    app.state.backend = backend
    app.state.settings = settings
    _Service(backend, settings, metrics).add_routes(app)
    app.add_middleware(RequestMiddleware, settings=settings, keys=Keys(settings), metrics=metrics)
    answer_errors(app)
    return app


@dataclass
class _Service:
    backend: Scheduler
    settings: Settings
    metrics: Metrics

    def add_routes(self, app: FastAPI) -> None:
        """Add all routes to an app."""

        def post(path: str, endpoint: Callable[..., Any], body: type[BaseModel]) -> None:
            content = {"application/json": {"schema": body.model_json_schema()}}
            app.post(path, openapi_extra={"requestBody": {"content": content}})(endpoint)

        for path in RANK_PATHS:
            post(path, self.rank, RankRequest)
        post("/explain", self.explain, ExplainRequest)
        app.get("/", response_class=HTMLResponse)(self.page)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics_page)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/.well-known/ready")(self.ready)
        app.get("/v1/cluster/auth")(self.auth)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.get("/info")(self.info)

    async def rank(self, request: Request) -> Response:
        """Score documents for a query."""
        record, settings = request.state.record, self.settings
        body = await self._body(request, RankRequest)
        count = len(body.entries)
        if count > settings.max_documents:
            text = f"The request has {count:,} documents; it may have {settings.max_documents:,}."
            raise ServiceError(413, text)
        self._take_bytes(request, text_bytes(body))
        model = self.backend.description
        outcomes = await self._score(request, body.pairs(model))
        options = (self.backend.name, record.id, settings.normalize, settings.drop)
        answer = Answer(body, outcomes, model, *options)
        record.tokens = answer.tokens
        # In a thread, because documents may have thousands of sentences.
        content = await asyncio.to_thread(answer.body)
        record.kept = len(
            content.get("results", outcomes) if isinstance(content, dict) else content
        )
        return json_response(content, **{NONE_RELEVANT: str(answer.none_relevant).lower()})

    async def explain(self, request: Request) -> Response:
        """Take one score apart."""
        body = await self._body(request, ExplainRequest)
        (outcome,) = await self._score(request, [Pair(body.query, body.document)], True)
        assert outcome.explanation is not None
        # The parts of all heads together.
        return json_response(replace(outcome.explanation, head_parts=()))

    async def models(self) -> dict[str, Any]:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return {"object": "list", "data": [await self.model("")]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model that is served, under any name. Clients of Xinference ask for it."""
        return {
            "id": self.backend.name,
            "object": "model",
            "created": 0,
            "owned_by": "rsrank-rag",
            "model_type": "rerank",
        }

    async def info(self) -> dict[str, Any]:
        """The model and the service's limits. Clients of TEI read some of the fields."""
        model = self.backend.description
        info: dict[str, Any] = {
            "model_id": self.backend.name,
            "model_type": {"reranker": {"id2label": {}, "label2id": {}}},
            "max_input_length": model.max_tokens,
            "threshold": model.rule.threshold,
            "explains": model.explains,
            "max_client_batch_size": self.settings.max_documents,
            "version": __version__,
        }
        if model.max_tokens is None:
            # Dify's plugin for TEI fails on a null.
            del info["max_input_length"]
        return info

    async def health(self) -> dict[str, str]:
        """Whether the service is alive."""
        return {"status": "ok"}

    async def auth(self) -> dict[str, bool]:
        """Whether requests need a key. Clients of Xinference ask for it."""
        return {"auth": self.settings.closed}

    async def ready(self) -> dict[str, str]:
        """Whether requests are answered."""
        reason = self.backend.readiness()
        if reason is not None:
            raise unavailable(reason)
        return {"status": "ready"}

    async def metrics_page(self) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """A page to try the model on."""
        return FileResponse(PAGE)

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """Read and validate a body, or raise the error that answers the request."""
        if "json" not in request.headers.get("content-type", ""):
            raise ServiceError(400, "The body must be sent with Content-Type: application/json.")
        try:
            body = await asyncio.wait_for(self._read(request), self._seconds_left(request))
            return kind.model_validate_json(body)
        except ClientDisconnect:
            raise ServiceError(499, "The client has left.") from None
        except asyncio.TimeoutError:
            text = f"The body did not arrive in {self.settings.timeout:g} seconds."
            raise ServiceError(408, text) from None
        except ValidationError as error:
            raise malformed(error) from None

    async def _read(self, request: Request) -> bytes:
        """A body, whose bytes are counted before they are in memory."""
        record, most = request.state.record, self.settings.max_body_bytes
        size = int(request.headers.get("content-length", "0"))
        body = b""
        async for piece in request.stream():
            body += piece
            # A body that comes in chunks announces no length.
            size = max(size, len(body))
            if size > most:
                raise ServiceError(413, f"The body is too large; it may have {most:,} bytes.")
            self._take_bytes(request, size - record.bytes)
        return body

    def _take_bytes(self, request: Request, size: int) -> None:
        record = request.state.record
        request.state.budget.take(record.client, size, record.bytes)
        record.bytes += size

    def _seconds_left(self, request: Request) -> float:
        """Seconds until a request's time is up."""
        seconds: float = request.state.record.seconds
        return max(0.001, self.settings.timeout - seconds)

    async def _score(
        self, request: Request, pairs: Sequence[Pair], explain: bool = False
    ) -> list[Outcome]:
        """Have the backend score pairs. If the client leaves, the work is cancelled.

        The time that the request has taken so far counts towards its timeout.

        Raises:
            ServiceError: As `Scheduler.score`; or pairs have no score (status 422, or 500 if the
                model failed on each of them).
        """
        record = request.state.record
        record.documents = len(pairs)
        seconds = self._seconds_left(request)
        task = asyncio.ensure_future(
            self.backend.score(pairs, client=record.client, timeout=seconds, explain=explain)
        )
        # The message after a body says that the client has left.
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServiceError(499, "The client has left.")
            outcomes = task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        faults = {n: one.error for n, one in enumerate(outcomes) if one.scored is None}
        if not faults:
            return outcomes
        status = 500 if all(one.fault == "internal" for one in outcomes) else 422
        first, text = min(faults.items())
        if text.startswith(("The query", "A query")):
            raise ServiceError(status, text)
        raise ServiceError(status, f"Document {first} {text}", faults)
