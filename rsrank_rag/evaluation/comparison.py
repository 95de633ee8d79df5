"""Several systems on several sets in numbers: the record behind ``rsrank evaluate --report`` and its report.json.

Among them whether one threshold is good for all sets and all queries (paper, Section 2).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal

from .. import __version__
from ..reranker import BLANK_SCORE
from .datasets import LabelledQuery
from .metrics import ScoredQuery, best_threshold, f1_at, query_best_f1, ranking_by_query
from .statistics import (
    LEVEL,
    RESAMPLES,
    Estimate,
    PairedTest,
    Record,
    estimate_mean,
    paired_differences,
    paired_t_test,
)

METRICS = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@tau": "F1 at the threshold",
    "f1@best": "F1 at the set's best threshold",
    "f1@query_best": "F1 at each query's best threshold",
}
"""What is measured of each query and in the mean, and what it is called."""

GAP_LIMITS = (
    0.1,
    0.3,
)  # F1 gaps of which the share of queries above is given, as in the paper's Section 2.2

_Estimator = Callable[..., Estimate]


class QueryLabels(Record):
    """A query's documents, by id, and which are relevant."""

    id: str
    documents: tuple[str, ...]
    relevant: tuple[bool, ...]


class QueryResult(Record):
    """One system on one query; scores in the order of the labels."""

    id: str
    scores: tuple[float, ...]
    kept: int
    metrics: dict[str, float]

    @property
    def gap(self) -> float:
        """F1 lost because all queries share the set's best threshold (paper, Section 2.2); never negative."""
        return max(self.metrics["f1@query_best"] - self.metrics["f1@best"], 0.0)


class SetResult(Record):
    """One system on one set; what is normalised is so over all sets of the system."""

    metrics: dict[str, Estimate]
    tau_best: float  # the threshold with the highest mean F1
    tau_best_normalised: float
    score_range: tuple[float, float]  # lowest and highest score, normalised
    gap: Estimate  # F1 that sharing the set's best threshold costs a query
    gap_above: dict[str, float]  # limit -> share of queries that lose more
    t_test: PairedTest  # each query's best F1 against its F1 at the set's best threshold
    queries: tuple[QueryResult, ...]


class SystemResult(Record):
    """One system on all sets; means count each set the same."""

    name: str
    threshold: float  # the one it is used with, in its own units
    threshold_origin: str  # where that comes from, such as "native"
    threshold_normalised: float
    bias: float  # of the sets' best thresholds (`threshold_stability`), as is the variance
    variance: float
    metrics: dict[str, Estimate]
    sets: dict[str, SetResult]

    @property
    def threshold_kind(self) -> str:
        """What figures call it: only a native one is a property of the system; a tuned one knew the labels."""
        return f"{self.threshold_origin if self.threshold_origin in ('native', 'given') else 'tuned'} threshold"


class Difference(Record):
    """Mean paired differences between two systems, first minus second, by set and metric, and over sets."""

    first: str
    second: str
    sets: dict[str, dict[str, Estimate]]
    mean: dict[str, Estimate]


class Comparison(Record):
    """Everything that was measured. `model_validate_json` reads report.json back."""

    format_version: Literal[3] = 3
    package_version: str = __version__
    level: float = LEVEL
    resamples: int = RESAMPLES
    seed: int = 0
    labels: dict[str, tuple[QueryLabels, ...]]
    systems: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """A system's scores."""

    name: str
    threshold: float
    origin: str  # where the threshold comes from, such as "native"
    scored: Mapping[str, Sequence[ScoredQuery]]  # set -> scored queries, in the order of the set


@dataclass(frozen=True, slots=True)
class Stability:
    """How well one threshold suits several sets (paper, Section 2.1), in units of the whole score range."""

    ranges: dict[
        str, tuple[float, float]
    ]  # each set's lowest and highest score; 0 and 1 are those of all sets
    natural: (
        float  # the threshold the system is used with; outside [0, 1] if no score lies beyond it
    )
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
    scores = {
        name: [score for query in queries for score in query.scores if score != BLANK_SCORE]
        or [0.0]
        for name, queries in sets.items()
    }
    low, high = min(map(min, scores.values())), max(map(max, scores.values()))
    span = (high - low) or 1.0
    ranges = {
        name: ((min(found) - low) / span, (max(found) - low) / span)
        for name, found in scores.items()
    }
    best = {name: (best_threshold(queries)[0] - low) / span for name, queries in sets.items()}
    natural = (threshold - low) / span
    bias = statistics.fmean(abs(value - natural) for value in best.values())
    return Stability(ranges, natural, best, bias, statistics.pvariance(best.values()))


