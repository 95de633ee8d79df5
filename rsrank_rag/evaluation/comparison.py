"""Several systems on several sets in numbers: report.json of ``rsrank evaluate --report``.

The numbers tell, too, whether one threshold is good for all sets and queries (paper, Section 2).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from .. import __version__
from ..reranker import BLANK_SCORE
from .datasets import LabelledQuery
from .metrics import (
    Rule,
    ScoredQuery,
    best_threshold,
    f1_at,
    mean,
    query_best_f1,
    ranking_by_query,
    select,
)
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

# What is measured of each query and in the mean, and its heading.
METRICS = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@tau": "F1 at the threshold",
    "f1@best": "F1 at the set's best threshold",
    "f1@query_best": "F1 at each query's best threshold",
}

# The share of queries with a larger F1 gap is given for each limit (paper, Section 2.2).
GAP_LIMITS = (0.1, 0.3)


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
        """F1 lost because all queries share the set's best threshold; at least 0.

        Source: paper, Section 2.2.
        """
        return max(self.metrics["f1@query_best"] - self.metrics["f1@best"], 0.0)


class SetResult(Record):
    """One system on one set. Scores are normalised over all sets of the system."""

    metrics: dict[str, Estimate]
    tau_best: float  # the threshold with the highest mean F1
    tau_best_normalised: float
    score_range: tuple[float, float]  # lowest and highest score, normalised
    gap: Estimate  # F1 that sharing the set's best threshold costs a query
    gap_above: dict[str, float]  # limit -> share of queries that lose more
    t_test: PairedTest  # each query's best F1 against its F1 at the set's best threshold
    queries: tuple[QueryResult, ...]

    def values(self, metric: str) -> list[float]:
        """One metric of every query."""
        return [query.metrics[metric] for query in self.queries]


class SystemResult(Record):
    """One system on all sets; means count each set the same."""

    name: str
    threshold: float  # the threshold in use, in the system's own units
    threshold_origin: str  # such as "native"
    threshold_normalised: float
    bias: float  # of the sets' best thresholds (`threshold_stability`), as is the variance
    variance: float
    metrics: dict[str, Estimate]
    sets: dict[str, SetResult]

    @property
    def threshold_kind(self) -> str:
        """``native``, ``given`` or ``tuned``; a tuned threshold was computed from the labels."""
        known = self.threshold_origin in ("native", "given")
        return self.threshold_origin if known else "tuned"


class Difference(Record):
    """Mean paired differences between two systems, first minus second, by set and over sets."""

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
    origin: str  # of the threshold, such as "native"
    scored: Mapping[str, Sequence[ScoredQuery]]  # set -> scored queries, in the order of the set


@dataclass(frozen=True, slots=True)
class Stability:
    """How well one threshold suits several sets (paper, Section 2.1).

    All thresholds are normalised: 0 and 1 are the lowest and the highest score of all sets.
    """

    ranges: dict[str, tuple[float, float]]  # each set's lowest and highest score
    natural: float  # the threshold in use; outside [0, 1] if no score lies beyond it
    best: dict[str, float]  # each set's threshold with the highest mean F1
    bias: float  # mean over sets of the absolute offset between the best and the natural threshold
    variance: float  # mean squared distance of the sets' best thresholds from their mean


def threshold_stability(sets: Mapping[str, Sequence[ScoredQuery]], threshold: float) -> Stability:
    """Bias and variance of the best thresholds after one min-max normalisation over all sets.

    The paper gives one bias for six sets and does not say how it joins them. Here it is the mean of
    the sets' absolute offsets. Offsets of different signs do not cancel.

    Args:
        sets: One system's scored queries, by set; at least one set.
        threshold: The threshold in use, in the system's own units.

    >>> queries = [ScoredQuery([0.0, 2.0, 4.0], [False, True, True])]
    >>> stability = threshold_stability({"a": queries}, threshold=2.0)
    >>> stability.best, stability.natural, stability.bias, stability.variance
    ({'a': 0.25}, 0.5, 0.25, 0.0)
    """
    extremes = {}
    for name, queries in sets.items():
        scores = [score for query in queries for score in query.scores if score != BLANK_SCORE]
        extremes[name] = (min(scores, default=0.0), max(scores, default=0.0))
    low = min(lowest for lowest, _ in extremes.values())
    span = max(highest for _, highest in extremes.values()) - low or 1.0
    natural = (threshold - low) / span
    ranges = {}
    best = {}
    for name, (lowest, highest) in extremes.items():
        ranges[name] = ((lowest - low) / span, (highest - low) / span)
        best[name] = (best_threshold(sets[name])[0] - low) / span
    bias = statistics.fmean(abs(value - natural) for value in best.values())
    return Stability(ranges, natural, best, bias, statistics.pvariance(best.values()))


def share_above(values: Sequence[float], limit: float) -> float:
    """Fraction of values above a limit, by more than rounding.

    >>> share_above([0.0, 0.1, 0.8 - 0.7, 0.5], 0.1)
    0.25
    """
    return mean([value > limit + 1e-9 for value in values])


def compare(
    systems: Sequence[Measured],
    sets: Mapping[str, Sequence[LabelledQuery]],
    *,
    resamples: int = RESAMPLES,
) -> Comparison:
    """All metrics of all systems with intervals, and the paired differences of every two systems.

    Args:
        systems: The systems' scores.
        sets: The labelled queries that were scored, at least one in each set.
        resamples: Number of bootstrap samples.

    Raises:
        MissingDependencyError: ir-measures or scipy is not installed.
    """
    results = [_system(system, sets, resamples) for system in systems]
    differences = [_difference(*pair, resamples) for pair in combinations(results, 2)]
    labels = {name: tuple(map(_labels, queries)) for name, queries in sets.items()}
    return Comparison(
        resamples=resamples,
        labels=labels,
        systems=tuple(results),
        differences=tuple(differences),
    )


def _labels(query: LabelledQuery) -> QueryLabels:
    return QueryLabels(
        id=query.id,
        documents=tuple(document.id for document in query.documents),
        relevant=tuple(document.relevant for document in query.documents),
    )


def _system(
    system: Measured, sets: Mapping[str, Sequence[LabelledQuery]], resamples: int
) -> SystemResult:
    stability = threshold_stability(system.scored, system.threshold)
    results = {}
    for name, labelled in sets.items():
        queries = system.scored[name]
        tau_best, _ = best_threshold(queries)
        rows = _query_results(labelled, queries, system.threshold, tau_best)
        values = {metric: [row.metrics[metric] for row in rows] for metric in METRICS}
        gaps = [row.gap for row in rows]
        results[name] = SetResult(
            metrics={m: estimate_mean(values[m], resamples=resamples) for m in METRICS},
            tau_best=tau_best,
            tau_best_normalised=stability.best[name],
            score_range=stability.ranges[name],
            gap=estimate_mean(gaps, resamples=resamples),
            gap_above={str(limit): share_above(gaps, limit) for limit in GAP_LIMITS},
            t_test=paired_t_test(values["f1@query_best"], values["f1@best"]),
            queries=tuple(rows),
        )
    metrics = {}
    for metric in METRICS:
        by_set = [result.values(metric) for result in results.values()]
        metrics[metric] = estimate_mean(*by_set, resamples=resamples)
    return SystemResult(
        name=system.name,
        threshold=system.threshold,
        threshold_origin=system.origin,
        threshold_normalised=stability.natural,
        bias=stability.bias,
        variance=stability.variance,
        metrics=metrics,
        sets=results,
    )


def _query_results(
    labelled: Sequence[LabelledQuery],
    queries: Sequence[ScoredQuery],
    tau: float,
    tau_best: float,
) -> list[QueryResult]:
    ranking = ranking_by_query(queries)
    results = []
    for number, (label, query) in enumerate(zip(labelled, queries, strict=True)):
        selected = select(query, Rule(tau))
        metrics = {name: values[number] for name, values in ranking.items()}
        metrics["f1@tau"] = selected.f1
        metrics["f1@best"] = f1_at(query, tau_best)
        metrics["f1@query_best"] = query_best_f1(query)
        scores = tuple(query.scores)
        results.append(QueryResult(id=label.id, scores=scores, kept=selected.kept, metrics=metrics))
    return results


def _difference(first: SystemResult, second: SystemResult, resamples: int) -> Difference:
    sets: dict[str, dict[str, Estimate]] = {name: {} for name in first.sets}
    means = {}
    for metric in METRICS:
        by_set = []
        for name, estimates in sets.items():
            values = first.sets[name].values(metric)
            differences = paired_differences(values, second.sets[name].values(metric))
            estimates[metric] = estimate_mean(differences, resamples=resamples)
            by_set.append(differences)
        means[metric] = estimate_mean(*by_set, resamples=resamples)
    return Difference(first=first.name, second=second.name, sets=sets, mean=means)
