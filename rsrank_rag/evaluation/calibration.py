"""Is one threshold good for all sets and all queries? And is it better than a fixed number of documents?

The measures of the paper's Section 2, and selection by threshold and by top-k for the same number of documents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from .metrics import ScoredQuery, best_threshold, f1, f1_at, query_best_f1


@dataclass(frozen=True, slots=True)
class Stability:
    """How well one threshold suits several sets (paper, Section 2.1), in units of the whole score range.

    Attributes:
        low: Lowest score of all sets; 0 after normalisation.
        high: Highest score of all sets; 1 after normalisation.
        natural: The threshold the system is used with, normalised; outside [0, 1] if no score lies beyond it.
        best: Each set's threshold with the highest mean F1, normalised.
        bias: Mean over sets of the absolute offset between the best and the natural threshold.
        variance: Mean squared distance of the sets' best thresholds from their mean.
    """

    low: float
    high: float
    natural: float
    best: dict[str, float]
    bias: float
    variance: float


def threshold_stability(sets: Mapping[str, Sequence[ScoredQuery]], threshold: float) -> Stability:
    """Bias and variance of the best thresholds after one min-max normalisation over all sets together.

    The paper gives one bias for six sets and does not say how it joins them. Here each set's absolute offset is taken
    first and then their mean, so that a threshold too high for one set and too low for another does not look right.

    `sets`: one system's scored queries, by set; at least one.

    >>> found = threshold_stability({"a": [ScoredQuery([0.0, 2.0, 4.0], [False, True, True])]}, threshold=2.0)
    >>> found.best, found.natural, found.bias, found.variance
    ({'a': 0.25}, 0.5, 0.25, 0.0)
    """
    scores = [score for queries in sets.values() for query in queries for score in query.scores]
    low, high = min(scores, default=0.0), max(scores, default=0.0)
    span = (high - low) or 1.0
    best = {name: (best_threshold(queries)[0] - low) / span for name, queries in sets.items()}
    natural = (threshold - low) / span
    return Stability(
        low=low,
        high=high,
        natural=natural,
        best=best,
        bias=statistics.fmean(abs(value - natural) for value in best.values()),
        variance=statistics.pvariance(best.values()),
    )


def f1_gaps(queries: Sequence[ScoredQuery]) -> list[float]:
    """F1 that each query loses because all queries share the set's best threshold (paper, Section 2.2); never negative.

    >>> gaps = f1_gaps([ScoredQuery([3.0, 1.0], [True, False]), ScoredQuery([1.0, 0.0], [True, False])])
    >>> [round(gap, 3) for gap in gaps]
    [0.333, 0.0]
    """
    threshold, _ = best_threshold(queries)
    return [max(query_best_f1(query) - f1_at(query, threshold), 0.0) for query in queries]


def share_above(values: Sequence[float], limit: float) -> float:
    """Fraction of values above a limit; values that differ from it by rounding only are not.

    >>> share_above([0.0, 0.1, 0.8 - 0.7, 0.5], 0.1)
    0.25
    """
    return sum(value > limit + 1e-9 for value in values) / max(len(values), 1)


@dataclass(frozen=True, slots=True)
class Selection:
    """What was kept of each query's documents: one number a query in every list.

    Attributes:
        kept: Documents kept (the expected number, where chance decides).
        precision: Share of what was kept that is relevant; 0 where nothing was kept.
        recall: Share of what is relevant that was kept.
        f1: Their harmonic mean.

    Where nothing is relevant and nothing was kept, all three count 1; where something was kept, or there are no
    documents, 0.
    """

    kept: list[float]
    precision: list[float]
    recall: list[float]
    f1: list[float]

    @property
    def budget(self) -> float:
        """Mean number of documents kept of a query."""
        return math.fsum(self.kept) / max(len(self.kept), 1)


def select_above(queries: Sequence[ScoredQuery], threshold: float) -> Selection:
    """Keep what scores above a threshold."""
    return _selection(queries, [[i for i, score in enumerate(query.scores) if score > threshold] for query in queries])


def select_top(queries: Sequence[ScoredQuery], k: int) -> Selection:
    """Keep each query's best k documents, or all where there are fewer."""
    return _selection(queries, [query.order()[:k] for query in queries])


def select_top_at_budget(queries: Sequence[ScoredQuery], budget: float) -> Selection:
    """Top-k that keeps ``budget`` documents of a query in the mean, which is seldom a whole k.

    Each query gets k + 1 documents with a probability p and k with 1 - p, with k and p chosen to meet the budget; the
    numbers are the expected ones. A budget above the mean number of documents keeps all.
    """
    lower, k = select_top(queries, 0), 0
    most = max((len(query.scores) for query in queries), default=0)
    while k < most:
        upper = select_top(queries, k + 1)
        if upper.budget >= budget:
            return _mixed(lower, upper, (budget - lower.budget) / (upper.budget - lower.budget))
        lower, k = upper, k + 1
    return lower


def _selection(queries: Sequence[ScoredQuery], kept: Sequence[Sequence[int]]) -> Selection:
    rows = []
    for query, places in zip(queries, kept, strict=True):
        hits, relevant = sum(bool(query.relevant[i]) for i in places), sum(map(bool, query.relevant))
        nothing = 1.0 if query.scores and not places and not relevant else 0.0
        precision = hits / len(places) if places else nothing
        recall = hits / relevant if relevant else nothing
        rows.append((float(len(places)), precision, recall, f1(hits, len(places), relevant) if query.scores else 0.0))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return Selection(*columns)


def _mixed(first: Selection, second: Selection, share: float) -> Selection:
    """Expected numbers of one selection with the probability 1 - share and another with share."""
    columns = (zip(getattr(first, part.name), getattr(second, part.name), strict=True) for part in fields(Selection))
    return Selection(*([(1 - share) * x + share * y for x, y in column] for column in columns))
