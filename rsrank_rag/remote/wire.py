"""The bodies of requests and answers, and the scores in an answer."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Self

from ..errors import InputError, RemoteError, ScoringError
from ..method.template import clean
from ..passages.parts import WHOLE, Excerpt, Reading, Window, encodable
from ..reranker import LongQueries, Scored


class _Row(BaseModel, strict=True):
    index: int
    relevance_score: float | None
    truncated: bool = False
    window: Window | None = None
    excerpts: list[Excerpt] | None = None


class _DocumentError(BaseModel, strict=True):
    index: int
    message: str = ""


class Answer(BaseModel, strict=True):
    """The service's answer to ``/v1/rerank``; fields that are not needed here are ignored."""

    model: str
    results: list[_Row]
    threshold: float | None = Field(allow_inf_nan=False)
    errors: list[_DocumentError] | None = None
    query_truncated: bool = False


class Info(BaseModel, strict=True):
    """Answer of ``/info``."""

    model: str = Field(validation_alias="model_id")
    threshold: float | None = Field(allow_inf_nan=False)


class ErrorBody(BaseModel):
    """Body of an error. A proxy's page gives one without fields."""

    message: str = ""
    detail: Any = None
    documents: list[_DocumentError] = []

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a body of any kind."""
        try:
            return cls.model_validate_json(body)
        except ValidationError:
            return cls()

    @property
    def text(self) -> str:
        """The service's words, to be put after a status: ``": Busy."``, or ``"."``."""
        text = self.message
        # FastAPI's own errors have a text here, or a list that repeats the request's texts.
        if not text and isinstance(self.detail, str):
            text = self.detail
        if not text:
            return "."
        return f": {_one_line(text).rstrip('.')}."


Body = TypeVar("Body", Answer, Info)


def request_body(
    model: str | None,
    query: str,
    documents: Sequence[str],
    reading: Reading,
    instruction: str | None = None,
    long_queries: LongQueries = "cut",
) -> bytes:
    """The request for the raw scores of all documents.

    Raises:
        InputError: The query or a document is not a string.
    """
    if not isinstance(query, str):
        raise InputError(f"A query must be a string, got {type(query).__name__}.")
    for index, text in enumerate(documents):
        if not isinstance(text, str):
            raise InputError(f"Document {index} must be a string, got {type(text).__name__}.")
    # These are sent because the service may have other defaults. Documents are dropped here.
    body: dict[str, Any] = {"partial": True, "threshold": None, "normalize": False}
    body["query"] = clean(query)
    if long_queries != "cut":
        body["long_queries"] = long_queries
    if model is not None:
        body["model"] = model
    if instruction is not None:
        body["instruction"] = clean(instruction)
    if reading == WHOLE:
        body["documents"] = [clean(text) for text in documents]
    else:
        # The places of windows and sentences count characters, so the length must stay.
        body["documents"] = [encodable(text) for text in documents]
        body |= asdict(replace(reading, context=0))
    return json.dumps(body, ensure_ascii=False).encode()


def parsed(kind: type[Body], body: bytes, address: str, model: str | None) -> Body:
    """A validated answer.

    Raises:
        RemoteError: It is not that of an rsrank service, or another model answered.
    """
    try:
        answer = kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the answer"
        raise RemoteError(
            f"{address} did not answer as an rsrank service does ({place}: {problem['msg']}). "
            "Is it one?"
        ) from None
    if model is not None and answer.model != model:
        raise RemoteError(
            f"Model {model!r} was requested, and {address} holds {answer.model!r}. "
            "Give that name, or none."
        )
    return answer


def scores_of(
    answer: Answer, documents: Sequence[str], address: str, reading: Reading
) -> list[Scored]:
    """Scores in the order of the documents; the rows of an answer may have any order.

    Raises:
        ScoringError: A document has no finite score.
        RemoteError: There is not exactly one row or one error for each document.
    """
    errors = sorted(answer.errors or [], key=lambda error: error.index)
    rows = sorted(answer.results, key=lambda row: row.index)
    indices = sorted([row.index for row in rows] + [error.index for error in errors])
    if indices != list(range(len(documents))):
        raise RemoteError(
            f"{address} got {len(documents)} documents, and its answer does not give exactly one "
            "score or error for each of them, so that none of it can be trusted."
        )
    if errors:
        first = errors[0]
        raise ScoringError(_one_line(first.message), first.index)
    return [_scored(row, documents[row.index], address, reading) for row in rows]


def _scored(row: _Row, document: str, address: str, reading: Reading) -> Scored:
    if row.relevance_score is None or not math.isfinite(row.relevance_score):
        raise ScoringError(
            f"scored {row.relevance_score} at {address}, which is not finite.", row.index
        )
    if reading != WHOLE and row.excerpts is None and row.window is None:
        raise RemoteError(
            f"{address} does not read documents in parts. Its version is older than this one: "
            "update the service."
        )
    sentences = []
    for excerpt in row.excerpts or ():
        sentences.append(replace(excerpt, text=document[excerpt.start : excerpt.end]))
    window = row.window
    # A document that fits the model is one window, which is not reported.
    if window is not None and window.count == 1:
        window = None
    return Scored(row.relevance_score, row.truncated, 0, window, tuple(sentences))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
