"""Several systems on several sets in numbers: the record behind ``rsrank evaluate --report`` and its report.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .. import __version__
from .calibration import Selection, f1_gaps, select_above, select_top_at_budget, share_above, threshold_stability
from .datasets import LabelledQuery
from .metrics import ScoredQuery, best_threshold, f1_at, query_best_f1, ranking_by_query
from .statistics import LEVEL, RESAMPLES, Estimate, PairedTest, estimate_mean, paired_differences, paired_t_test

METRICS = ("ndcg@5", "recall@5", "f1@tau", "f1@best", "f1@query_best")
"""Per query and in the mean: ranking, then F1 at the threshold in use, the set's best and the query's own best one."""

GAP_LIMITS = (0.1, 0.3)
"""F1 gaps of which the share of queries above is given, as in the paper's Section 2.2."""

TUNED = "tuned threshold"
"""The best single one over all sets, found on the labels: where there is no native one, or where it was asked for."""

_Estimator = Callable[..., Estimate]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class QueryLabels(_Record):
    """A query's documents, by id, and which are relevant."""

    id: str
    documents: tuple[str, ...]
    relevant: tuple[bool, ...]


class QueryResult(_Record):
    """One system on one query; scores in the order of the labels."""

    id: str
    scores: tuple[float, ...]
    kept: int
    metrics: dict[str, float]

    @property
    def gap(self) -> float:
        """F1 lost to the set's best threshold against the query's own."""
        return self.metrics["f1@query_best"] - self.metrics["f1@best"]


class Spending(_Record):
    """What a selection keeps of a query in the mean, and how good that is."""

    kept: float
    precision: Estimate
    recall: Estimate
    f1: Estimate


class SelectionResult(_Record):
    """The threshold in use, top-k with the same mean number of documents, and the difference."""

    natural: Spending
    top_k: Spending
    f1_difference: Estimate


class SetResult(_Record):
    """One system on one set.

    Attributes:
        tau_best: The threshold with the highest mean F1.
        tau_best_normalised: The same, normalised over all sets of the system.
        score_range: Lowest and highest score, normalised over all sets of the system.
        gap: Mean F1 that sharing the set's best threshold costs a query.
        gap_above: Limit -> share of queries that lose more.
        t_test: Each query's best F1 against its F1 at the set's best threshold.
    """

    metrics: dict[str, Estimate]
    tau_best: float
    tau_best_normalised: float
    score_range: tuple[float, float]
    gap: Estimate
    gap_above: dict[str, float]
    t_test: PairedTest
    selection: SelectionResult
    queries: tuple[QueryResult, ...]


class SystemResult(_Record):
    """One system on all sets; means count each set the same.

    Attributes:
        threshold: The one it is used with, in its own units.
        threshold_origin: Where that comes from, such as "native".
        threshold_normalised: The same, normalised over all sets.
        bias: Of the sets' best thresholds (`calibration.threshold_stability`).
    """

    name: str
    threshold: float
    threshold_origin: str
    threshold_normalised: float
    bias: float
    variance: float
    metrics: dict[str, Estimate]
    sets: dict[str, SetResult]

    @property
    def threshold_kind(self) -> str:
        """What figures call the threshold: only a native one is a property of the system."""
        return {"native": "native threshold", "given": "given threshold"}.get(self.threshold_origin, TUNED)


class Difference(_Record):
    """Mean paired differences between two systems, first minus second, by set and metric, and over sets."""

    first: str
    second: str
    sets: dict[str, dict[str, Estimate]]
    mean: dict[str, Estimate]


class Comparison(_Record):
    """Everything that was measured. `model_validate_json` reads report.json back."""

    format_version: Literal[2] = 2
    package_version: str = __version__
    level: float = LEVEL
    resamples: int = RESAMPLES
    seed: int
    labels: dict[str, tuple[QueryLabels, ...]]
    systems: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """A system's scores.

    Attributes:
        origin: Where the threshold comes from, such as "native".
        scored: Set -> scored queries, in the order of the set.
    """

    name: str
    threshold: float
    origin: str
    scored: Mapping[str, Sequence[ScoredQuery]]


