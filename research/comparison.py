"""Several systems on several sets in numbers, with intervals and paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, starmap

import numpy as np
from numpy.typing import ArrayLike

from rsrank_rag import __version__
from rsrank_rag.evaluation.datasets import LabelledQuery, LabelledSets
from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    Array,
    Estimate,
    Record,
    bootstrap,
    estimate,
)
from rsrank_rag.ranking.rule import Rule

# What is measured of each query and in the mean. The last four are measures of the rule in use;
# recall and answers lost are those of the answerable queries alone.
METRICS = ("ndcg@5", "recall@5", "lost", "kept", "recall", "f1")


class QueryLabels(Record):
    """A query's documents, by id, and which are relevant."""

    id: str
    documents: tuple[str, ...]
    relevant: tuple[bool, ...]


class QueryResult(Record):
    """One system on one query. Queries and scores are in the order of the labels.

    A metric that means nothing for the query is left out, here and in means.
    """

    scores: tuple[float, ...]
    metrics: dict[str, float]


class SetResult(Record):
    """One system on one set."""

    metrics: dict[str, Estimate]
    queries: tuple[QueryResult, ...]

    def values(self, metric: str) -> list[float]:
        """One metric of every query, NaN for a query without one."""
        return [query.metrics.get(metric, math.nan) for query in self.queries]


class SystemResult(Record):
    """One system on all sets. Means count each set the same.

    Attributes:
        name: The system's name.
        rule: The rule in use, in words.
        origin: Where the rule comes from, such as "native".
        metrics: Means over the sets.
        sets: Results of each set.
    """

    name: str
    rule: str
    origin: str
    metrics: dict[str, Estimate]
    sets: dict[str, SetResult]


class Difference(Record):
    """Mean paired differences between two systems, first minus second, by set and over sets."""

    first: str
    second: str
    sets: dict[str, dict[str, Estimate]]
    mean: dict[str, Estimate]


class Comparison(Record):
    """Everything that was measured. `model_validate_json` reads its file back."""

    package_version: str = __version__
    level: float = LEVEL
    resamples: int = RESAMPLES
    labels: dict[str, tuple[QueryLabels, ...]]
    systems: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]

    def scored(self, name: str, result: SetResult) -> list[ScoredQuery]:
        """One system's scores of a set, by the set's name, with the set's labels."""
        queries = []
        for query, labels in zip(result.queries, self.labels[name], strict=True):
            queries.append(ScoredQuery(query.scores, labels.relevant))
        return queries


@dataclass(frozen=True)
class Measured:
    """A system's scores.

    Attributes:
        name: The system's name.
        rule: The rule in use.
        origin: Where the rule comes from, such as "native".
        scored: Set -> scored queries, in the order of the set.
    """

    name: str
    rule: Rule
    origin: str
    scored: Mapping[str, Sequence[ScoredQuery]]


def compare(systems: Sequence[Measured], sets: LabelledSets) -> Comparison:
    """All metrics of all systems with intervals, and the paired differences of every two systems.

    Args:
        systems: The systems' scores.
        sets: The labelled queries that were scored, at least one in each set.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    results = tuple(map(_system, systems))
    labels = {name: tuple(map(_labels, queries)) for name, queries in sets.items()}
    differences = tuple(starmap(_difference, combinations(results, 2)))
    return Comparison(labels=labels, systems=results, differences=differences)


def estimate_mean(*samples: ArrayLike) -> Estimate:
    """The mean of the means of several sets, with its interval.

    Args:
        samples: One number for each query of a set, see `bootstrap`. Each set counts the same
            whatever its size, and is resampled by itself.
    """
    means = [bootstrap(sample, seed=number) for number, sample in enumerate(samples)]
    return estimate(np.mean(means, axis=0))


def _labels(query: LabelledQuery) -> QueryLabels:
    return QueryLabels(
        id=query.id,
        documents=tuple(document.id for document in query.documents),
        relevant=tuple(document.relevant for document in query.documents),
    )


def _system(system: Measured) -> SystemResult:
    sets = {}
    for name, queries in system.scored.items():
        values = {**ranking_measures(queries), **selection_measures(queries, system.rule)}
        rows = []
        for number, query in enumerate(queries):
            metrics = {}
            for metric in METRICS:
                value = values[metric][number].item()
                if not math.isnan(value):
                    metrics[metric] = value
            rows.append(QueryResult(scores=tuple(query.scores), metrics=metrics))
        estimates = _estimates({metric: [values[metric]] for metric in METRICS})
        sets[name] = SetResult(metrics=estimates, queries=tuple(rows))
    samples = {}
    for metric in METRICS:
        samples[metric] = [result.values(metric) for result in sets.values()]
    return SystemResult(
        name=system.name,
        rule=str(system.rule),
        origin=system.origin,
        metrics=_estimates(samples),
        sets=sets,
    )


def _difference(first: SystemResult, second: SystemResult) -> Difference:
    sets = {}
    samples: dict[str, list[Array]] = {metric: [] for metric in METRICS}
    for name in first.sets:
        changes = {}
        for metric in METRICS:
            values = first.sets[name].values(metric)
            changes[metric] = [np.subtract(values, second.sets[name].values(metric))]
            samples[metric] += changes[metric]
        sets[name] = _estimates(changes)
    return Difference(first=first.name, second=second.name, sets=sets, mean=_estimates(samples))


def _estimates(samples: Mapping[str, Sequence[ArrayLike]]) -> dict[str, Estimate]:
    """The mean of each metric over sets in which a query has one; without such a set, none."""
    estimates = {}
    for metric, by_set in samples.items():
        present = [values for values in by_set if not np.isnan(values).all()]
        if present:
            estimates[metric] = estimate_mean(*present)
    return estimates
