"""Several systems on several sets in numbers: report.json of ``rsrank evaluate --report``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, starmap

import numpy as np

from .. import __version__
from ..passages.rule import Rule
from .datasets import LabelledQuery, LabelledSets
from .metrics import ScoredQuery, best_threshold, ranking_measures, selection_measures
from .statistics import LEVEL, RESAMPLES, Estimate, Record, estimate_mean

# What is measured of each query and in the mean, and its heading.
METRICS = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@tau": "F1 at the threshold",
    "f1@best": "F1 at the set's best threshold",
}


class QueryLabels(Record):
    """A query's documents, by id, and which are relevant."""

    id: str
    documents: tuple[str, ...]
    relevant: tuple[bool, ...]


class QueryResult(Record):
    """One system on one query; queries and scores are in the order of the labels."""

    scores: tuple[float, ...]
    kept: int
    metrics: dict[str, float]


class SetResult(Record):
    """One system on one set."""

    metrics: dict[str, Estimate]
    tau_best: float  # the threshold with the highest mean F1
    queries: tuple[QueryResult, ...]

    def values(self, metric: str) -> list[float]:
        """One metric of every query."""
        return [query.metrics[metric] for query in self.queries]


class SystemResult(Record):
    """One system on all sets; means count each set the same."""

    name: str
    threshold: float  # the threshold in use, in the system's own units
    threshold_origin: str  # such as "native"
    # Sets whose labels may have trained the system or chosen its threshold.
    reused: tuple[str, ...] = ()
    metrics: dict[str, Estimate]
    sets: dict[str, SetResult]


class Difference(Record):
    """Mean paired differences between two systems, first minus second, by set and over sets."""

    first: str
    second: str
    sets: dict[str, dict[str, Estimate]]
    mean: dict[str, Estimate]


class Comparison(Record):
    """Everything that was measured. `model_validate_json` reads report.json back."""

    package_version: str = __version__
    level: float = LEVEL
    resamples: int = RESAMPLES
    labels: dict[str, tuple[QueryLabels, ...]]
    systems: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Measured:
    """A system's scores."""

    name: str
    threshold: float
    origin: str  # of the threshold, such as "native"
    scored: Mapping[str, Sequence[ScoredQuery]]  # set -> scored queries, in the order of the set
    reused: Sequence[str] = ()  # see `SystemResult`


def compare(systems: Sequence[Measured], sets: LabelledSets) -> Comparison:
    """All metrics of all systems with intervals, and the paired differences of every two systems.

    Args:
        systems: The systems' scores.
        sets: The labelled queries that were scored, at least one in each set.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    results = list(map(_system, systems))
    labels = {name: tuple(map(_labels, queries)) for name, queries in sets.items()}
    return Comparison(
        labels=labels,
        systems=tuple(results),
        differences=tuple(starmap(_difference, combinations(results, 2))),
    )


def _labels(query: LabelledQuery) -> QueryLabels:
    return QueryLabels(
        id=query.id,
        documents=tuple(document.id for document in query.documents),
        relevant=tuple(document.relevant for document in query.documents),
    )


def _system(system: Measured) -> SystemResult:
    sets = {}
    for name, queries in system.scored.items():
        tau_best, _ = best_threshold(queries)
        at_threshold = selection_measures(queries, Rule(system.threshold))
        values = {
            **ranking_measures(queries),
            "f1@tau": at_threshold["f1"],
            "f1@best": selection_measures(queries, Rule(tau_best))["f1"],
        }
        rows = []
        for number, query in enumerate(queries):
            row = QueryResult(
                scores=tuple(query.scores),
                kept=int(at_threshold["kept"][number]),
                metrics={metric: values[metric][number] for metric in METRICS},
            )
            rows.append(row)
        sets[name] = SetResult(
            metrics={metric: estimate_mean(values[metric]) for metric in METRICS},
            tau_best=tau_best,
            queries=tuple(rows),
        )
    metrics = {}
    for metric in METRICS:
        metrics[metric] = estimate_mean(*[result.values(metric) for result in sets.values()])
    return SystemResult(
        name=system.name,
        threshold=system.threshold,
        threshold_origin=system.origin,
        reused=tuple(system.reused),
        metrics=metrics,
        sets=sets,
    )


def _difference(first: SystemResult, second: SystemResult) -> Difference:
    sets: dict[str, dict[str, Estimate]] = {name: {} for name in first.sets}
    means = {}
    for metric in METRICS:
        by_set = []
        for name, estimates in sets.items():
            values = first.sets[name].values(metric)
            differences = np.subtract(values, second.sets[name].values(metric))
            estimates[metric] = estimate_mean(differences)
            by_set.append(differences)
        means[metric] = estimate_mean(*by_set)
    return Difference(first=first.name, second=second.name, sets=sets, mean=means)
