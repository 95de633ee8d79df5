"""The HTTP service: a FastAPI app in front of a `Scheduler`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Tag, TypeAdapter

from .. import __version__
from ..errors import InputError, RSRankError, needs
from ..passages.explanation import Explanation
from ..reranker import Pair
from .backend import Outcome, UnavailableError
from .scheduler import Scheduler

with needs(
    "The service needs {}.",
    "serve",
    "fastapi",
    "prometheus_client",
    "pythonjsonlogger",
    "starlette",
):
    from fastapi import Body, Depends, FastAPI, Request, Response
    from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
    from fastapi.security import HTTPBearer
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.exceptions import HTTPException

    from .error_responses import Error, RequestError, answer_errors
    from .metrics import Metrics
    from .middleware import OPEN, Keys, RequestMiddleware, Settings
    from .schemas import others
    from .schemas.cohere import RerankRequest, RerankResponse
    from .schemas.common import Scores, ScoringRequest

__all__ = ["Settings", "create_app"]

PAGE = Path(__file__).with_name("page.html")
ANYTHING = TypeAdapter(Any)

# Header of answers with scores: whether no document is above the native threshold.
NONE_RELEVANT = "X-RSRank-None-Relevant"

# Statuses of errors that requests with a key may get.
ERRORS = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)


def _schema(body: Any) -> str:
    """The name of the schema of a request to a path that several schemas share."""
    for name, schema in (("texts", "TEI"), ("passages", "NVIDIA")):
        if isinstance(body, dict) and name in body:
            return schema
    return "rerank"


AnyRerankRequest = Annotated[
    Annotated[others.TextsRequest, Tag("TEI")]
    | Annotated[others.RankingRequest, Tag("NVIDIA")]
    | Annotated[RerankRequest, Tag("rerank")],
    Discriminator(_schema),
]


class Info(BaseModel, use_attribute_docstrings=True):
    """The model and the service's limits. Clients of TEI read some of the fields."""

    model_id: str
    model_type: dict[str, dict[str, dict[str, int]]]
    """As TEI's clients read it."""
    max_input_length: int | None = None
    """Tokens of a document that are read, if that is known."""
    threshold: float | None
    explains: bool
    max_client_batch_size: int
    version: str


