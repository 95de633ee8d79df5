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
from typing import NamedTuple

import numpy as np

from ..errors import InputError, finite, required
from ..passages.rule import BLANK_SCORE, Rule, best_first
from .statistics import ROUNDING, Array, mean_present


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


@dataclass(frozen=True)
class FirstOfList:
    """A rule without scores: the first documents of the file, in the file's order.

    The file's order is the retriever's if the file was written so.
    """

    count: int

    def __str__(self) -> str:
        return f"first {self.count} in the file's order"

    def select(self, scores: Sequence[float]) -> list[int]:
        """Positions of the documents that are kept."""
        return list(range(len(scores)))[: self.count]


def rules(native: Rule) -> dict[str, Rule | FirstOfList]:
    """The rule in use, and what somebody would use instead, by their names in summaries.

    ``rule``: the rule in use. ``tau``: its threshold alone, which is the paper's rule. ``top1``,
    ``top3`` and ``top5``: the best ones, whatever they score. ``first1``, ``first3`` and
    ``first5``: the first ones of the file, without the scores.
    """
    return {
        "rule": native,
        "tau": Rule(native.threshold),
        "top1": Rule(top_n=1),
        "top3": Rule(top_n=3),
        "top5": Rule(top_n=5),
        "first1": FirstOfList(1),
        "first3": FirstOfList(3),
        "first5": FirstOfList(5),
    }


def selection_measures(
    queries: Sequence[ScoredQuery], rule: Rule | FirstOfList
) -> dict[str, Array]:
    """Measures of what a rule keeps of each query, (queries,); NaN where one means nothing.

    ``kept``: number of documents. ``precision``, NaN if nothing is kept. ``recall`` and
    ``left_with_nothing`` (1 if nothing relevant is kept), NaN if nothing is relevant. ``f1``.
    """
    counts = np.zeros((len(queries), 4))
    for row, query in zip(counts, queries, strict=True):
        places = rule.select(query.scores)
        relevant_kept = sum(query.relevant[place] for place in places)
        row[:] = len(places), relevant_kept, sum(query.relevant), len(query.scores)
    kept, hits, relevant, documents = counts.T
    return {"kept": kept, **_measures(kept, hits, relevant, documents)}


def _measures(kept: Array, hits: Array, relevant: Array, documents: Array) -> dict[str, Array]:
    """Measures of numbers of documents: kept, kept and relevant, relevant, and all."""
    with np.errstate(invalid="ignore"):
        f1 = np.nan_to_num(2 * hits / (kept + relevant), nan=1.0)
        return {
            "precision": hits / kept,
            "recall": hits / relevant,
            "f1": np.where(documents == 0, 0.0, f1),
            "left_with_nothing": np.where(relevant > 0, hits == 0, np.nan),
        }


class RuleResult(NamedTuple):
    """What a rule does to several queries."""

    f1: float  # mean
    left_with_nothing: int  # answerable queries of which nothing relevant is kept
    kept_per_query: float  # mean number of documents


def apply_rule(queries: Sequence[ScoredQuery], rule: Rule | FirstOfList) -> RuleResult:
    """Mean F1, queries left with nothing, and documents kept of each query."""
    values = selection_measures(queries, rule)
    lost = int(np.nansum(values["left_with_nothing"]))
    return RuleResult(float(values["f1"].mean()), lost, float(values["kept"].mean()))


