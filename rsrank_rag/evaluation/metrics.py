"""Ranking quality (through ir-measures) and selection quality (what a rule keeps), query by query.

Metrics are computed for each query and then averaged over the queries. Precision counts those that
keep a document, recall those with a relevant one. F1 and ranking count all: one for which nothing
relevant is kept counts 0, and so does one without documents; F1 is 1 where nothing is relevant and
nothing is kept. Equal scores rank by input order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import InputError, required
from ..reranker import BLANK_SCORE
from .statistics import Array, mean_present


@dataclass(frozen=True, slots=True)
class ScoredQuery:
    """Scores and labels of one query's documents, in input order.

    Raises:
        InputError: A score is not finite, or there are more or fewer scores than labels.
    """

    scores: Sequence[float]
    relevant: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.relevant):
            raise InputError(
                "A query needs one score for each document, "
                f"got {len(self.scores)} for {len(self.relevant)}."
            )
        for number, score in enumerate(self.scores):
            if not math.isfinite(score):
                raise InputError(
                    f"Document {number} scored {score}, which can be neither ranked nor measured."
                )


def best_first(scores: Sequence[float]) -> list[int]:
    """Positions of scores, the highest first; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])


def mean(values: Sequence[float]) -> float:
    """The mean; 0 for an empty sequence."""
    return math.fsum(values) / max(len(values), 1)


def plain(value: float | None) -> str:
    """A number of at most three decimals, without a sign before zero.

    >>> plain(-5e-324), plain(4.0), plain(0.125), plain(13145), plain(None)
    ('0', '4', '0.125', '13145', '-')
    """
    if value is None:
        return "-"
    return f"{round(value, 3) + 0.0:.10g}"


def f1(kept_relevant: int, kept: int, relevant: int) -> float:
    """Harmonic mean of precision and recall; 1 if nothing is relevant and nothing is kept.

    >>> f1(kept_relevant=1, kept=2, relevant=2), f1(0, 0, 3), f1(0, 0, 0)
    (0.5, 0.0, 1.0)
    """
    if kept + relevant == 0:
        return 1.0
    return 2 * kept_relevant / (kept + relevant)


@dataclass(frozen=True)
class Rule:
    """Which documents of a query are kept, as the arguments of `Reranker.rank` say it.

    Attributes:
        threshold: Keep what scores above it; None keeps every document.
        top_n: Keep at most this many.
        min_docs: Keep at least the best this many, even below the threshold.
        by_score: Whether documents are taken best first. If not, they are taken in input order,
            which is the retriever's order if the file was written so.
    """

    threshold: float | None = None
    top_n: int | None = None
    min_docs: int = 0
    by_score: bool = True

    def kept(self, scores: Sequence[float]) -> list[int]:
        """Positions of the documents that are kept, in the order in which they are taken.

        >>> Rule(threshold=0.0, min_docs=1, top_n=2).kept([-1.0, -3.0])
        [0]
        """
        order = list(range(len(scores)))
        if self.by_score:
            order = best_first(scores)
        count = len(order)
        if self.threshold is not None:
            above = sum(score > self.threshold and score != BLANK_SCORE for score in scores)
            count = max(above, self.min_docs)
        if self.top_n is not None:
            count = min(count, self.top_n)
        return order[:count]


def rules(threshold: float) -> dict[str, Rule]:
    """The threshold alone, and what somebody would use instead, by their names in summaries.

    ``tau``: above the threshold. ``tau_min1``: above it, and at least the best one.
    ``tau_top3_min1`` and ``tau_top5_min1``: the same, and at most three or five. ``top1``, ``top3``
    and ``top5``: the best ones, whatever they score. ``first1``, ``first3`` and ``first5``: the
    first ones of the file, without the scores.
    """
    return {
        "tau": Rule(threshold),
        "tau_min1": Rule(threshold, min_docs=1),
        "tau_top3_min1": Rule(threshold, top_n=3, min_docs=1),
        "tau_top5_min1": Rule(threshold, top_n=5, min_docs=1),
        "top1": Rule(top_n=1),
        "top3": Rule(top_n=3),
        "top5": Rule(top_n=5),
        "first1": Rule(top_n=1, by_score=False),
        "first3": Rule(top_n=3, by_score=False),
        "first5": Rule(top_n=5, by_score=False),
    }


class Selection(NamedTuple):
    """How good the documents are that a rule keeps of one query."""

    f1: float  # 1 if nothing is relevant and nothing is kept; 0 without documents to choose from
    kept: int  # number of documents
    left_with_nothing: bool  # whether a document is relevant and no relevant one is kept


def select(query: ScoredQuery, rule: Rule) -> Selection:
    """Apply a rule to a query's scores and compare what it keeps with the labels."""
    kept = rule.kept(query.scores)
    hits = sum(query.relevant[place] for place in kept)
    relevant = sum(query.relevant)
    value = 0.0
    if query.scores:
        value = f1(hits, len(kept), relevant)
    return Selection(value, len(kept), relevant > 0 and hits == 0)


def f1_at(query: ScoredQuery, threshold: float) -> float:
    """F1 of the documents that score above the threshold."""
    return select(query, Rule(threshold)).f1


