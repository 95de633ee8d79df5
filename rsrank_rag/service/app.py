"""The HTTP service: a FastAPI app in front of a `Scheduler`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter

from .. import __version__
from ..errors import InputError, RSRankError, needs
from ..reranker import Pair
from .backend import Outcome, UnavailableError
from .scheduler import Scheduler
from .schemas import others
from .schemas.common import Instruction, Query, Question, Scores, ScoringRequest, Strict

with needs(
    "The service needs {}.",
    "serve",
    "fastapi",
    "prometheus_client",
    "pythonjsonlogger",
    "starlette",
):
    from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
    from fastapi.responses import HTMLResponse
    from fastapi.security import HTTPBearer
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.exceptions import HTTPException

    from .error_responses import RequestError, answer_errors, described, request_error
    from .metrics import Metrics
    from .middleware import RequestMiddleware, Settings
    from .schemas.cohere import RerankRequest, RerankResponse

__all__ = ["Settings", "create_app"]

PAGE = Path(__file__).with_name("page.html")
ANYTHING = TypeAdapter(Any)

# Header of answers with scores: whether no document is above the native threshold.
NONE_RELEVANT = "X-RSRank-None-Relevant"


def _schema(body: Any) -> str:
    """Whose schema a request has that several share a path with."""
    if not isinstance(body, dict):
        return "rerank"
    return "TEI" if "texts" in body else "NVIDIA" if "passages" in body else "rerank"


AnyRerankRequest = Annotated[
    Annotated[others.TextsRequest, Tag("TEI")]
    | Annotated[others.RankingRequest, Tag("NVIDIA")]
    | Annotated[RerankRequest, Tag("rerank")],
    Discriminator(_schema),
]


class ExplainRequest(Strict):
    """One score to be taken apart."""

    query: Query
    document: Query
    instruction: Instruction = None


class ExplainResponse(BaseModel):
    """The exact parts of one score: see `Explanation`."""

    query: str
    document: str
    score: float
    truncated: bool
    tokens: tuple[str, ...] = Field(description="The T scored tokens of the query.")
    layers: tuple[int, ...] = Field(description="The L layers read.")
    parts: tuple[tuple[float, ...], ...] = Field(
        description="T x L shift terms; with the similarity terms, they add up to the score."
    )
    agreement: float = Field(
        description="The similarity terms together; 0 where the artifact has none."
    )
    matches: tuple[float, ...] = Field(
        description="T: the MaxSim term of each query token; or empty."
    )


class Info(BaseModel):
    """The model and the service's limits; the fields of TEI among them."""

    model_id: str
    model_type: dict[str, dict[str, dict[str, int]]] = Field(
        description="As TEI's clients read it."
    )
    max_input_length: int | None = Field(
        default=None, description="Tokens of a document that are read, if that is known."
    )
    threshold: float | None
    explains: bool
    normalize: bool
    drop: bool
    max_documents: int
    max_client_batch_size: int
    max_body_bytes: int
    version: str


def create_app(backend: Scheduler, settings: Settings | None = None) -> FastAPI:
    """The service around a backend, which the app starts and stops."""
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
            # Whoever started the app shows the error better than a server's traceback.
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
    )
    app.state.failure = None
    app.state.backend = backend
    app.state.settings = settings
    app.state.metrics = metrics
    app.include_router(_Service(backend, settings, metrics).router())
    app.add_middleware(RequestMiddleware, settings=settings, metrics=metrics)
    answer_errors(app)
    return app


