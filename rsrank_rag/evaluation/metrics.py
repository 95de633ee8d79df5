"""Ranking quality (through ir-measures) and selection quality (what a rule keeps), query by query.

Measures are computed for each query and then averaged over queries. The mean precision is over the
queries that keep a document. The mean recall is over the queries with a relevant document. The
means of F1, nDCG and Recall@5 are over all queries. F1 of a query is 0 if nothing relevant is kept
or if the query has no documents. F1 is 1 if no document is relevant and none is kept. Equal scores
rank by input order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, finite, required
from ..ranking.rule import Rule, best_first
from .statistics import Array, mean_present


@dataclass(frozen=True, slots=True)
class ScoredQuery:
    """Scores and labels of one query's documents, in input order.

    Raises:
        InputError: There are more or fewer scores than labels.
        ScoringError: A score is not finite.
    """

    scores: Sequence[float]
    relevant: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.relevant):
            raise InputError(
                "A query needs one score for each document, "
                f"got {len(self.scores)} for {len(self.relevant)}."
            )
        for place, score in enumerate(self.scores):
            finite(score, place)

    def shifted(self, threshold: float) -> "ScoredQuery":
        """The same query, with scores whose zero is the threshold."""
        return ScoredQuery([score - threshold for score in self.scores], self.relevant)

    def in_file_order(self) -> "ScoredQuery":
        """The same query, with scores that rank the documents as they stand in the file."""
        return ScoredQuery([-place for place in range(len(self.scores))], self.relevant)


def selection_measures(queries: Sequence[ScoredQuery], rule: Rule) -> dict[str, Array]:
    """Measures of what a rule keeps of each query, (queries,); NaN where one means nothing.

    ``kept``: number of documents. ``precision``, NaN if nothing is kept. ``f1``. Of an answerable
    query, which is one with a relevant document: ``recall``, and ``lost``, 1 if no relevant
    document is kept. Of an unanswerable one: ``kept_unanswerable``, the same as ``kept``, and
    ``called_relevant``, 1 if a document is kept and not only by the fallback.
    """
    counts = np.zeros((len(queries), 5))
    for row, query in zip(counts, queries, strict=True):
        places = rule.select(query.scores)
        relevant_kept = sum(query.relevant[place] for place in places)
        is_weak = rule.bar(query.scores).weak
        row[:] = len(places), relevant_kept, sum(query.relevant), len(query.scores), is_weak
    kept, hits, relevant, documents, weak = counts.T
    is_answerable = relevant > 0
    with np.errstate(invalid="ignore"):
        f1 = np.nan_to_num(2 * hits / (kept + relevant), nan=1.0)
        return {
            "kept": kept,
            "precision": hits / kept,
            "recall": hits / relevant,
            "f1": np.where(documents == 0, 0.0, f1),
            "lost": np.where(is_answerable, hits == 0, np.nan),
            "kept_unanswerable": np.where(is_answerable, np.nan, kept),
            "called_relevant": np.where(is_answerable, np.nan, (kept > 0) & (weak == 0)),
        }


class RuleResult(NamedTuple):
    """What a rule does to several queries. Means are None if they mean nothing for all queries."""

    lost: int  # answerable queries of which nothing relevant is kept
    kept: float  # mean number of documents
    recall: float | None  # mean over the answerable queries
    precision: float | None  # mean over the queries that keep a document
    f1: float  # mean
    called_relevant: int  # unanswerable queries of which a document is above the threshold
    kept_unanswerable: float | None  # mean number of documents over the unanswerable queries


def apply_rule(queries: Sequence[ScoredQuery], rule: Rule) -> RuleResult:
    """What a rule keeps of several queries, at least one."""
    values = selection_measures(queries, rule)
    results: dict[str, Any] = dict.fromkeys(RuleResult._fields)
    results |= present_means(values)
    for name in ("lost", "called_relevant"):
        results[name] = int(np.nansum(values[name]))
    return RuleResult(**results)


def ranking_measures(queries: Sequence[ScoredQuery]) -> dict[str, Array]:
    """nDCG@5 and Recall@5 of each query by ir-measures; 0 for a query without relevant documents.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    ir_measures = required("ir_measures", "Ranking metrics need ir-measures.", "eval")
    qrels = {}
    run = {}
    for number, query in enumerate(queries):
        order = best_first(query.scores)
        # Ranks instead of scores: ir-measures would order equal scores in its own way.
        run[str(number)] = {str(place): float(-rank) for rank, place in enumerate(order)}
        qrels[str(number)] = {str(place): int(label) for place, label in enumerate(query.relevant)}
    names = {ir_measures.nDCG @ 5: "ndcg@5", ir_measures.R @ 5: "recall@5"}
    values = {name: np.zeros(len(queries)) for name in names.values()}
    for metric in ir_measures.iter_calc(names, qrels, run):
        values[names[metric.measure]][int(metric.query_id)] = metric.value
    return values


def present_means(measures: Mapping[str, Array]) -> dict[str, float]:
    """Means of measures, (queries,) each, over the queries that have one.

    A measure that means nothing for all queries is left out.
    """
    means = {name: float(mean_present(values)) for name, values in measures.items()}
    return {name: value for name, value in means.items() if not math.isnan(value)}