def create_app(backend: Scheduler, settings: Settings | None = None) -> FastAPI:
    """The service: an app that starts and stops a backend.

    ``app.state.failure`` is the error with which the backend did not start; None without such an
    error. The start fails with InputError if ``settings.drop`` is set and the model has no native
    threshold.

    Raises:
        InputError: The file of API keys cannot be read, or holds no key.
    """
    settings = settings or Settings()
    metrics = Metrics(backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await backend.start()
            if settings.drop and backend.description.threshold is None:
                await backend.stop()
                raise InputError(
                    f"{backend.description.name} has no native threshold, "
                    "so there is nothing by which to drop documents."
                )
        except RSRankError as error:
            # The caller that started the app reads the error here, because uvicorn and Ray Serve
            # only log it.
            app.state.failure = error
            raise
        yield
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
    app.state.metrics = metrics
    _Service(backend, settings, metrics).add_routes(app)
    app.add_middleware(RequestMiddleware, settings=settings, keys=Keys(settings), metrics=metrics)
    answer_errors(app)
    return app


@dataclass
class _Service:
    backend: Scheduler
    settings: Settings
    metrics: Metrics
    # In seconds since 1970.
    started: float = field(default_factory=time.time)

    def add_routes(self, app: FastAPI) -> None:
        """Add all routes to an app."""
        # The middleware asks for keys; here they are only described.
        keys = [Depends(HTTPBearer(auto_error=False))] if self.settings.closed else []

        def add(path: str, endpoint: Callable[..., Any], **options: Any) -> None:
            app.add_api_route(path, endpoint, dependencies=[] if path in OPEN else keys, **options)

        rerank = (RerankRequest, RerankResponse)
        any_rerank = (
            AnyRerankRequest,
            RerankResponse | list[others.TextScore] | others.RankingResponse,
        )
        posts: dict[str, tuple[Any, Any]] = {
            "/v1/rerank": rerank,
            "/v2/rerank": rerank,
            "/v1/reranking": any_rerank,
            "/rerank": any_rerank,
            "/reranking": any_rerank,
            "/api/rerank": any_rerank,
            "/v1/ranking": (others.RankingRequest, others.RankingResponse),
            "/explain": (others.ExplainRequest, Explanation),
        }
        for path, (kind, model) in posts.items():
            add(path, self._endpoint(kind), methods=["POST"], response_model=model)
        add("/", self.page, response_class=HTMLResponse)
        add("/health", self.health)
        add("/ready", self.ready)
        add("/.well-known/ready", self.ready)
        add("/v1/cluster/auth", self.auth)
        add("/v1/models", self.models)
        add("/v1/models/{name:path}", self.model)
        add("/info", self.info, response_model_exclude_defaults=True)
        add("/metrics", self.metrics_page, response_class=PlainTextResponse)

    def _endpoint(self, kind: Any) -> Callable[..., Awaitable[Response]]:
        """A function that answers requests of one kind."""

        async def endpoint(body: Annotated[kind, Body()], request: Request) -> Response:
            scores = await self._scores(request, body)
            # In a thread, because a long text may have very many sentences.
            answer = await asyncio.to_thread(body.answer, scores)
            request.state.record.kept = len(getattr(answer, "results", scores.documents))
            # Optional fields that have no value stay out.
            return Response(
                ANYTHING.dump_json(answer, exclude_defaults=True),
                headers={NONE_RELEVANT: str(scores.none_relevant).lower()},
                media_type="application/json",
            )

        return endpoint

    async def models(self) -> others.ModelList:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return others.ModelList(data=[await self.model("")])

    async def model(self, name: str) -> others.ModelCard:
        """The model that is served, under any name. Clients of Xinference ask for it."""
        return others.ModelCard(id=self.backend.description.name, created=int(self.started))

    async def info(self) -> Info:
        """The model and the service's limits."""
        model = self.backend.description
        return Info(
            model_id=model.name,
            model_type={"reranker": {"id2label": {}, "label2id": {}}},
            # Left out if unknown: Dify's plugin for TEI fails on a null.
            max_input_length=model.max_tokens,
            threshold=model.threshold,
            explains=model.explains,
            max_client_batch_size=self.settings.max_documents,
            version=__version__,
        )

    async def health(self) -> dict[str, str]:
        """Whether the service is alive."""
        return {"status": "ok"}

    async def auth(self) -> dict[str, bool]:
        """Whether requests need a key. Clients of Xinference ask for it."""
        return {"auth": self.settings.closed}

    async def ready(self) -> dict[str, str]:
        """Whether requests are answered, and the last canary scored as it should."""
        reason = self.backend.readiness()
        if reason is not None:
            raise UnavailableError(reason)
        return {"status": "ready"}

    async def metrics_page(self) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """A page to try the model on."""
        return FileResponse(PAGE)

    async def _scores(self, request: Request, body: ScoringRequest) -> Scores:
        """Score a request's pairs, or raise the error that answers the request."""
        record = request.state.record
        query, documents = body.query_and_documents()
        self._check_size(query, documents)
        record.documents = len(documents)
        outcomes = await self._work(request, body.pairs(request.state.salt), body.explain)
        body.check(outcomes)
        scores = Scores(
            documents,
            outcomes,
            self.backend.description,
            body.normalised(self.settings.normalize),
            record.id,
            self.settings.drop,
        )
        record.tokens = scores.usage.total_tokens
        return scores

    def _check_size(self, query: str, documents: Sequence[str]) -> None:
        def check(name: str, size: int, most: int, unit: str = "characters") -> None:
            if size > most:
                raise RequestError(413, f"{name} has {size:,} {unit}; it may have {most:,}.")

        limits = self.settings
        check("The request", len(documents), limits.max_documents, "documents")
        check("The query", len(query), limits.max_query_characters)
        for place, text in enumerate(documents):
            check(f"Document {place}", len(text), limits.max_document_characters)

    async def _work(self, request: Request, pairs: Sequence[Pair], explain: bool) -> list[Outcome]:
        """Have the backend score pairs. If the client leaves, the work is cancelled.

        The time that the request has taken so far counts towards its timeout.
        """
        record = request.state.record
        left = self.settings.seconds_left(record)
        task = asyncio.ensure_future(
            self.backend.score(pairs, client=record.client, timeout=left, explain=explain)
        )
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise HTTPException(499, "The client has left.")
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
