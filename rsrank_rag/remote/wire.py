"""The bodies of requests and answers, and the scores in an answer."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from textwrap import shorten

from pydantic import BaseModel, Field, ValidationError

from ..errors import InputError, RemoteError, RSRankError, ScoringError, problems_of
from ..reading.parts import Excerpt, Window
from ..reranker import Fallback, RankCall, Scored
from ..texts import encodable
from .connections import httpx

# Too many requests, no service behind the proxy, not ready. A 504 is not among them: the same
# request would take as long again.
TRANSIENT = (429, 502, 503)


class _Row(BaseModel, strict=True):
    index: int
    relevance_score: float | None
    truncated: bool = False
    window: Window | None = None
    excerpts: list[Excerpt] = []


class Answer(BaseModel, strict=True):
    """The service's answer to ``/v1/rerank``; fields that are not needed here are ignored."""

    model: str
    results: list[_Row]
    threshold: float | None = Field(default=None, allow_inf_nan=False)
    max_gap: float | None = None
    fallback: Fallback | None = None
    query_truncated: bool = False


class _ErrorBody(BaseModel):
    """Body of an error. A proxy's page gives one without fields."""

    message: str = ""
    documents: list[dict[str, int | str]] = []


def request_body(model: str | None, call: RankCall) -> bytes:
    """The request for the raw scores of all documents."""
    body = {
        "model": model,
        # The places of windows and sentences count characters, so the length of a text stays.
        "query": encodable(call.query),
        "documents": [encodable(text) for text in call.texts],
        # These are sent because the service may have other defaults. Documents are dropped here.
        "threshold": None,
        "normalize": False,
        "extract": call.reading.extract,
        "max_characters": call.reading.max_characters,
        # Without a value, long documents are read as the service's model reads them by default.
        "long_documents": call.options.get("long_documents"),
    }
    return json.dumps(body, ensure_ascii=False).encode()


def parsed(
    body: bytes, documents: Sequence[str], address: str, model: str | None
) -> tuple[Answer, list[Scored]]:
    """An answer, and its scores in the order of the documents.

    Raises:
        RemoteError: The body is no answer of an rsrank service to these documents, or another
            model answered.
    """
    try:
        answer = Answer.model_validate_json(body)
    except ValidationError as error:
        raise RemoteError(
            f"{address} did not answer as an rsrank service does ({problems_of(error)}). Is it one?"
        ) from None
    if model not in (None, answer.model):
        raise RemoteError(
            f"Model {model!r} was requested, and {address} holds {answer.model!r}. "
            "Give that name, or none."
        )
    # The rows of an answer may have any order.
    rows = sorted(answer.results, key=attrgetter("index"))
    fits = [row.index for row in rows] == list(range(len(documents)))
    scores = []
    for row, document in zip(rows, documents, strict=fits):
        sentences = []
        parts: list[Excerpt | Window] = [*row.excerpts]
        for one in row.excerpts:
            sentences.append(replace(one, text=document[one.start : one.end]))
        if row.window:
            parts.append(row.window)
        fits = fits and all(0 <= part.start < part.end <= len(document) for part in parts)
        # `choose` refuses a score that is no number.
        score = math.nan if row.relevance_score is None else row.relevance_score
        scores.append(Scored(score, row.truncated, 0, row.window, tuple(sentences)))
    if not fits:
        raise RemoteError(
            f"{address} got {len(documents)} documents, and its answer does not give exactly one "
            "score for each of them, or names a place outside of a document, so that none of it "
            "can be trusted."
        )
    return answer, scores


def error_of(response: httpx.Response, content: bytes, address: str) -> RSRankError:
    """The error of an answer that is not a success."""
    status = response.status_code
    try:
        body = _ErrorBody.model_validate_json(content)
    except ValidationError:
        body = _ErrorBody()
    if status == 422 and body.documents:
        document = body.documents[0]
        return ScoringError(str(document["message"]), int(document["index"]))
    message = shorten(body.message, 500).rstrip(".")
    text = f"{address} answered {status}{': ' if message else ''}{message}."
    if status < 400 or status in (401, 403, 404, 405):
        text += " Check base_url, and the key in api_key or RSRANK_API_KEY."
    if status < 400 or status in (408, 429) or status >= 500:
        seconds = response.headers.get("Retry-After", "")
        retry_after = float(seconds) if seconds.isdecimal() else 0.0
        return RemoteError(text, status, status in TRANSIENT, retry_after)
    return InputError(text)
