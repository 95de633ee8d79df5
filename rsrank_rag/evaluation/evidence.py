"""What reaches the LLM: the evidence in it, and what it costs in tokens. No answers are generated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from .metrics import ScoredQuery


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number a query in every list.

    Attributes:
        documents: Documents sent.
        tokens: Their tokens.
        recall: Share of the relevant documents that were sent; 1 where nothing is relevant.
        precision: Share of the documents sent that are relevant; 1 where nothing was sent and nothing is relevant, 0
            where nothing was sent and something is.
        token_precision: The same of the tokens sent.
        complete: 1 where every relevant document was sent: a question over several documents has no answer without.
    """

    documents: list[float]
    tokens: list[float]
    recall: list[float]
    precision: list[float]
    token_precision: list[float]
    complete: list[float]


def sent_above(queries: Sequence[ScoredQuery], thresholds: Sequence[float]) -> list[list[int]]:
    """Positions of the documents above each query's own threshold, best first.

    >>> sent_above([ScoredQuery([1.0, 3.0, 2.0], [True] * 3)], [1.5])
    [[1, 2]]
    """
    return [
        [place for place in query.order() if query.scores[place] > threshold]
        for query, threshold in zip(queries, thresholds, strict=True)
    ]


def sent_top(queries: Sequence[ScoredQuery], k: int) -> list[list[int]]:
    """Positions of each query's best k documents, best first; all of a query that has fewer."""
    return [query.order()[:k] for query in queries]


def evidence(
    queries: Sequence[ScoredQuery], sent: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> Evidence:
    """Evidence in what was sent.

    Args:
        queries: Labelled queries.
        sent: For each query, positions of the documents sent.
        tokens: For each query, the tokens of each of its documents.

    Raises:
        InputError: A query has not one number of tokens a document.
    """
    rows = []
    for number, (query, places, lengths) in enumerate(zip(queries, sent, tokens, strict=True)):
        if len(lengths) != len(query.relevant):
            raise InputError(f"Query {number} has {len(query.relevant)} documents but {len(lengths)} token counts.")
        good = [place for place in places if query.relevant[place]]
        relevant = sum(map(bool, query.relevant))
        total = sum(lengths[place] for place in places)
        empty = 0.0 if relevant else 1.0
        rows.append(
            (
                float(len(places)),
                float(total),
                len(good) / relevant if relevant else 1.0,
                len(good) / len(places) if places else empty,
                sum(lengths[place] for place in good) / total if total else empty,
                float(len(good) == relevant),
            )
        )
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(6)]
    return Evidence(*columns)
