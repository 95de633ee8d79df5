"""The bodies of requests and answers, and the scores in an answer."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Self

from ..errors import RemoteError, problems_of
from ..passages.parts import Excerpt, Window, encodable
from ..reranker import Fallback, RankCall, Scored


class _Row(BaseModel, strict=True):
    index: int
    relevance_score: float | None
    truncated: bool = False
    window: Window | None = None
    excerpts: list[Excerpt] | None = None


class _DocumentError(BaseModel):
    index: int
    message: str


class Answer(BaseModel, strict=True):
    """The service's answer to ``/v1/rerank``; fields that are not needed here are ignored."""

    model: str
    results: list[_Row]
    threshold: float | None = Field(allow_inf_nan=False)
    max_gap: float | None = None
    fallback: Fallback | None = None
    query_truncated: bool = False


class ErrorBody(BaseModel):
    """Body of an error. A proxy's page gives one without fields."""

    message: str = ""
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
        """The end of a sentence about a status: ``": Busy."``, or ``"."`` without a message."""
        if not self.message:
            return "."
        return f": {' '.join(self.message.split())[:500].rstrip('.')}."


def request_body(model: str | None, call: RankCall) -> bytes:
    """The request for the raw scores of all documents."""
    body = {
        "model": model,
        # The places of windows and sentences count characters, so the length of a text stays.
        "query": encodable(call.query),
        "documents": [encodable(text) for text in call.texts],
        "long_queries": call.options.get("long_queries", "cut"),
        # These are sent because the service may have other defaults. Documents are dropped here.
        "threshold": None,
        "normalize": False,
        **asdict(replace(call.reading, context=0)),
        # Without a value, long documents are read as the service's model reads them by default.
        "long_documents": call.options.get("long_documents"),
    }
    return json.dumps(body, ensure_ascii=False).encode()


def parsed(body: bytes, address: str, model: str | None) -> Answer:
    """A validated answer.

    Raises:
        RemoteError: The body is no answer of an rsrank service, or another model answered.
    """
    try:
        answer = Answer.model_validate_json(body)
    except ValidationError as error:
        raise RemoteError(
            f"{address} did not answer as an rsrank service does ({problems_of(error)}). Is it one?"
        ) from None
    if model is not None and answer.model != model:
        raise RemoteError(
            f"Model {model!r} was requested, and {address} holds {answer.model!r}. "
            "Give that name, or none."
        )
    return answer


def scores_of(answer: Answer, documents: Sequence[str], address: str) -> list[Scored]:
    """Scores in the order of the documents; the rows of an answer may have any order.

    Raises:
        RemoteError: There is not exactly one row for each document.
    """
    rows = sorted(answer.results, key=lambda row: row.index)
    if [row.index for row in rows] != list(range(len(documents))):
        raise RemoteError(
            f"{address} got {len(documents)} documents, and its answer does not give exactly one "
            "score for each of them, so that none of it can be trusted."
        )
    return [_scored(row, documents[row.index]) for row in rows]


def _scored(row: _Row, document: str) -> Scored:
    sentences = tuple(
        replace(excerpt, text=document[excerpt.start : excerpt.end])
        for excerpt in row.excerpts or ()
    )
    window = row.window
    # A document that fits the model is one window, which is not reported.
    if window is not None and window.count == 1:
        window = None
    # `choose` refuses a score that is no number.
    score = row.relevance_score
    if score is None:
        score = math.nan
    return Scored(score, row.truncated, 0, window, sentences)
