"""Shadow mode: what would have been dropped is logged, and nothing is dropped."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pydantic import BaseModel

from ..texts import CHARACTERS_PER_TOKEN
from .results import RankedDocument, RankResult

logger = logging.getLogger("rsrank_rag.shadow")


class Document(BaseModel):
    """A document of a call: its position, its score, and its id if it has one."""

    index: int
    score: float
    id: str | None = None

    @property
    def name(self) -> str:
        """The id, or the position."""
        return f"[{self.index}]" if self.id is None else self.id


class Call(BaseModel):
    """One call in shadow mode."""

    query: str
    request_id: str | None = None
    threshold: float | None
    none_relevant: bool
    kept: list[Document]
    dropped: list[Document]
    characters_saved: int

    def __str__(self) -> str:
        dropped = ", ".join(f"{one.name} {one.score:+.2f}" for one in self.dropped)
        return (
            f"{self.request_id or '-'}  {self.query!r}: {len(self.kept)} kept, "
            f"{len(self.dropped)} dropped: {dropped or '-'}"
        )


class LogLine(BaseModel):
    """A line of the log."""

    shadow: Call


def log(result: RankResult, request_id: str | None = None) -> None:
    """Log a call in one line of JSON, with its query, without a word of its documents.

    ``request_id`` is the id of the request or run, by which other logs name the call.
    """
    saved = sum(len(document.text) for document in result.in_order) - sum(map(len, result.texts))
    call = Call(
        query=result.query,
        request_id=request_id,
        threshold=result.threshold,
        none_relevant=result.none_relevant,
        kept=[_named(document) for document in result.kept],
        dropped=[_named(document) for document in result.dropped],
        characters_saved=saved,
    )
    logger.info(json.dumps(LogLine(shadow=call).model_dump()))


def _named(document: RankedDocument) -> Document:
    own_id = None if document.id is None else str(document.id)
    return Document(index=document.index, score=document.score, id=own_id)


def everything(result: RankResult) -> RankResult:
    """The same documents in their first order, whole, and all of them kept."""
    kept = tuple(replace(document, excerpts=()) for document in result.in_order)
    return replace(result, kept=kept, dropped=())


def read(lines: Iterable[str]) -> list[Call]:
    """The calls that `log` wrote to a log; other lines are skipped."""
    calls = []
    for line in lines:
        if "shadow" not in line:
            continue
        # What stands before the line may have braces, too.
        start = '{"shadow"' if '{"shadow"' in line else "{"
        text = "".join(line.partition(start)[1:])
        try:
            # A log of JSON lines has the line as the message of a line of its own.
            text = json.loads(text).get("message", text)
            calls.append(LogLine.model_validate_json(text).shadow)
        except (ValueError, RecursionError):
            continue
    return calls


def report(calls: Sequence[Call]) -> dict[str, float]:
    """Sum up calls.

    Returns:
        ``calls``, ``documents``, the share ``dropped`` of them, and about how many
        ``tokens_saved``. The number of calls ``with_threshold``, and of those ``none_relevant``.
    """
    dropped = sum(len(call.dropped) for call in calls)
    documents = dropped + sum(len(call.kept) for call in calls)
    with_threshold = [call.none_relevant for call in calls if call.threshold is not None]
    return {
        "calls": len(calls),
        "documents": documents,
        "dropped": dropped / max(documents, 1),
        "tokens_saved": sum(call.characters_saved for call in calls) // CHARACTERS_PER_TOKEN,
        "none_relevant": sum(with_threshold),
        "with_threshold": len(with_threshold),
    }
