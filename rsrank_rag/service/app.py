"""The HTTP service: a FastAPI app in front of a `Backend`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from .. import __version__
from ..errors import InputError, MissingDependencyError, RSRankError, ScoringError
from ..reranker import Pair
from .backend import Backend, DeadlineError, Outcome, OverloadedError, ServiceError
from .dialects import (
    AnyRerankRequest,
    Error,
    ExplainRequest,
    ExplainResponse,
    Heading,
    ModelList,
    Question,
    RankingRequest,
    RankingResponse,
    RefusedError,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    TextScore,
    TextsRequest,
    complaints,
    error_body,
    explain_response,
    model_list,
    ranking_response,
    refusal,
    rerank_response,
    score_response,
    texts_response,
)

try:
    from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse
    from fastapi.security import HTTPBearer
    from prometheus_client import CONTENT_TYPE_LATEST
    from pydantic_core import to_json
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .logs import Record
    from .metrics import Metrics
except ModuleNotFoundError as error:
    if error.name not in ("fastapi", "prometheus_client", "pythonjsonlogger", "starlette"):
        raise
    raise MissingDependencyError(
        f"The service needs {error.name}. Install with: pip install 'rsrank-rag[serve]'"
    ) from error

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_Asks = RerankRequest | TextsRequest | ScoreRequest | RankingRequest

OPEN = frozenset({"/", "/health", "/ready"})
"""Routes that need no key."""

QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are asked all the time: logged at DEBUG only."""

PAGE = Path(__file__).with_name("page.html")

RETRY_AFTER = 5.0
"""Seconds to stay away from a service without a model, if it has no better idea."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Settings(BaseModel):
    """What the service allows, and how it answers unless a request says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # it may be a key

    api_keys: tuple[SecretStr, ...] = ()
    """Any of them opens the service; without any it is open."""
    max_documents: int = Field(default=1000, ge=1)
    """Documents of a request."""
    max_query_characters: int = Field(default=10_000, ge=1)
    max_document_characters: int = Field(default=1_000_000, ge=1)
    max_document_tokens: int | None = Field(default=None, ge=1)
    """A longer document is refused, unless the request asks for it to be cut. Needs a model that counts tokens."""
    max_body_bytes: int = Field(default=20_000_000, ge=1)
    timeout: float | None = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds from a request's arrival to its answer; None for ever."""
    normalize: bool = False
    """Scores between 0 and 1."""
    drop: bool = False
    """Leave out what does not score above the model's native threshold, where the shape of the answer allows it."""

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty")
        return keys


class Status(BaseModel):
    """Of the service."""

    status: str


class Info(BaseModel):
    """What is served, and what is allowed."""

    model_id: str
    threshold: float | None
    explains: bool
    normalize: bool
    drop: bool
    max_documents: int
    max_client_batch_size: int
    max_document_tokens: int | None
    max_body_bytes: int
    version: str


