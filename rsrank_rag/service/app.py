"""The HTTP service: a FastAPI app in front of a `Scheduler`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter

from .. import __version__
from ..errors import InputError, RSRankError, needs
from ..reranker import Pair
from .backend import UnavailableError
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

Result = TypeVar("Result")

PAGE = Path(__file__).with_name("page.html")
ANYTHING = TypeAdapter(Any)


AnyRerankRequest = Annotated[
    Annotated[others.TextsRequest, Tag("TEI")] | Annotated[RerankRequest, Tag("rerank")],
    Discriminator(lambda body: "TEI" if isinstance(body, dict) and "texts" in body else "rerank"),
]
"""What ``/rerank`` takes: TEI's request if there are texts, else that of the others."""


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
        description="T x L; with the agreement, they are the score."
    )
    agreement: float = Field(
        description="What the document's agreement with the query adds; 0 where it has no part."
    )
    matches: tuple[float, ...] = Field(
        description="T: of it, what each token adds by its match; or empty."
    )


class Info(BaseModel):
    """What is served, and what is allowed."""

    model_id: str
    threshold: float | None
    explains: bool
    normalize: bool
    drop: bool
    max_documents: int
    max_client_batch_size: int
    max_body_bytes: int
    version: str


def create_app(backend: Scheduler, settings: Settings | None = None) -> FastAPI:
    """The service around a backend, whose start and end are the service's own."""
    chosen = settings or Settings()
    metrics = Metrics(backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await backend.start()
            if chosen.drop and backend.description.threshold is None:
                await backend.stop()
                raise InputError(
                    f"{backend.description.name} has no native threshold, so drop means nothing to it."
                )
        except RSRankError as error:
            app.state.failure = (
                error  # whoever started the app shows it better than a server's traceback
            )
            raise
        yield
        await backend.stop()

    app = FastAPI(
        title="rsrank_rag",
        description="Scores documents for a query and leaves the irrelevant ones out.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.failure, app.state.backend, app.state.settings, app.state.metrics = (
        None,
        backend,
        chosen,
        metrics,
    )
    app.include_router(_Service(backend, chosen, metrics).router())
    app.add_middleware(RequestMiddleware, settings=chosen, metrics=metrics)
    answer_errors(app)
    return app


class _Service:
    def __init__(self, backend: Scheduler, settings: Settings, metrics: Metrics) -> None:
        self.backend, self.settings, self.metrics = backend, settings, metrics
        self.created = int(time.time())
        self.html = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None

    def router(self) -> APIRouter:
        open_routes = APIRouter()
        page = {**described(404), **_text("text/html")}
        open_routes.add_api_route("/", self.page, response_class=Response, responses=page)
        open_routes.add_api_route("/health", self.health, response_model=dict[str, str])
        open_routes.add_api_route("/v1/cluster/auth", self.auth, response_model=dict[str, bool])
        open_routes.add_api_route(
            "/ready", self.ready, response_model=dict[str, str], responses=described(503)
        )

        # The middleware asks for keys; this only describes it.
        routes = APIRouter(
            dependencies=[Depends(HTTPBearer(auto_error=False))] if self.settings.closed else []
        )
        wrong = described(400, 401, 408, 413, 422, 429, 500, 503, 504)
        posts: dict[str, tuple[Any, Any]] = {
            "/v1/rerank": (self.rerank, RerankResponse),
            "/v2/rerank": (self.rerank, RerankResponse),
            "/rerank": (self.rerank_any, RerankResponse | list[others.TextScore]),
            "/score": (self.score, others.ScoreResponse),
            "/v1/score": (self.score, others.ScoreResponse),
            "/v1/ranking": (self.ranking, others.RankingResponse),
            "/explain": (self.explain, ExplainResponse),
        }
        for path, (endpoint, model) in posts.items():
            routes.add_api_route(
                path, endpoint, methods=["POST"], response_model=model, responses=wrong
            )
        listed = described(401, 503)
        routes.add_api_route(
            "/v1/models", self.models, response_model=others.ModelList, responses=listed
        )
        routes.add_api_route(
            "/v1/models/{name:path}", self.model, response_model=others.ModelCard, responses=listed
        )
        routes.add_api_route("/info", self.info, response_model=Info, responses=described(401, 503))
        counters = {**described(401), **_text("text/plain")}
        routes.add_api_route(
            "/metrics", self.metrics_page, response_class=Response, responses=counters
        )
        open_routes.include_router(routes)
        return open_routes

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """Score documents for a query, best first: Cohere, Jina, vLLM, Infinity, Xinference, SiliconFlow."""
        cutoff = body.cutoff(self.backend.description, self.settings.drop)
        # Not in the loop: a long text may have very many sentences.
        found = await asyncio.to_thread(body.answer, await self._scores(request, body), cutoff)
        request.state.record.kept = len(found.results)
        return _json(found)

    async def rerank_any(
        self, body: Annotated[AnyRerankRequest, Body()], request: Request
    ) -> Response:
        """As TEI if there are texts, which are all in the answer; else as /v1/rerank."""
        if isinstance(body, RerankRequest):
            return await self.rerank(body, request)
        return _json(body.answer(await self._scores(request, body)))

    async def score(self, body: others.ScoreRequest, request: Request) -> Response:
        """Score pairs, in input order: vLLM."""
        return _json(body.answer(await self._scores(request, body)))

    async def ranking(self, body: others.RankingRequest, request: Request) -> Response:
        """Score passages for a query, best first, always raw: NVIDIA."""
        return _json(body.answer(await self._scores(request, body)))

    async def explain(self, body: ExplainRequest, request: Request) -> Response:
        """Take one score apart: what each token of the query adds to it in each layer."""
        pair = Pair(
            body.query, body.document, instruction=body.instruction or None, salt=request.state.salt
        )
        self._check_size(Question([pair]))
        request.state.record.documents = 1
        found = await self._work(request, self.backend.explain, pair)
        return _json(ExplainResponse.model_validate(found, from_attributes=True))

    async def models(self) -> others.ModelList:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return others.ModelList(data=[await self.model("")])

    async def model(self, name: str) -> others.ModelCard:
        """The model that is served, whatever it is called: Xinference."""
        return others.ModelCard(id=self.backend.description.name, created=self.created)

    async def info(self) -> Info:
        """What is served, and what is allowed."""
        model = self.backend.description
        return Info(
            model_id=model.name,
            threshold=model.threshold,
            explains=model.explains,
            max_client_batch_size=self.settings.max_documents,
            version=__version__,
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
        trouble = self.backend.readiness()
        if trouble is not None:
            raise UnavailableError(trouble)
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
        """Have what a request asks scored, or raise the error that it is answered with."""
        record, limits = request.state.record, self.settings
        partial = isinstance(body, RerankRequest) and bool(body.partial)
        # Counted before anything is made of them.
        record.documents = max(
            len(getattr(body, name, ())) for name in ("documents", "texts", "text_2", "passages")
        )
        if record.documents > (most := limits.max_documents):
            raise RequestError(413, f"{record.documents:,} documents; a request may have {most:,}.")
        question = body.asked()
        self._check_size(question)
        if question.faults and not partial:
            raise request_error(question.faults, 422)
        salt, faulty = request.state.salt, question.faults
        usable = [
            replace(pair, salt=salt)
            for place, pair in enumerate(question.pairs)
            if place not in faulty
        ]
        outcomes = question.outcomes(await self._work(request, self.backend.score, usable))
        record.tokens = sum(outcome.tokens for outcome in outcomes)
        faults, status = question.complaints(outcomes)
        if faults and not (partial and len(faults) < len(outcomes)):
            raise request_error(faults, status)
        record.kept = len(outcomes) - len(faults)
        normalised = body.normalised(limits.normalize)
        return Scores(
            question,
            outcomes,
            self.backend.description,
            normalised,
            faults,
            record.id,
            int(time.time()),
        )

    def _check_size(self, question: Question) -> None:
        limits = self.settings
        longest, most = (
            max((len(pair.query) for pair in question.pairs), default=0),
            limits.max_query_characters,
        )
        if longest > most:
            raise RequestError(413, f"The query has {longest:,} characters; it may have {most:,}.")
        most, lengths = (
            limits.max_document_characters,
            [len(pair.document) for pair in question.pairs],
        )
        long = {
            i: f"has {n:,} characters; it may have {most:,}."
            for i, n in enumerate(lengths)
            if n > most
        }
        if long:
            raise request_error(long, 413)

    async def _work(
        self, request: Request, ask: Callable[..., Coroutine[Any, Any, Result]], what: Any
    ) -> Result:
        """Ask the backend for a client; if it leaves, the work is cancelled and an error raised that nobody will read.

        The time that the request has taken so far is part of what it may take.
        """
        record, limit = request.state.record, self.settings.timeout
        left = None if limit is None else max(0.001, limit - record.seconds)
        task = asyncio.ensure_future(ask(what, client=record.client, timeout=left))
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


def _json(body: BaseModel | Sequence[BaseModel]) -> Response:
    """A response with what has been set: optional fields that nobody asked for stay out."""
    return Response(ANYTHING.dump_json(body, exclude_unset=True), media_type="application/json")


def _text(kind: str) -> dict[int | str, dict[str, Any]]:
    """An answer that is no JSON; a response class of that kind would promise errors of the same kind."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}