class _Service:
    def __init__(self, backend: Scheduler, settings: Settings, metrics: Metrics) -> None:
        self.backend = backend
        self.settings = settings
        self.metrics = metrics
        self.created = int(time.time())
        self.html = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None

    def router(self) -> APIRouter:
        """All routes. The middleware asks for keys; here they are only described."""
        routes = APIRouter()
        page = {**described(404), **_text("text/html")}
        routes.add_api_route("/", self.page, response_class=Response, responses=page)
        routes.add_api_route("/health", self.health)
        routes.add_api_route("/v1/cluster/auth", self.auth)
        for path in ("/ready", "/.well-known/ready"):
            routes.add_api_route(path, self.ready, responses=described(503))

        has_keys = [Depends(HTTPBearer(auto_error=False))] if self.settings.closed else []
        closed = APIRouter(dependencies=has_keys)
        wrong = described(400, 401, 408, 413, 422, 429, 500, 503, 504)
        any_response = RerankResponse | list[others.TextScore] | others.RankingResponse
        rerank = (RerankRequest, RerankResponse)
        rerank_any = (AnyRerankRequest, any_response)
        score = (others.ScoreRequest, others.ScoreResponse)
        posts: dict[str, tuple[Any, Any]] = {
            "/v1/rerank": rerank,
            "/v2/rerank": rerank,
            "/providers/cohere/v2/rerank": rerank,
            "/v1/reranking": rerank_any,
            "/rerank": rerank_any,
            "/reranking": rerank_any,
            "/api/rerank": rerank_any,
            "/score": score,
            "/v1/score": score,
            "/v1/ranking": (others.RankingRequest, others.RankingResponse),
            "/explain": (ExplainRequest, ExplainResponse),
        }
        for path, (kind, model) in posts.items():
            closed.add_api_route(
                path,
                self._endpoint(kind),
                methods=["POST"],
                response_model=model,
                responses=wrong,
                name=path.rpartition("/")[2],
            )
        listed = described(401, 503)
        for path in ("/v1/models", "/providers/cohere/v2/models"):
            closed.add_api_route(path, self.models, responses=listed)
        closed.add_api_route(
            "/v1/models/{name:path}", self.model, responses=described(401, 404, 503)
        )
        closed.add_api_route(
            "/info", self.info, responses=listed, response_model_exclude_unset=True
        )
        counters = {**described(401), **_text("text/plain")}
        closed.add_api_route(
            "/metrics", self.metrics_page, response_class=Response, responses=counters
        )
        routes.include_router(closed)
        return routes

    def _endpoint(self, kind: Any) -> Callable[..., Awaitable[Response]]:
        """A function that answers requests of one kind."""
        answer = self._explain if kind is ExplainRequest else self._answer

        async def endpoint(body: Annotated[kind, Body()], request: Request) -> Response:
            return await answer(body, request)

        return endpoint

    async def _answer(self, body: ScoringRequest, request: Request) -> Response:
        scores = await self._scores(request, body)
        # In a thread, because a long text may have very many sentences.
        answer = await asyncio.to_thread(body.answer, scores)
        request.state.record.kept = len(getattr(answer, "results", scores.places))
        headers = {NONE_RELEVANT: str(scores.none_relevant).lower()}
        return _json(answer, headers)

    async def _explain(self, body: ExplainRequest, request: Request) -> Response:
        pair = Pair(
            body.query, body.document, instruction=body.instruction or None, salt=request.state.salt
        )
        question = Question([pair])
        self._check_size(question)
        request.state.record.documents = 1
        outcomes = await self._work(request, [pair], explain=True)
        faults, status = question.complaints(outcomes)
        if faults:
            raise request_error(faults, status)
        return _json(ExplainResponse.model_validate(outcomes[0].explanation, from_attributes=True))

    async def models(self) -> others.ModelList:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return others.ModelList(data=[await self.model("")])

    async def model(self, name: str) -> others.ModelCard:
        """The model that is served, whatever it is called: Xinference."""
        return others.ModelCard(id=self.backend.description.name, created=self.created)

    async def info(self) -> Info:
        """The model and the service's limits."""
        model = self.backend.description
        # Dify's plugin for TEI fails on a null.
        known: dict[str, Any] = (
            {} if model.max_tokens is None else {"max_input_length": model.max_tokens}
        )
        return Info(
            model_id=model.name,
            model_type={"reranker": {"id2label": {}, "label2id": {}}},
            threshold=model.threshold,
            explains=model.explains,
            max_client_batch_size=self.settings.max_documents,
            version=__version__,
            **known,
            **self.settings.model_dump(include=set(Info.model_fields)),
        )

    async def health(self) -> dict[str, str]:
        """Whether the service is alive."""
        return {"status": "ok"}

    async def auth(self) -> dict[str, bool]:
        """Whether requests need a key: Xinference."""
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
        if self.html is None:
            raise HTTPException(
                404, "This installation has no page. The service itself answers at /v1/rerank."
            )
        return HTMLResponse(self.html)

    async def _scores(self, request: Request, body: ScoringRequest) -> Scores:
        """Score a request's pairs, or raise the error that answers the request."""
        record = request.state.record
        partial = isinstance(body, RerankRequest) and bool(body.partial)
        lists = (getattr(body, name, ()) for name in ("documents", "texts", "text_2", "passages"))
        record.documents = max(map(len, lists))
        most = self.settings.max_documents
        if record.documents > most:
            raise RequestError(413, f"{record.documents:,} documents; a request may have {most:,}.")
        question = body.pairs_to_score()
        self._check_size(question)
        if question.faults and not partial:
            raise request_error(question.faults, 422)
        usable = [
            replace(pair, salt=request.state.salt)
            for place, pair in enumerate(question.pairs)
            if place not in question.faults
        ]
        outcomes = question.outcomes(await self._work(request, usable))
        record.tokens = sum(outcome.tokens for outcome in outcomes)
        faults, status = question.complaints(outcomes)
        if faults and not (partial and len(faults) < len(outcomes)):
            raise request_error(faults, status)
        return Scores(
            question,
            outcomes,
            self.backend.description,
            body.normalised(self.settings.normalize),
            faults,
            record.id,
            int(time.time()),
            self.settings.drop,
        )

    def _check_size(self, question: Question) -> None:
        most = self.settings.max_query_characters
        longest = max((len(pair.query) for pair in question.pairs), default=0)
        if longest > most:
            raise RequestError(413, f"The query has {longest:,} characters; it may have {most:,}.")
        most = self.settings.max_document_characters
        faults = {}
        for place, pair in enumerate(question.pairs):
            if len(pair.document) > most:
                faults[place] = f"has {len(pair.document):,} characters; it may have {most:,}."
        if faults:
            raise request_error(faults, 413)

    async def _work(
        self, request: Request, pairs: Sequence[Pair], *, explain: bool = False
    ) -> list[Outcome]:
        """Have the backend score pairs. If the client leaves, the work is cancelled.

        The time that the request has taken so far counts towards its timeout.
        """
        record = request.state.record
        limit = self.settings.timeout
        left = None if limit is None else max(0.001, limit - record.seconds)
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


def _json(
    body: BaseModel | Sequence[BaseModel], headers: Mapping[str, str] | None = None
) -> Response:
    """A response with the fields that have been set; unset optional fields stay out."""
    content = ANYTHING.dump_json(body, exclude_unset=True)
    return Response(content, headers=headers, media_type="application/json")


def _text(kind: str) -> dict[int | str, dict[str, Any]]:
    """Describes an answer that is no JSON, but has errors in JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}
