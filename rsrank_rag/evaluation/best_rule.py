"""The best rule of a system on labelled queries: its threshold, its gap and its fallback.

The search tries a grid of rules. The values of the grid are quantiles of scores and of distances,
rounded, so that rules are short to write.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..ranking.rule import BLANK_SCORE, Fallback, Rule
from .metrics import ScoredQuery
from .statistics import Array

# Numbers of quantiles. With twice as many of each, the best rules of `mini` on ten sets kept 4.65
# passages a query instead of 4.75, and took six times as long to find.
THRESHOLDS = 24
GAPS = 12
FALLBACKS = 6

# With a probability of 95%, a rule that loses none of so many answers loses at most a tenth of all.
ENOUGH_ANSWERS = 29


@dataclass(frozen=True)
class Goal:
    """What a rule has to reach. Of the rules that do, the best one has the lowest cost.

    An answer is lost if an answerable query, one with a relevant document, keeps no relevant one.
    The cost of a query is the number of documents that are kept, and one more if the threshold errs
    on the query: the query is answerable and no document is above the threshold, or the query is
    unanswerable and a document is.

    Attributes:
        lost: Share of the answers that may be lost, 0 to 1.
        recall: The least mean recall of the answerable queries, 0 to 1.

    >>> print(Goal())
    at most 10% of the answers lost, a recall of at least 80%
    """

    lost: float = 0.1
    recall: float = 0.8

    def __str__(self) -> str:
        return (
            f"at most {100 * self.lost:g}% of the answers lost, "
            f"a recall of at least {100 * self.recall:g}%"
        )


def best_rule(
    queries: Sequence[ScoredQuery],
    goal: Goal | None = None,
    weights: Array | None = None,
    threshold: float | None = None,
) -> Rule:
    """The rule of a grid that reaches a goal at the lowest cost, or that comes nearest to the goal.

    Equal queries give equal rules. Of equal rules, the one with fewer parts is best.

    Args:
        queries: Scored queries.
        goal: The goal; `Goal` without arguments by default.
        weights: How much each query counts, (queries,); None for the same.
        threshold: The rule's threshold; None for the best one.

    Raises:
        InputError: No query has a relevant document with text.

    >>> first = ScoredQuery([3.0, 1.0, 0.5], [True, False, False])
    >>> lower = ScoredQuery([-1.0, -3.0, -3.5], [True, False, False])
    >>> best_rule([first, lower])
    Rule(threshold=-1.01, max_gap=0.0, fallback=None, top_n=None)
    """
    grid = _Grid(queries, weights)
    goal = goal or Goal()
    thresholds = grid.thresholds if threshold is None else [threshold]
    rule = Rule()
    least = [math.inf]
    for threshold in thresholds:
        has_strong = grid.best > threshold
        errors = grid.errors(threshold)
        fallbacks: list[Fallback | None] = [None]
        weak = [np.zeros(3)]
        for depth in grid.depths(threshold):
            for gap in grid.gaps[:: GAPS // FALLBACKS]:
                fallbacks.append(Fallback(gap, depth))
                weak.append(grid.totals(~has_strong, threshold - depth, gap))
        for max_gap in (None, *grid.gaps):
            strong = grid.totals(has_strong, threshold, max_gap)
            for fallback, totals in zip(fallbacks, strong + weak, strict=True):
                kept, answers, recall = totals.tolist()
                missing = max(1 - goal.lost - answers, 0) + max(goal.recall - recall, 0)
                key = [round(x, 9) for x in (missing, kept + errors, -answers, -recall)]
                if key < least:
                    least = key
                    rule = Rule(threshold, max_gap, fallback)
    return rule


class _Grid:
    """The values that are tried, and what a bar keeps of all queries.

    Attributes:
        best: The best score of each query, (queries,).
        thresholds: From the highest to one below all scores.
        gaps: Distances from the best score, ascending.
    """

    def __init__(self, queries: Sequence[ScoredQuery], weights: Array | None) -> None:
        width = max((len(query.scores) for query in queries), default=0)
        # (queries, documents). A threshold drops blank documents, as it does the padding.
        self._scores = np.full((len(queries), width + 1), -np.inf)
        self._relevant = np.zeros(self._scores.shape, dtype=bool)
        for row, query in enumerate(queries):
            count = len(query.scores)
            self._scores[row, :count] = query.scores
            self._relevant[row, :count] = query.relevant
        self._scores[self._scores == BLANK_SCORE] = -np.inf
        self._relevant_count = self._relevant.sum(1)
        self._is_answerable = self._relevant_count > 0
        if weights is None:
            weights = np.ones(len(queries))
        self._weights = weights / weights.sum()
        self._answer_weights = np.where(self._is_answerable, weights, 0)
        self.best = self._scores.max(1, initial=-np.inf)
        present = self._scores[np.isfinite(self._scores)]
        reached = self._relevant & np.isfinite(self._scores)
        if not reached.any():
            raise InputError(
                "No rule can be found: no query has a relevant document. Add queries with one."
            )
        self._answer_weights /= self._answer_weights.sum()
        # The last decimal is about a hundredth of the standard deviation.
        self._decimals = 2 - math.floor(math.log10(present.std() or 1.0))
        bests = self.best[np.isfinite(self.best)]
        levels = np.quantile([*self._scores[reached], *bests], np.linspace(0, 1, THRESHOLDS))
        # A score has to be above a threshold, not at it.
        levels = np.append(levels, present.min()) - 10.0**-self._decimals
        self.thresholds = self._ascending(levels)[::-1]
        distances = self.best[reached.nonzero()[0]] - self._scores[reached]
        # Rounded up.
        below = self._ascending(-np.quantile(distances, np.linspace(0, 1, GAPS)))
        self.gaps = [-distance + 0.0 for distance in below[::-1]]

    def errors(self, threshold: float) -> float:
        """Share of the queries on which a threshold errs."""
        return float(self._weights @ ((self.best > threshold) != self._is_answerable))

    def depths(self, threshold: float) -> list[float]:
        """Depths of a fallback: distances of best scores below a threshold."""
        is_weak = self._is_answerable & (self.best <= threshold) & np.isfinite(self.best)
        if not is_weak.any():
            return []
        distances = threshold - self.best[is_weak]
        levels = np.quantile(distances, np.linspace(0, 1, FALLBACKS))
        # A score has to be above the lowest depth, not at it.
        return self._ascending(levels + 10.0**-self._decimals)

    def totals(self, rows: Array, above: float, max_gap: float | None) -> Array:
        """Weighted sums over some queries: documents kept, answers kept, and recall, (3,).

        Args:
            rows: Which queries are summed, (queries,).
            above: Documents that score above this are kept,
            max_gap: and that are at most so far below the best one.
        """
        kept = self._scores[rows] > above
        if max_gap is not None:
            kept &= self._scores[rows] >= (self.best[rows] - max_gap)[:, None]
        hits = (kept & self._relevant[rows]).sum(1)
        recall = hits / np.maximum(self._relevant_count[rows], 1)
        weights = self._answer_weights[rows]
        return np.array([self._weights[rows] @ kept.sum(1), weights @ (hits > 0), weights @ recall])

    def _ascending(self, values: Array) -> list[float]:
        """Distinct values, rounded down to the decimals of the grid. Zero has no sign."""
        scale = 10.0**self._decimals
        down = (np.floor(values * scale) / scale).round(self._decimals)
        distinct: list[float] = np.unique(down + 0.0).tolist()
        return distinct