class ThresholdSweep:
    """The mean of one of `selection_measures` at every threshold that makes a difference.

    From one threshold to the next, one document more is kept, so each step changes one query.

    Args:
        queries: Scored queries.
        metric: ``precision``, ``recall``, ``f1`` or ``left_with_nothing``.
    """

    def __init__(self, queries: Sequence[ScoredQuery], metric: str) -> None:
        start = []
        documents = []
        for number, query in enumerate(queries):
            labels = np.array(query.relevant, dtype=float)[best_first(query.scores)]
            # Blank documents are last, and no threshold keeps them.
            scores = [one for one in sorted(query.scores, reverse=True) if one != BLANK_SCORE]
            count = len(scores)
            kept = np.arange(count + 1.0)
            hits = np.append(0.0, labels.cumsum())[: count + 1]
            values = _measures(kept, hits, labels.sum(), np.array(len(labels)))[metric]
            # The measure, 0 for none, and whether there is one.
            columns = np.stack([np.nan_to_num(values), ~np.isnan(values)])
            start.append(columns[:, 0])
            documents.append(np.vstack([scores, np.full(count, number), np.diff(columns)]))
        table = np.hstack(documents)
        table = table[:, np.argsort(-table[0], kind="stable")]
        # (2, queries): with nothing kept.
        self._start = np.transpose(start)
        # By document, best first: its score, its query's number, and what changes, (2, documents).
        self._scores = table[0]
        self._queries = table[1].astype(int)
        self._changes = table[2:]

    def means(self, weights: Array | None = None) -> tuple[Array, Array]:
        """All T thresholds that make a difference, (T,), and the mean of the measure at each, (T,).

        The thresholds fall from the highest to the lowest. The first is the highest score, at which
        nothing is kept. The next ones are halfway between two scores. The last keeps everything: it
        is below the lowest score by a thousandth of the range of the scores, or by 0.001 if all
        scores are equal. If all scores are scaled or moved, so are the thresholds. A mean is NaN if
        the measure means nothing for all queries.

        Args:
            weights: How often each query counts, (queries,); None for once each. Scores of
                a query that counts 0 make no threshold.
        """
        if weights is None:
            weights = np.ones(self._start.shape[1])
        weight = weights[self._queries]
        scores = self._scores[weight > 0]
        steps = (self._changes * weight)[:, weight > 0]
        totals = np.cumsum(np.column_stack([self._start @ weights, steps]), axis=1)
        # Documents with equal scores are kept together: the last of each counts.
        last = np.flatnonzero(np.diff(scores, append=-np.inf))
        scores = scores[last]
        next_below = np.nextafter(scores, -np.inf)
        spread = scores[:1] - scores[-1:]
        next_below[-1:] -= 0.001 * np.where(spread > 0, spread, 1.0)
        # Halfway between neighbouring numbers there is no other number.
        between = np.minimum((scores[:-1] + scores[1:]) / 2, next_below[:-1])
        thresholds = np.concatenate([np.append(scores, 0.0)[:1], between, next_below[-1:]])
        value, count = totals[:, np.append(0, last + 1)]
        with np.errstate(invalid="ignore"):
            return thresholds, value / count

    def reaching(
        self, value: float = math.inf, weights: Array | None = None, *, lowest: bool = False
    ) -> tuple[float, float]:
        """A threshold whose mean reaches a value or, without one, has the highest mean; its mean.

        Of several thresholds it is the highest, or the ``lowest``. NaN, NaN if the measure means
        nothing for the queries.
        """
        thresholds, means = self.means(weights)
        wanted = min(np.fmax.reduce(means), value)
        places = np.flatnonzero(means >= wanted - ROUNDING)
        if not len(places):
            return math.nan, math.nan
        place = places[0]
        if lowest:
            place = places[-1]
        return float(thresholds[place]), float(means[place])


def best_threshold(
    queries: Sequence[ScoredQuery], weights: Array | None = None
) -> tuple[float, float]:
    """The single threshold with the highest mean F1 over all queries, and the mean F1 there.

    The search is exact. Of several equally good thresholds it is the highest, see `ThresholdSweep`.

    Args:
        queries: Scored queries.
        weights: The weight of each query in the mean, (queries,); None weighs all the same.

    >>> first = ScoredQuery([3.0, 1.0], [True, False])
    >>> best_threshold([first, ScoredQuery([2.0, 0.0], [True, False])])
    (1.5, 1.0)
    """
    return ThresholdSweep(queries, "f1").reaching(weights=weights)


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