def compare(
    systems: Sequence[Measured],
    sets: Mapping[str, Sequence[LabelledQuery]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """All metrics of all systems with their intervals, and the paired differences of every two systems.

    `sets`: the labelled queries that were scored, at least one a set.

    Raises:
        MissingDependencyError: ir-measures or scipy is not installed.
    """
    estimate = partial(estimate_mean, resamples=resamples, seed=seed)
    results = tuple(_system(system, sets, estimate) for system in systems)
    return Comparison(
        resamples=resamples,
        seed=seed,
        labels={name: tuple(map(_labels, queries)) for name, queries in sets.items()},
        systems=results,
        differences=tuple(_difference(first, second, estimate) for first, second in combinations(results, 2)),
    )


def _labels(query: LabelledQuery) -> QueryLabels:
    documents = query.documents
    return QueryLabels(
        id=query.id, documents=tuple(d.id for d in documents), relevant=tuple(d.relevant for d in documents)
    )


def _system(system: Measured, sets: Mapping[str, Sequence[LabelledQuery]], estimate: _Estimator) -> SystemResult:
    stability = threshold_stability(system.scored, system.threshold)
    span = (stability.high - stability.low) or 1.0
    results = {}
    for name, labelled in sets.items():
        queries = system.scored[name]
        scores = [score for query in queries for score in query.scores]
        gaps, rows = f1_gaps(queries), _rows(labelled, queries, system.threshold)
        best, own = ([row.metrics[metric] for row in rows] for metric in ("f1@best", "f1@query_best"))
        results[name] = SetResult(
            metrics={metric: estimate([row.metrics[metric] for row in rows]) for metric in METRICS},
            tau_best=best_threshold(queries)[0],
            tau_best_normalised=stability.best[name],
            score_range=(
                (min(scores, default=0.0) - stability.low) / span,
                (max(scores, default=0.0) - stability.low) / span,
            ),
            gap=estimate(gaps),
            gap_above={f"{limit:g}": share_above(gaps, limit) for limit in GAP_LIMITS},
            t_test=paired_t_test(own, best),
            selection=_selection(queries, system.threshold, estimate),
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


def _rows(labelled: Sequence[LabelledQuery], queries: Sequence[ScoredQuery], tau: float) -> tuple[QueryResult, ...]:
    tau_best, _ = best_threshold(queries)
    ranking = ranking_by_query(queries)
    return tuple(
        QueryResult(
            id=label.id,
            scores=tuple(query.scores),
            kept=sum(score > tau for score in query.scores),
            metrics={
                **{name: values[number] for name, values in ranking.items()},
                "f1@tau": f1_at(query, tau),
                "f1@best": f1_at(query, tau_best),
                "f1@query_best": query_best_f1(query),
            },
        )
        for number, (label, query) in enumerate(zip(labelled, queries, strict=True))
    )


def _selection(queries: Sequence[ScoredQuery], threshold: float, estimate: _Estimator) -> SelectionResult:
    def spending(selection: Selection) -> Spending:
        return Spending(
            kept=selection.budget,
            precision=estimate(selection.precision),
            recall=estimate(selection.recall),
            f1=estimate(selection.f1),
        )

    natural = select_above(queries, threshold)
    top = select_top_at_budget(queries, natural.budget)
    return SelectionResult(
        natural=spending(natural), top_k=spending(top), f1_difference=estimate(paired_differences(natural.f1, top.f1))
    )


def _difference(first: SystemResult, second: SystemResult, estimate: _Estimator) -> Difference:
    by_metric = {
        metric: [
            paired_differences(a, b)
            for a, b in zip(_values(first.sets, metric), _values(second.sets, metric), strict=True)
        ]
        for metric in METRICS
    }
    return Difference(
        first=first.name,
        second=second.name,
        sets={
            name: {metric: estimate(differences[number]) for metric, differences in by_metric.items()}
            for number, name in enumerate(first.sets)
        },
        mean={metric: estimate(*differences) for metric, differences in by_metric.items()},
    )


def _values(results: Mapping[str, SetResult], metric: str) -> list[list[float]]:
    """One metric of every query, set by set."""
    return [[row.metrics[metric] for row in result.queries] for result in results.values()]
