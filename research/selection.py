"""Validation queries for the numbers of a rule: threshold, gap and fallback.

The queries come from the training files in the way in which `research/mini` draws the queries that
`mini` is not trained on: typed queries by the source of their passages, the others by the hash of
the question.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rsrank_rag.evaluation.datasets import LabelledQuery, dataset_name

TYPED = ("everyday.passage", "realdocs.passage")
"""Sets of questions as people type them."""
LEFT_OUT = "nfcorpus"
"""Most candidates of this set are relevant. Rules are not made for such lists."""
APART = 0.1
"""Share of the sources of typed queries that validate; as in `research/mini/batches.py`."""
TYPED_COUNT = 190
"""Most queries of a typed set."""
PUBLIC_COUNT = 30
"""Most queries of each other set."""


def validation(folder: Path) -> dict[str, list[LabelledQuery]]:
    """Set -> validation queries of all training files of a folder."""
    sets = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = dataset_name(path)
        if name == LEFT_OUT:
            continue
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        count = PUBLIC_COUNT
        if name in TYPED:
            rows = list(filter(_is_apart, rows))
            count = TYPED_COUNT
        sets[name] = _first(rows, count)
    return sets


def _is_apart(row: dict[str, Any]) -> bool:
    """Whether a typed query validates, by its document or its entry in everyday."""
    source = row.get("of") or row["id"].rpartition("-")[0]
    return int(_digest(source)[:16], 16) < APART * 2**64


def _first(rows: Sequence[dict[str, Any]], count: int) -> list[LabelledQuery]:
    """So many queries, whatever their order in the file."""
    ordered = sorted(rows, key=_order)
    return [LabelledQuery.model_validate(row) for row in ordered[:count]]


def _order(row: dict[str, Any]) -> str:
    """A hash of the words of the question."""
    return _digest(" ".join(re.findall(r"\w+", row["query"].lower())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
