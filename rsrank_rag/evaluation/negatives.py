"""Irrelevant candidates for a query: at random, as in the paper, or the hard ones that its Limitations ask for.

Hard ones are what BM25 ranks highest in the corpus and nobody has labelled relevant. Some may be relevant all the same:
labels of large corpora are never complete.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError
from .datasets import LabelledDocument, LabelledQuery
from .systems.bm25 import BM25

Kind = Literal["random", "bm25"]


class Negatives(BaseModel):
    """How a query's irrelevant documents are chosen: at random, or BM25's best."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = "random"
    count: int = Field(default=15, ge=0)  # documents a query; all there are where the corpus is smaller

    @classmethod
    def parse(cls, text: str) -> Negatives:
        """As on the command line: ``random`` or ``bm25``; else InputError."""
        if text not in get_args(Kind):
            raise InputError(f"Negatives are random or bm25, not {text!r}.")
        return cls.model_validate({"kind": text})


def choose(
    negatives: Negatives,
    queries: Sequence[tuple[str, str, Collection[int]]],
    size: int,
    read: Callable[[Sequence[int]], Sequence[str]],
    *,
    seed: int = 0,
) -> list[list[int]]:
    """Rows of each query's irrelevant documents; hard ones best first, random ones in random order.

    Documents that share no word with the query are no hard negatives: where BM25 finds too few, random ones follow.

    `queries`: id, text and the rows of the relevant documents of each. `size`: of the corpus. `read`: texts of some
    rows, as a reranker reads them. `seed`: of everything random. What a query gets depends on no other query.
    """
    ranked: Iterable[list[int]] = ([] for _ in queries)
    if negatives.kind == "bm25":
        depth = negatives.count + max((len(gold) for _, _, gold in queries), default=0)
        ranked = (_best(scores, depth) for scores in BM25().scores([text for _, text, _ in queries], read(range(size))))
    chosen = []
    for (key, _, gold), best in zip(queries, ranked, strict=True):
        hard = [row for row in best if row not in gold][: negatives.count]
        taken, rng = {*gold, *hard}, random.Random(f"{seed}:{key}")
        others = [row for row in rng.sample(range(size), min(size, negatives.count + len(gold))) if row not in taken]
        chosen.append([*hard, *others[: negatives.count - len(hard)]])
    return chosen


def _best(scores: Sequence[float], depth: int) -> list[int]:
    """Rows with a score, none without a common word; the highest first, of equal ones the first."""
    rows = np.argsort(-np.asarray(scores), kind="stable")[:depth]
    return [int(row) for row in rows if scores[row] > 0]


def replace_negatives(
    queries: Sequence[LabelledQuery],
    negatives: Negatives,
    *,
    titles: bool = True,
    seed: int = 0,
) -> list[LabelledQuery]:
    """The queries with their relevant documents and other irrelevant ones, from the candidates of all queries.

    `titles`: the first stage reads a document's title in front of its text.
    """
    corpus: dict[tuple[str | None, str], LabelledDocument] = {}
    for query in queries:
        for document in query.documents:
            corpus.setdefault((document.title, document.text), document)
    documents = list(corpus.values())
    place = {key: number for number, key in enumerate(corpus)}
    wanted = [
        (query.id, query.query, {place[d.title, d.text] for d in query.documents if d.relevant}) for query in queries
    ]

    def read(rows: Sequence[int]) -> list[str]:
        return [documents[row].content(titles=titles) for row in rows]

    found = choose(negatives, wanted, len(documents), read, seed=seed)
    changed = []
    for query, rows in zip(queries, found, strict=True):
        # An id may stand for another text at another query.
        others = [documents[row].model_copy(update={"id": f"negative-{row}", "relevant": False}) for row in rows]
        mixed = [document for document in query.documents if document.relevant] + others
        random.Random(f"order:{seed}:{query.id}").shuffle(mixed)
        changed.append(query.model_copy(update={"documents": tuple(mixed)}))
    return changed