def create_app(backend: Backend, settings: Settings | None = None) -> FastAPI:
    """The service. Its start and end are the backend's.

    Args:
        backend: Scores pairs.
        settings: Limits, keys and defaults.
    """
    chosen = settings or Settings()
    metrics = Metrics(backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await backend.start()
            if chosen.drop and backend.description.threshold is None:
                await backend.stop()
                raise InputError(f"{backend.description.name} has no native threshold, so drop means nothing to it.")
        except RSRankError as error:
            app.state.failure = error  # whoever started the app can say it better than a server's traceback
            raise
        yield
        await backend.stop()

    app = FastAPI(
        title="rsrank_rag",
        description="Scores documents for a query and drops the irrelevant ones.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.failure = None
    app.include_router(_Service(backend, chosen, metrics).router())
    app.add_middleware(_Gate, settings=chosen, metrics=metrics)
    _handle_errors(app)
    return app


class _Service:
    """The routes."""

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics) -> None:
        self.backend, self.settings, self.metrics_of = backend, settings, metrics
        self.created = int(time.time())
        self.html = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None

    def router(self) -> APIRouter:
        """All routes, with their errors."""
        open_routes = APIRouter()
        page = {**_errors(404), **_text("text/html")}
        open_routes.add_api_route("/", self.page, response_class=Response, responses=page)
        open_routes.add_api_route("/health", self.health, response_model=Status)
        open_routes.add_api_route("/ready", self.ready, response_model=Status, responses=_errors(503))

        # The gate asks for keys; this only describes it.
        routes = APIRouter(dependencies=[Depends(HTTPBearer(auto_error=False))] if self.settings.api_keys else [])
        wrong = _errors(400, 401, 408, 413, 422, 429, 500, 503, 504)
        posts: tuple[tuple[tuple[str, ...], Any, Any], ...] = (
            (("/v1/rerank", "/v2/rerank"), self.rerank, RerankResponse),
            (("/rerank",), self.rerank_any, RerankResponse | list[TextScore]),
            (("/score", "/v1/score"), self.score, ScoreResponse),
            (("/v1/ranking",), self.ranking, RankingResponse),
            (("/explain",), self.explain, ExplainResponse),
        )
        for paths, endpoint, model in posts:
            for path in paths:
                routes.add_api_route(path, endpoint, methods=["POST"], response_model=model, responses=wrong)
        routes.add_api_route("/v1/models", self.models, response_model=ModelList, responses=_errors(401, 503))
        routes.add_api_route("/info", self.info, response_model=Info, responses=_errors(401, 503))
        counters = {**_errors(401), **_text("text/plain")}
        routes.add_api_route("/metrics", self.metrics, response_class=Response, responses=counters)
        open_routes.include_router(routes)
        return open_routes

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """Score documents for a query, best first: Cohere, Jina, vLLM, Infinity, Xinference, SiliconFlow."""
        description = self.backend.description
        cutoff = body.cutoff(description, self.settings.drop)
        question, outcomes, faults = await self._ask(request, body, partial=bool(body.partial))
        found = rerank_response(
            body,
            question,
            outcomes,
            self._heading(request),
            cutoff=cutoff,
            normalised=body.normalised(self.settings.normalize),
            faults=faults,
        )
        _record(request).kept = len(found.results)
        return _json(found)

    async def rerank_any(self, body: Annotated[AnyRerankRequest, Body()], request: Request) -> Response:
        """As TEI if there are texts, which are all in the answer; else as /v1/rerank."""
        if isinstance(body, RerankRequest):
            return await self.rerank(body, request)
        return await self._texts(body, request)

    async def _texts(self, body: TextsRequest, request: Request) -> Response:
        question, outcomes, _ = await self._ask(request, body)
        threshold = self.backend.description.threshold
        return _json(texts_response(body, question, outcomes, threshold, body.normalised(self.settings.normalize)))

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """Score pairs, in input order: vLLM."""
        _, outcomes, _ = await self._ask(request, body)
        return _json(score_response(outcomes, self._heading(request), body.normalised(self.settings.normalize)))

    async def ranking(self, body: RankingRequest, request: Request) -> Response:
        """Score passages for a query, best first, always raw: NVIDIA."""
        question, outcomes, _ = await self._ask(request, body)
        return _json(ranking_response(question, outcomes))

    async def explain(self, body: ExplainRequest, request: Request) -> Response:
        """Take one score apart: what each token of the query adds to it in each layer.

        Of a document beyond the service's limit of tokens, the first ones are read; the answer says so.
        """
        pair = Pair(body.query, body.document, self.settings.max_document_tokens)
        self._check_size(Question([pair]))
        record = _record(request)
        record.documents = 1
        work = self.backend.explain(pair, client=record.client, timeout=self._time_left(record))
        return _json(explain_response(await _while_connected(request, work)))

    async def models(self, request: Request) -> Response:
        """The model that is served, as OpenAI and NVIDIA list models."""
        return _json(model_list(Heading("", self.created, self.backend.description)))

    async def info(self) -> Info:
        """What is served, and what is allowed."""
        description, settings = self.backend.description, self.settings
        return Info(
            model_id=description.name,
            threshold=description.threshold,
            explains=description.explains,
            normalize=settings.normalize,
            drop=settings.drop,
            max_documents=settings.max_documents,
            max_client_batch_size=settings.max_documents,
            max_document_tokens=settings.max_document_tokens,
            max_body_bytes=settings.max_body_bytes,
            version=__version__,
        )

    async def health(self) -> Status:
        """Whether the service is alive."""
        return Status(status="ok")

    async def ready(self) -> Status:
        """Whether requests are answered, and the last canary scored as it should."""
        trouble = self.backend.readiness()
        if trouble is not None:
            raise HTTPException(503, trouble, {"Retry-After": str(int(RETRY_AFTER))})
        return Status(status="ready")

    async def metrics(self) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(self.metrics_of.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """A page to try the model on."""
        if self.html is None:
            raise HTTPException(404, "This installation has no page. The service itself answers at /v1/rerank.")
        return HTMLResponse(self.html)

    async def _ask(
        self, request: Request, body: _Asks, *, partial: bool = False
    ) -> tuple[Question, list[Outcome], dict[int, str]]:
        """Have what a request asks scored.

        Returns:
            The question as it was scored, one outcome a pair, and what is wrong with those that are to be left out.

        Raises:
            RefusedError: It is too large, or documents have no score and ``partial`` does not allow for that.
            ServiceError: See `Backend.score`.
        """
        record = _record(request)
        record.documents = body.count
        if body.count > self.settings.max_documents:  # before anything is made of them
            most = self.settings.max_documents
            raise RefusedError(413, f"{body.count:,} documents; a request may have {most:,}.")
        question = body.asked()
        self._check_size(question)
        if question.faults and not partial:
            raise refusal(question.faults, 422)
        question = question.bounded(self.settings.max_document_tokens)
        work = self.backend.score(question.usable, client=record.client, timeout=self._time_left(record))
        outcomes = question.outcomes(await _while_connected(request, work))
        record.tokens = sum(outcome.tokens for outcome in outcomes)
        faults, status = complaints(question, outcomes)
        if faults and not (partial and len(faults) < len(outcomes)):
            raise refusal(faults, status)
        record.kept = len(outcomes) - len(faults)
        return question, outcomes, faults

    def _check_size(self, question: Question) -> None:
        limits = self.settings
        longest = max((len(pair.query) for pair in question.pairs), default=0)
        if longest > limits.max_query_characters:
            raise RefusedError(
                413, f"The query has {longest:,} characters; it may have {limits.max_query_characters:,}."
            )
        most = limits.max_document_characters
        long = {
            place: f"has {len(pair.document):,} characters; it may have {most:,}."
            for place, pair in enumerate(question.pairs)
            if len(pair.document) > most
        }
        if long:
            raise refusal(long, 413)

    def _time_left(self, record: Record) -> float | None:
        return None if self.settings.timeout is None else max(0.001, self.settings.timeout - record.seconds)

    def _heading(self, request: Request) -> Heading:
        return Heading(_record(request).id, int(time.time()), self.backend.description)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do work for a client; if it leaves, the work is cancelled.

    Raises:
        HTTPException: It left; nobody will read this.
    """
    task = asyncio.ensure_future(work)
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


def _record(request: Request) -> Record:
    record = request.state.record
    assert isinstance(record, Record)
    return record


def _json(body: BaseModel | Sequence[BaseModel]) -> Response:
    """A response with what has been set: fields that a shape leaves out stay out."""
    if isinstance(body, BaseModel):
        return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")
    return Response(to_json([row.model_dump(exclude_unset=True) for row in body]), media_type="application/json")


# Errors


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error} for status in statuses}


def _text(kind: str) -> dict[int | str, dict[str, Any]]:
    """An answer that is no JSON; a response class of that kind would promise errors of the same kind."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


def _error(
    status: int, message: str, documents: dict[int, str] | None = None, retry_after: float | None = None
) -> Response:
    headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    body = error_body(status, message, documents).model_dump_json(exclude_none=True)
    return Response(body, status, headers, media_type="application/json")


def _handle_errors(app: FastAPI) -> None:
    """Give every error the same body."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        return _error(error.status, str(error), error.documents)

    async def wrong_input(request: Request, error: Exception) -> Response:
        return _error(422, str(error))

    async def unanswered(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        status = 429 if isinstance(error, OverloadedError) else 504 if isinstance(error, DeadlineError) else 503
        return _error(status, str(error), retry_after=error.retry_after or (RETRY_AFTER if status != 504 else None))

    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, str(error))

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _error(400, *_what_is_malformed(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = _error(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(InputError, wrong_input)
    app.add_exception_handler(ScoringError, wrong_input)
    app.add_exception_handler(ServiceError, unanswered)
    app.add_exception_handler(RSRankError, failed)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)


_BRANCHES = frozenset({"body", "TEI", "rerank"})
_LISTS = frozenset({"documents", "texts", "passages"})


def _what_is_malformed(errors: Sequence[Any]) -> tuple[str, dict[int, str]]:
    """What pydantic found, without what the client sent: a sentence, and the documents that it is about."""
    found: dict[str, list[str]] = {}
    documents: dict[int, list[str]] = {}
    for error in errors:
        if error["type"] == "json_invalid":
            return f"The body is not JSON: {error.get('ctx', {}).get('error', 'it cannot be parsed')}.", {}
        path = [part for part in error["loc"] if part not in _BRANCHES]
        numbers = [place for place, part in enumerate(path) if isinstance(part, int)]
        if numbers:  # what comes after is a branch of a union, or inside the document
            path = path[: numbers[0] + 1]
        told = str(error["msg"]).removeprefix("Value error, ")
        name = ".".join(map(str, path[:2])) or "The body"
        found.setdefault(name, []).append(told)
        if len(path) > 1 and path[0] in _LISTS and isinstance(path[1], int):
            documents.setdefault(path[1], []).append(told)

    def joined(messages: Sequence[str]) -> str:
        return " or ".join(dict.fromkeys(messages))

    lines = [f"{name}: {joined(messages)}" for name, messages in list(found.items())[:5]]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{'; '.join(lines)}{more}.", {index: joined(messages) for index, messages in documents.items()}


# Around every request


class _Gate:
    """Lets requests in that have a key and are not too large, gives each an id, and counts and logs them."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._keys = [key.get_secret_value().strip().encode() for key in settings.api_keys]
        self._salt = os.urandom(16)  # without it, whoever reads the logs could try all addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        key = self._key(headers)
        record = Record(_id(headers), self._client(scope, key), scope["method"])
        scope["state"] = {**scope.get("state", {}), "record": record}
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            refused = self._refusal(scope, headers, key)
            if refused is None:
                await self.app(scope, _Body(receive, self.settings, record), send_marked)
            else:
                await refused(scope, receive, send_marked)
        except Exception:  # whatever it is, the client gets an answer and the next request is served
            logger.exception("A request failed.", extra={"id": record.id})
            if not started:
                await _error(500, "The service failed; its log says more.")(scope, receive, send_marked)
        finally:
            record.route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe(record)
            record.write(logging.DEBUG if record.route in QUIET else logging.INFO)

    def _key(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The key that a request brings, if it is one of ours."""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        # All are compared, so that the time taken says nothing about which one it is.
        right = [key for key in self._keys if hmac.compare_digest(key, given)]
        return right[0] if right and kind.lower() == b"bearer" else None

    def _client(self, scope: Scope, key: bytes | None) -> str:
        name = key if key is not None else (scope.get("client") or ("",))[0].encode()
        return hashlib.blake2b(name, digest_size=6, key=self._salt).hexdigest()

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], key: bytes | None) -> Response | None:
        if self._keys and key is None and scope["path"] not in OPEN:
            response = _error(401, "This service needs an API key: send it as 'Authorization: Bearer KEY'.")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            return _error(413, _too_many_bytes(self.settings))
        return None


def _id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _too_many_bytes(settings: Settings) -> str:
    return f"The body is too large; it may have {settings.max_body_bytes:,} bytes."


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
            raise HTTPException(413, _too_many_bytes(self._settings))
        return message
