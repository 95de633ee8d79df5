"""Run a reranker over a labelled set and put its metrics into one record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InputError
from ..reranker import Reranker
from .datasets import LabelledQuery
from .metrics import ScoredQuery, best_threshold, f1_at, query_best_f1, ranking_metrics


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of one reranker on one dataset, fractions of 1.

    Attributes:
        dataset: Name of the set.
        queries: Number of queries.
        ndcg5: nDCG at rank 5.
        recall5: Recall at rank 5.
        f1_tau: F1 at the threshold the reranker is used with.
        f1_best: F1 at the best single threshold for this set.
        tau_best: That threshold.
        f1_query_best: F1 if every query had its own best threshold.
    """

    dataset: str
    queries: int
    ndcg5: float
    recall5: float
    f1_tau: float
    f1_best: float
    tau_best: float
    f1_query_best: float

    def as_dict(self) -> dict[str, str | int | float]:
        """The record under the names used in papers and in ``rsrank evaluate --json``."""
        return {
            "dataset": self.dataset,
            "queries": self.queries,
            "ndcg@5": self.ndcg5,
            "recall@5": self.recall5,
            "f1@tau": self.f1_tau,
            "f1@best": self.f1_best,
            "tau_best": self.tau_best,
            "f1@query_best": self.f1_query_best,
        }


class LabelledScorer(Protocol):
    """Scores documents knowing which of them are relevant: a yardstick, such as oracle similarity, no reranker."""

    threshold: float | None

    def score_labelled(self, query: LabelledQuery, *, titles: bool = True) -> list[float]:
        """One score a document, in input order."""
        ...


System = Reranker | LabelledScorer
"""What can be measured. Its ``threshold`` is its native one, or None."""


def score_dataset(system: System, queries: Iterable[LabelledQuery], *, titles: bool = True) -> list[ScoredQuery]:
    """Score every query's documents, one query after another, and take the time each needs.

    Args:
        system: Any reranker, or a scorer that knows the labels.
        queries: Labelled queries.
        titles: Put a document's title, if it has one, in front of its text.

    Raises:
        InputError: A score is not finite; the query is named.
    """
    return [_scored(system, query, titles) for query in queries]


def _scored(system: System, query: LabelledQuery, titles: bool) -> ScoredQuery:
    started = time.perf_counter()
    if isinstance(system, Reranker):
        scores = system.score(query.query, [document.content(titles=titles) for document in query.documents])
    else:
        scores = system.score_labelled(query, titles=titles)
    seconds = time.perf_counter() - started
    try:
        return ScoredQuery(scores, [document.relevant for document in query.documents], seconds)
    except InputError as error:
        raise InputError(f"Query {query.id!r}: {error}") from None


def summarise(dataset: str, scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> Evaluation:
    """All metrics of one scored set.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    ranking = ranking_metrics(scored)
    tau_best, f1_best = best_threshold(scored)
    count = max(len(scored), 1)
    return Evaluation(
        dataset=dataset,
        queries=len(scored),
        ndcg5=ranking["ndcg@5"],
        recall5=ranking["recall@5"],
        f1_tau=sum(f1_at(query, threshold) for query in scored) / count,
        f1_best=f1_best,
        tau_best=tau_best,
        f1_query_best=sum(query_best_f1(query) for query in scored) / count,
    )


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    For scores without a natural zero (a cosine, BM25): the kindest threshold one could have tuned for all of them.
    """
    weights = [1.0 / len(queries) for queries in sets for _ in queries]
    return best_threshold([query for queries in sets for query in queries], weights)[0]
