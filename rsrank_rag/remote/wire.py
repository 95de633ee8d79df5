"""What goes over the wire: the request for scores, the answers, and the message of a refusal."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ..errors import InputError, RemoteError, ScoringError
from ..method.template import clean
from ..passages.parts import WHOLE, Excerpt, Reading, Window, encodable
from ..reranker import Scored


class _Row(BaseModel, strict=True):
    index: int
    relevance_score: float | None
    truncated: bool = False
    window: Window | None = None
    excerpts: list[Excerpt] | None = None


class _Fault(BaseModel, strict=True):
    index: int
    message: str


class Answer(BaseModel, strict=True):
    """Of ``/v1/rerank``."""

    model: str
    results: list[_Row]
    threshold: float | None = Field(allow_inf_nan=False)
    errors: list[_Fault] | None = None


class Info(BaseModel, strict=True):
    """Of ``/info``."""

    model: str = Field(validation_alias="model_id")
    threshold: float | None = Field(allow_inf_nan=False)


Body = TypeVar("Body", Answer, Info)


def request_body(
    model: str | None,
    query: str,
    documents: Sequence[str],
    reading: Reading,
    instruction: str | None = None,
) -> bytes:
    """The request for the raw scores of all documents; raises InputError if something is no text."""
    for name, text in (
        ("A query", query),
        *((f"Document {i}", text) for i, text in enumerate(documents)),
    ):
        if not isinstance(text, str):
            raise InputError(f"{name} must be a string, got {type(text).__name__}.")
    asked = {
        **({} if model is None else {"model": model}),
        **({} if instruction is None else {"instruction": clean(instruction)}),
        "query": clean(query),
        "documents": [(clean if reading == WHOLE else encodable)(text) for text in documents],
        **(
            {} if reading == WHOLE else {**asdict(reading), "context": 0}
        ),  # what is kept is decided here
        "partial": True,
        "threshold": None,  # this and the next are written out because a service may be set otherwise
        "normalize": False,
    }
    return json.dumps(asked, ensure_ascii=False).encode()


def parsed(kind: type[Body], body: bytes, address: str, model: str | None) -> Body:
    """An answer that is what it should be, from the model that was asked for; else RemoteError."""
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"])) or "the answer"
        raise RemoteError(
            f"{address} did not answer as an rsrank service does ({place}: {wrong['msg']}). Is it one?"
        ) from None
    if model is not None and found.model != model:
        raise RemoteError(
            f"{address} was asked for {model!r} and holds {found.model!r}. Give that name, or none."
        )
    return found


def scores_of(
    answer: Answer, documents: Sequence[str], address: str, reading: Reading
) -> list[Scored]:
    """Scores in the order of the documents: rows come in whichever, so that only their numbers count.

    Raises ScoringError: A document has no finite score; RemoteError: there is not one row or error for each of so many
    documents.
    """
    faults, count = answer.errors or [], len(documents)
    named = Counter([row.index for row in answer.results] + [fault.index for fault in faults])
    wrong = next((i for i in (*range(count), *named) if named[i] != 1 or not 0 <= i < count), None)
    if wrong is not None:
        raise RemoteError(
            f"{address} was asked about {count} documents and gave {named[wrong]} scores for document {wrong}, so none "
            "of its answer can be trusted."
        )
    if faults:
        first = min(faults, key=lambda fault: fault.index)
        more = f" So it is with {len(faults) - 1} more." if len(faults) > 1 else ""
        raise ScoringError(f"Document {first.index} {_line(first.message)}{more}", first.index)
    scored = []
    for row in sorted(answer.results, key=lambda row: row.index):
        if row.relevance_score is None or not math.isfinite(row.relevance_score):
            raise ScoringError(
                f"{address} gave document {row.index} the score {row.relevance_score}, which is none.",
                row.index,
            )
        if reading != WHOLE and row.excerpts is None and row.window is None:
            raise RemoteError(
                f"{address} reads documents whole. Its version is older than this one: update the service."
            )
        text = documents[row.index]
        sentences = tuple(
            replace(one, text=text[one.start : one.end]) for one in row.excerpts or ()
        )
        window = row.window if row.window and row.window.count > 1 else None  # what fits has none
        scored.append(Scored(row.relevance_score, row.truncated, 0, window, sentences))
    return scored


def message_of(body: bytes) -> str:
    """A service's message about an error, as a sentence to be put behind the status."""
    fields = _fields(body)
    texts = [
        text
        for text in (fields.get("message"), fields.get("detail"))
        if isinstance(text, str) and text.strip()
    ]
    return f": {_line(texts[0]).rstrip('.')}." if texts else "."


def first_document(body: bytes) -> int | None:
    """Number of the first document that an error is about."""
    documents = _fields(body).get("documents")
    first = documents[0] if isinstance(documents, list) and documents else None
    index = first.get("index") if isinstance(first, dict) else None
    return index if isinstance(index, int) else None


def _fields(body: bytes) -> dict[str, Any]:
    """Of an error; a proxy's page has none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
