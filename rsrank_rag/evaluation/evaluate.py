"""Run a reranker over a labelled set, and its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import InputError
from ..reranker import Reranker
from .datasets import LabelledQuery
from .metrics import ScoredQuery, best_threshold, f1_at, query_best_f1, ranking_metrics


class LabelledScorer(Protocol):
    """Scores documents knowing which of them are relevant: a yardstick, such as oracle similarity, no reranker."""

    threshold: float | None

    def score_labelled(self, query: LabelledQuery, *, titles: bool = True) -> list[float]:
        """One score a document, in input order."""


System = Reranker | LabelledScorer
"""What can be measured. Its ``threshold`` is its native one, or None."""


def score_dataset(system: System, queries: Iterable[LabelledQuery], *, titles: bool = True) -> list[ScoredQuery]:
    """Score every query's documents, one query after another.

    `titles`: put a document's title, if it has one, in front of its text.

    Raises:
        InputError: A score is not finite; the query is named.
    """
    return [_scored(system, query, titles) for query in queries]


def _scored(system: System, query: LabelledQuery, titles: bool) -> ScoredQuery:
    if isinstance(system, Reranker):
        scores = system.score(query.query, [document.content(titles=titles) for document in query.documents])
    else:
        scores = system.score_labelled(query, titles=titles)
    try:
        return ScoredQuery(scores, [document.relevant for document in query.documents])
    except InputError as error:
        raise InputError(f"Query {query.id!r}: {error}") from None


def summarise(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> dict[str, float]:
    """All metrics of one scored set, under the names used in papers and in ``rsrank evaluate --json``.

    Returns:
        Number of ``queries``; ``ndcg@5`` and ``recall@5``; ``f1@tau`` at the threshold, ``f1@best`` at the best single
        one for this set, ``tau_best``, and ``f1@query_best`` if every query had its own best one.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    tau_best, f1_best = best_threshold(scored)
    count = max(len(scored), 1)
    return {
        "queries": len(scored),
        **ranking_metrics(scored),
        "f1@tau": sum(f1_at(query, threshold) for query in scored) / count,
        "f1@best": f1_best,
        "tau_best": tau_best,
        "f1@query_best": sum(query_best_f1(query) for query in scored) / count,
    }


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    For scores without a natural zero (a cosine, BM25): the kindest threshold one could have tuned for all of them.
    """
    weights = [1.0 / len(queries) for queries in sets for _ in queries]
    return best_threshold([query for queries in sets for query in queries], weights)[0]
