"""Shadow mode: what would have been dropped is logged, and nothing is dropped."""

import json
import logging
from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel

from .ranked import RankResult

logger = logging.getLogger("rsrank_rag.shadow")

# English has about 4.5 characters a token.
CHARACTERS_PER_TOKEN = 4


class Call(BaseModel):
    """One call in shadow mode. Documents are pairs of index and score."""

    threshold: float | None
    none_relevant: bool
    kept: list[tuple[int, float]]
    dropped: list[tuple[int, float]]
    characters_saved: int


class LogLine(BaseModel):
    """A line of the log."""

    shadow: Call


def log(result: RankResult) -> None:
    """Log a call in one line of JSON, without a word of its texts."""
    saved = sum(len(document.text) for document in result.in_order) - sum(map(len, result.texts))
    call = Call(
        threshold=result.threshold,
        none_relevant=result.none_relevant,
        kept=[(document.index, document.score) for document in result.kept],
        dropped=[(document.index, document.score) for document in result.dropped],
        characters_saved=saved,
    )
    logger.info(json.dumps(LogLine(shadow=call).model_dump()))


def everything(result: RankResult) -> RankResult:
    """The same documents in their first order, whole, and all of them kept."""
    kept = tuple(replace(document, excerpts=()) for document in result.in_order)
    return replace(result, kept=kept, dropped=())


def report(lines: Iterable[str]) -> dict[str, float]:
    """Sum up the calls that `log` wrote to a log; other lines are skipped.

    Returns:
        ``calls``, ``documents``, the share ``dropped`` of them, and about how many
        ``tokens_saved``. The number of calls ``with_threshold``, and of those ``none_relevant``.
    """
    calls = []
    for line in lines:
        if "shadow" not in line:
            continue
        # What stands before the line may have braces, too.
        start = '{"shadow"' if '{"shadow"' in line else "{"
        text = "".join(line.partition(start)[1:])
        try:
            # The service's log has the line as the message of a line of its own.
            text = json.loads(text).get("message", text)
            calls.append(LogLine.model_validate_json(text).shadow)
        except (ValueError, RecursionError):
            continue
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
