"""Shadow mode: what would have been dropped is logged, and nothing is dropped."""

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from .ranked import RankResult

logger = logging.getLogger("rsrank_rag.shadow")

# English has about 4.5 characters a token.
CHARACTERS_PER_TOKEN = 4


def log(result: RankResult) -> None:
    """Log a call in one line of JSON, without a word of its texts."""
    everything = (*result.kept, *result.dropped)
    saved = sum(len(document.text) for document in everything) - sum(map(len, result.texts))
    entry = {
        "threshold": result.threshold,
        "none_relevant": result.none_relevant,
        "kept": [[document.index, document.score] for document in result.kept],
        "dropped": [[document.index, document.score] for document in result.dropped],
        "characters_saved": saved,
    }
    logger.info(json.dumps({"shadow": entry}))


def everything(result: RankResult) -> RankResult:
    """The same documents in their first order, whole, and all of them kept."""
    documents = sorted((*result.kept, *result.dropped), key=attrgetter("index"))
    kept = tuple(replace(document, excerpts=()) for document in documents)
    return replace(result, kept=kept, dropped=())


def report(lines: Iterable[str]) -> dict[str, float]:
    """Sum up the calls that `log` wrote to a log; other lines are skipped.

    Returns:
        ``calls``, ``documents``, the share ``dropped`` of them, and about how many
        ``tokens_saved``. The number of calls ``with_threshold``, and of those ``none_relevant``.
    """
    calls: list[dict[str, Any]] = []
    for line in lines:
        if "shadow" not in line:
            continue
        try:
            entry = json.loads(line[line.find("{") :])
            # The service's log has the line in a line of its own.
            calls.append(json.loads(entry.get("message", "null")) or entry)
        except ValueError:
            continue
    calls = [call["shadow"] for call in calls if "shadow" in call]
    documents = sum(len(call["kept"] + call["dropped"]) for call in calls)
    with_threshold = [call["none_relevant"] for call in calls if call["threshold"] is not None]
    return {
        "calls": len(calls),
        "documents": documents,
        "dropped": sum(len(call["dropped"]) for call in calls) / max(documents, 1),
        "tokens_saved": sum(call["characters_saved"] for call in calls) // CHARACTERS_PER_TOKEN,
        "none_relevant": sum(with_threshold),
        "with_threshold": len(with_threshold),
    }
