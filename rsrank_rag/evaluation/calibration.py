"""Is one threshold good for all sets and all queries? The measures of the paper's Section 2."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .metrics import ScoredQuery, best_threshold, f1_at, query_best_f1


@dataclass(frozen=True, slots=True)
class Stability:
    """How well one threshold suits several sets (paper, Section 2.1), in units of the whole score range."""

    ranges: dict[str, tuple[float, float]]  # each set's lowest and highest score; 0 and 1 are those of all sets
    natural: float  # the threshold the system is used with; outside [0, 1] if no score lies beyond it
    best: dict[str, float]  # each set's threshold with the highest mean F1
    bias: float  # mean over sets of the absolute offset between the best and the natural threshold
    variance: float  # mean squared distance of the sets' best thresholds from their mean


def threshold_stability(sets: Mapping[str, Sequence[ScoredQuery]], threshold: float) -> Stability:
    """Bias and variance of the best thresholds after one min-max normalisation over all sets together.

    The paper gives one bias for six sets and does not say how it joins them. Here each set's absolute offset is taken
    first and then their mean, so that a threshold too high for one set and too low for another does not look right.

    `sets`: one system's scored queries, by set; at least one.

    >>> found = threshold_stability({"a": [ScoredQuery([0.0, 2.0, 4.0], [False, True, True])]}, threshold=2.0)
    >>> found.best, found.natural, found.bias, found.variance
    ({'a': 0.25}, 0.5, 0.25, 0.0)
    """
    scores = {name: [score for query in queries for score in query.scores] or [0.0] for name, queries in sets.items()}
    low, high = min(map(min, scores.values())), max(map(max, scores.values()))
    span = (high - low) or 1.0
    ranges = {name: ((min(found) - low) / span, (max(found) - low) / span) for name, found in scores.items()}
    best = {name: (best_threshold(queries)[0] - low) / span for name, queries in sets.items()}
    natural = (threshold - low) / span
    bias = statistics.fmean(abs(value - natural) for value in best.values())
    return Stability(ranges, natural, best, bias, statistics.pvariance(best.values()))


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
