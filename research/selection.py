"""Validation queries for the numbers of a rule: threshold, gap and fallback.

They are cut from the training files as `research/mini` cuts the queries that `mini` is not trained
on: those of real documents by their source, the others by the hash of the question.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rsrank_rag.evaluation.datasets import LabelledQuery, dataset_name

REAL = "realdocs.passage"
"""The set whose queries are cut by the source of their documents."""
SOURCES = 9
"""How many sources validate; as in `research/mini/typed.py`."""
TYPED = {"everyday.passage": 200, REAL: 200}
"""Sets of questions as people type them, and how many queries validate at most."""
PUBLIC = 30
"""How many queries of each other set validate."""


def validation(folder: Path) -> dict[str, list[LabelledQuery]]:
    """Set -> validation queries of all training files of a folder."""
    sets = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = dataset_name(path)
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        if name == REAL:
            sources = sorted({row["of"] for row in rows}, key=_digest)[:SOURCES]
            rows = [row for row in rows if row["of"] in sources]
        sets[name] = _first(rows, TYPED.get(name, PUBLIC))
    return sets


def _first(rows: Sequence[dict], count: int) -> list[LabelledQuery]:
    """So many queries, whatever their order in the file."""
    ordered = sorted(rows, key=lambda row: _digest(_words(row["query"])))
    return [LabelledQuery.model_validate(row) for row in ordered[:count]]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