class RuleResult(NamedTuple):
    """What a rule does to several queries."""

    f1: float  # mean
    left_with_nothing: int  # answerable queries of which nothing relevant is kept
    kept_per_query: float  # mean number of documents


def apply_rule(queries: Sequence[ScoredQuery], rule: Rule) -> RuleResult:
    """Mean F1, queries left with nothing, and documents kept of each query."""
    selections = [select(query, rule) for query in queries]
    return RuleResult(
        mean([one.f1 for one in selections]),
        sum(one.left_with_nothing for one in selections),
        mean([one.kept for one in selections]),
    )


def best_threshold(
    queries: Sequence[ScoredQuery], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """The single threshold with the highest mean F1 over all queries, and the mean F1 there.

    The search is exact: lowering the threshold past one document changes one query's F1.

    Args:
        queries: Scored queries.
        weights: The weight of each query in the mean; None weighs all the same.

    Returns:
        The threshold and the mean F1. The threshold lies halfway between the last score that is
        kept and the first that is not. It is the highest score if keeping nothing is best, and the
        next number below the lowest score if keeping everything is, so that it scales and moves
        with the scores. Of several equally good thresholds it is the highest.

    >>> first = ScoredQuery([3.0, 1.0], [True, False])
    >>> best_threshold([first, ScoredQuery([2.0, 0.0], [True, False])])
    (1.5, 1.0)
    """
    if weights is None:
        weights = [1.0] * len(queries)
    documents = []
    values = []
    for row, query in enumerate(queries):
        values.append(f1_at(query, math.inf) * weights[row])
        for score, label in zip(query.scores, query.relevant, strict=True):
            documents.append((score, label, row))
    if not documents:
        return 0.0, mean(values)
    documents.sort(key=lambda document: -document[0])
    relevant = [sum(query.relevant) for query in queries]
    kept = [0] * len(queries)
    hits = [0] * len(queries)
    best = documents[0][0]
    total = math.fsum(values)
    best_total = total
    next_scores = [score for score, _, _ in documents[1:]]
    next_scores.append(math.nextafter(documents[-1][0], -math.inf))
    for (score, label, row), next_score in zip(documents, next_scores, strict=True):
        kept[row] += 1
        hits[row] += label
        value = f1(hits[row], kept[row], relevant[row]) * weights[row]
        total += value - values[row]
        values[row] = value
        if next_score < score and total > best_total + 1e-12:
            best = (score + next_score) / 2
            # Halfway between neighbouring numbers there is no other number.
            if best >= score:
                best = next_score
            best_total = total
    return best, best_total / math.fsum(weights)


def ranking_metrics(queries: Sequence[ScoredQuery]) -> dict[str, float]:
    """nDCG@5 and Recall@5 in the mean over queries, named ``ndcg@5`` and ``recall@5``."""
    return {name: mean(values) for name, values in ranking_by_query(queries).items()}


def ranking_by_query(queries: Sequence[ScoredQuery]) -> dict[str, list[float]]:
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
    measures = {"ndcg@5": ir_measures.nDCG @ 5, "recall@5": ir_measures.R @ 5}
    values = {name: [0.0] * len(queries) for name in measures}
    names = {measure: name for name, measure in measures.items()}
    for metric in ir_measures.iter_calc(measures.values(), qrels, run):
        values[names[metric.measure]][int(metric.query_id)] = float(metric.value)
    return values


def selection_measures(queries: Sequence[ScoredQuery], thresholds: Array) -> Mapping[str, Array]:
    """Each query's measures at each threshold, (queries, thresholds); NaN where one means nothing.

    An empty list has no precision, and a query without a relevant document has no recall. Its F1
    is 1 where nothing is kept. A query without documents has an F1 of 0.
    """
    shape = len(queries), len(thresholds)
    kept = np.zeros(shape)
    hits = np.zeros(shape)
    relevant = np.zeros((len(queries), 1))
    empty = np.zeros((len(queries), 1), dtype=bool)
    for row, query in enumerate(queries):
        above = np.asarray(query.scores, dtype=float)[:, None] > thresholds
        labels = np.asarray(query.relevant, dtype=bool)
        kept[row] = above.sum(0)
        hits[row] = above[labels].sum(0)
        relevant[row] = labels.sum()
        empty[row] = len(labels) == 0
    with np.errstate(invalid="ignore"):
        f1 = 2 * hits / (kept + relevant)
        nothing = np.where(relevant > 0, hits == 0, np.nan)
        measures = {"precision": hits / kept, "recall": hits / relevant}
    measures["f1"] = np.where(empty, 0.0, np.nan_to_num(f1, nan=1.0))
    measures["left_with_nothing"] = nothing
    return measures


def present_means(measures: Mapping[str, Array]) -> dict[str, float]:
    """Means of the measures, (queries,) or (queries, 1), over the queries that have one.

    A measure that means nothing for all queries is left out.
    """
    values = {}
    for name, by_query in measures.items():
        mean = mean_present(by_query).item()
        if not math.isnan(mean):
            values[name] = mean
    return values
