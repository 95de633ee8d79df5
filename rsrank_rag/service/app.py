"""The HTTP service: a Starlette app in front of a `Scheduler`."""

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
from .messages import Outcome, ServiceError, Work, unavailable
from .scheduler import Scheduler

with needs("The service needs {}.", "serve", "prometheus_client", "starlette"):
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from .error_responses import HANDLERS, malformed
    from .metrics import Metrics
    from .middleware import RequestMiddleware, RequestRecord
    from .schemas.answers import answer_to
    from .schemas.request import ExplainRequest, RankRequest
    from .settings import Settings, keys_of

__all__ = ["Settings", "create_app"]

PAGE = Path(__file__).with_name("page.html")

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


def json_response(body: bytes) -> Response:
    """An answer with a body of JSON."""
    headers = {"content-length": str(len(body))}
    return StreamingResponse(_slices(body), headers=headers, media_type="application/json")


def create_app(
    backend: Scheduler,
    settings: Settings | None = None,
    when_ready: Callable[[], None] = lambda: None,
) -> Starlette:
    """The service: an app that starts and stops a backend.

    ``app.state.failure`` is the error with which the backend did not start; None without such an
    error. The start fails with InputError if ``settings.drop`` is set and the model has no native
    threshold.

    Args:
        backend: The model and its queue.
        settings: What the service allows.
        when_ready: Called when the model is loaded.

    Raises:
        InputError: A key cannot be used, or the file of API keys cannot be read or holds no key.
    """
    settings = settings or Settings()
    # An error in the keys is raised here, and not at the first request.
    keys_of(settings)
    metrics = Metrics(backend)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await backend.start()
            if settings.drop and backend.description.rule.threshold is None:
                raise InputError(
                    f"{backend.name} has no native threshold, "
                    "so there is nothing by which to drop documents."
                )
            when_ready()
            yield
        except RSRankError as error:
            # The caller that started the app reads the error here, because uvicorn and Ray Serve
            # only log it.
            app.state.failure = error
            raise
        finally:
            await backend.stop()

    routes = _Service(backend, settings, metrics).routes()
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
    app.state.failure = None
    app.state.backend = backend
    app.state.settings = settings
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics)
    return app


@dataclass
class _Service:
    backend: Scheduler
    settings: Settings
    metrics: Metrics

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
            Route("/v1/cluster/auth", self.auth),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/info", self.info),
        ]

    async def rank(self, request: Request) -> Response:
        """Score documents for a query."""
        record, settings = _record(request), self.settings
        body = await self._body(request, RankRequest)
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
        body = await self._body(request, ExplainRequest)
        (outcome,) = await self._score(request, [Pair(body.query, body.document)], "explain")
        assert outcome.explanation is not None
        # The parts of all heads together.
        return json_response(to_json(replace(outcome.explanation, head_parts=())))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.backend.name,
            "object": "model",
            "created": 0,
            "owned_by": "rsrank-rag",
            "model_type": "rerank",
        }

    async def models(self, request: Request) -> Response:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model that is served, under any name. Clients of Xinference ask for it."""
        return JSONResponse(self._model())

    async def info(self, request: Request) -> Response:
        """The model and the service's limits. Clients of TEI read some of the fields."""
        model = self.backend.description
        info: dict[str, Any] = {
            "model_id": self.backend.name,
            "model_type": {"reranker": {"id2label": {}, "label2id": {}}},
            "threshold": model.rule.threshold,
            "explains": model.explains,
            "max_client_batch_size": self.settings.max_documents,
            "version": __version__,
        }
        # Dify's plugin for TEI fails on a null.
        if model.max_tokens is not None:
            info["max_input_length"] = model.max_tokens
        return JSONResponse(info)

    async def health(self, request: Request) -> Response:
        """Whether the service is alive."""
        return JSONResponse({"status": "ok"})

    async def auth(self, request: Request) -> Response:
        """Whether requests need a key. Clients of Xinference ask for it."""
        return JSONResponse({"auth": self.settings.closed})

    async def ready(self, request: Request) -> Response:
        """Whether requests are answered."""
        reason = self.backend.readiness()
        if reason is not None:
            raise unavailable(reason)
        return JSONResponse({"status": "ready"})

    async def metrics_page(self, request: Request) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
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
        record, most = _record(request), self.settings.max_body
        # A body that comes in chunks announces no length.
        announced = int(request.headers.get("content-length", "0"))
        body = bytearray()
        async for piece in request.stream():
            body += piece
            size = max(announced, len(body))
            if size > most:
                raise ServiceError(413, f"The body is too large; it may have {most:,} bytes.")
            record.take_bytes(size - record.bytes)
        return bytes(body)

    def _seconds_left(self, request: Request) -> float:
        """Seconds until a request's time is up."""
        return max(0.001, self.settings.timeout - _record(request).seconds)

    async def _score(
        self, request: Request, pairs: Sequence[Pair], work: Work = "score"
    ) -> list[Outcome]:
        """Have the backend score pairs. If the client leaves, the work is cancelled.

        The time that the request has taken so far counts towards its timeout.

        Raises:
            ServiceError: As `Scheduler.score`; or pairs have no score (status 422, or 500 if the
                model failed on each of them).
        """
        record = _record(request)
        record.fields["documents"] = len(pairs)
        seconds = self._seconds_left(request)
        score = asyncio.ensure_future(
            self.backend.score(pairs, client=record.client, timeout=seconds, work=work)
        )
        # The message after a body says that the client has left.
        gone = asyncio.ensure_future(request.receive())
        gone.add_done_callback(lambda _: score.cancel())
        try:
            outcomes = await score
        except asyncio.CancelledError:
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


def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record
