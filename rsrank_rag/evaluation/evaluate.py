"""Run a reranker over a labelled set, and its metrics."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..errors import InputError
from ..reranker import Reranker
from .datasets import LabelledQuery
from .metrics import ScoredQuery, best_threshold, mean, query_best_f1, ranking_metrics, selection


class LabelledScorer(Protocol):
    """Scores documents knowing which of them are relevant: a yardstick, such as oracle similarity, no reranker."""

    threshold: float | None

    def score_labelled(self, query: LabelledQuery, *, titles: bool = True) -> list[float]:
        """One score a document, in input order."""


System = (
    Reranker | LabelledScorer
)  # what can be measured. Its ``threshold`` is its native one, or None.


def score_dataset(
    system: System, queries: Iterable[LabelledQuery], *, titles: bool = True
) -> list[ScoredQuery]:
    """Score every query's documents, one query after another; InputError names a query with a score that is no number.

    `titles`: put a document's title, if it has one, in front of its text.
    """
    found = []
    for query in queries:
        if isinstance(system, Reranker):
            scores = system.score(
                query.query, [document.content(titles=titles) for document in query.documents]
            )
        else:
            scores = system.score_labelled(query, titles=titles)
        try:
            found.append(ScoredQuery(scores, [document.relevant for document in query.documents]))
        except InputError as error:
            raise InputError(f"Query {query.id!r}: {error}") from None
    return found


def summarise(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> dict[str, Any]:
    """All metrics of one scored set, under the names used in papers and in ``rsrank evaluate --json``.

    Returns:
        Number of ``queries``; ``ndcg@5`` and ``recall@5``. Of what scores above the threshold ``f1@tau``,
        ``precision@tau``, ``recall@tau`` and ``kept`` (documents a query), then ``empty``: the share of queries that
        keep nothing; ``unanswered``: queries without a relevant document, and ``false_keeps``: what is kept of each of
        these (None if there are none). ``f1@best`` at the best single threshold for this set, ``tau_best``, and
        ``f1@query_best`` if every query had its own best one.
    """
    tau_best, f1_best = best_threshold(scored)
    precision, recall, f1, kept = (
        [selection(query, threshold)[part] for query in scored] for part in range(4)
    )
    false = [count for count, query in zip(kept, scored, strict=True) if not any(query.relevant)]
    return {
        "queries": len(scored),
        **ranking_metrics(scored),
        "f1@tau": mean(f1),
        "precision@tau": mean(precision),
        "recall@tau": mean(recall),
        "kept": mean(kept),
        "empty": mean([count == 0 for count in kept]),
        "unanswered": len(false),
        "false_keeps": mean(false) if false else None,
        "f1@best": f1_best,
        "tau_best": tau_best,
        "f1@query_best": mean([query_best_f1(query) for query in scored]),
    }


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    For scores without a natural zero (a cosine, BM25): the kindest threshold one could have tuned for all of them.
    """
    weights = [1.0 / len(queries) for queries in sets for _ in queries]
    return best_threshold([query for queries in sets for query in queries], weights)[0]