def share_above(values: Sequence[float], limit: float) -> float:
    """Fraction of values above a limit; values that differ from it by rounding only are not.

    >>> share_above([0.0, 0.1, 0.8 - 0.7, 0.5], 0.1)
    0.25
    """
    return sum(value > limit + 1e-9 for value in values) / max(len(values), 1)


def compare(
    systems: Sequence[Measured],
    sets: Mapping[str, Sequence[LabelledQuery]],
    *,
    resamples: int = RESAMPLES,
) -> Comparison:
    """All metrics of all systems with their intervals, and the paired differences of every two systems.

    `sets`: the labelled queries that were scored, at least one a set. Needs ir-measures and scipy.
    """
    estimate = partial(estimate_mean, resamples=resamples)
    results = tuple(_system(system, sets, estimate) for system in systems)
    return Comparison(
        resamples=resamples,
        labels={name: tuple(map(_labels, queries)) for name, queries in sets.items()},
        systems=results,
        differences=tuple(
            _difference(first, second, estimate) for first, second in combinations(results, 2)
        ),
    )


def _labels(query: LabelledQuery) -> QueryLabels:
    ids, relevant = ([getattr(d, name) for d in query.documents] for name in ("id", "relevant"))
    return QueryLabels(id=query.id, documents=tuple(ids), relevant=tuple(relevant))


def _system(
    system: Measured, sets: Mapping[str, Sequence[LabelledQuery]], estimate: _Estimator
) -> SystemResult:
    stability = threshold_stability(system.scored, system.threshold)
    results = {}
    for name, labelled in sets.items():
        queries = system.scored[name]
        rows = _rows(labelled, queries, system.threshold)
        gaps = [row.gap for row in rows]
        best, own = (
            [row.metrics[metric] for row in rows] for metric in ("f1@best", "f1@query_best")
        )
        results[name] = SetResult(
            metrics={metric: estimate([row.metrics[metric] for row in rows]) for metric in METRICS},
            tau_best=best_threshold(queries)[0],
            tau_best_normalised=stability.best[name],
            score_range=stability.ranges[name],
            gap=estimate(gaps),
            gap_above={f"{limit:g}": share_above(gaps, limit) for limit in GAP_LIMITS},
            t_test=paired_t_test(own, best),
            queries=rows,
        )
    return SystemResult(
        name=system.name,
        threshold=system.threshold,
        threshold_origin=system.origin,
        threshold_normalised=stability.natural,
        bias=stability.bias,
        variance=stability.variance,
        metrics={metric: estimate(*_values(results, metric)) for metric in METRICS},
        sets=results,
    )


def _rows(
    labelled: Sequence[LabelledQuery], queries: Sequence[ScoredQuery], tau: float
) -> tuple[QueryResult, ...]:
    tau_best, _ = best_threshold(queries)
    ranking = ranking_by_query(queries)
    rows = []
    for number, (label, query) in enumerate(zip(labelled, queries, strict=True)):
        metrics = {name: values[number] for name, values in ranking.items()}
        f1 = {
            "f1@tau": f1_at(query, tau),
            "f1@best": f1_at(query, tau_best),
            "f1@query_best": query_best_f1(query),
        }
        kept = sum(score > tau for score in query.scores)
        rows.append(
            QueryResult(id=label.id, scores=tuple(query.scores), kept=kept, metrics=metrics | f1)
        )
    return tuple(rows)


def _difference(first: SystemResult, second: SystemResult, estimate: _Estimator) -> Difference:
    def differences(metric: str) -> dict[str, list[float]]:
        pairs = zip(
            first.sets, _values(first.sets, metric), _values(second.sets, metric), strict=True
        )
        return {name: paired_differences(a, b) for name, a, b in pairs}

    found = {metric: differences(metric) for metric in METRICS}
    return Difference(
        first=first.name,
        second=second.name,
        sets={
            name: {metric: estimate(found[metric][name]) for metric in METRICS}
            for name in first.sets
        },
        mean={metric: estimate(*by_set.values()) for metric, by_set in found.items()},
    )


def _values(results: Mapping[str, SetResult], metric: str) -> list[list[float]]:
    """One metric of every query, set by set."""
    return [[row.metrics[metric] for row in result.queries] for result in results.values()]
