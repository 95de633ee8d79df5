"""Thresholds of one query that need no labels when they are used (the paper's open problem, Limitations).

Every rule is a function from one query's scores (N,), in any order, to the threshold above which documents are kept.
Some look at the scores of random documents for the same query instead or as well: an empirical null (M,). Parameters
are chosen on other, labelled queries, by `best_choice`; `guaranteed_recall` and `guaranteed_evidence` make one
threshold for all queries from them, with a promise.

"Moves and scales": adding a number to all scores (and null scores) adds it to the threshold, and multiplying them by a
positive one multiplies it, so that the same documents are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from ..errors import InputError
from .metrics import ScoredQuery, f1_at
from .statistics import scipy_stats

Parameter = TypeVar("Parameter")


def shrunk(threshold: float, weight: float, towards: float = 0.0) -> float:
    """A threshold pulled towards another: weight 1 leaves it, 0 gives the other.

    >>> shrunk(2.0, 0.25)
    0.5
    """
    return towards + weight * (threshold - towards)


def largest_gap(
    scores: Sequence[float],
    *,
    least: int = 1,
    most: int | None = None,
    spreads: float = 0.0,
    otherwise: float = 0.0,
) -> float:
    """The middle of the largest gap between neighbouring sorted scores; moves and scales.

    Args:
        scores: (N,).
        least: Gaps that would keep fewer documents do not count.
        most: Nor those that would keep more; None for N - 1.
        spreads: The gap must be at least as many standard deviations of the scores wide.
        otherwise: Returned where no gap counts, or all scores are equal.

    >>> largest_gap([5.0, 4.0, 1.0, 0.0])
    2.5
    """
    ordered = _sorted(scores)
    gaps = ordered[:-1] - ordered[1:]
    kept = np.arange(1, len(ordered))
    counts = (kept >= least) & (kept <= (len(ordered) if most is None else most)) & (gaps > 0)
    if not counts.any():
        return otherwise
    place = int(np.argmax(np.where(counts, gaps, -1.0)))
    if gaps[place] < spreads * ordered.std():
        return otherwise
    return _between(ordered[place], ordered[place + 1])


def gap_near_zero(scores: Sequence[float], weight: float) -> float:
    """The middle of the gap with the largest width less ``weight`` times its distance from zero.

    Weight 0 is the largest gap. A heavy one is zero's own decision: the gap that holds zero is at distance 0, and
    where zero lies beyond all scores, keeping all or nothing counts as a gap of width 0 at distance 0.

    Args:
        scores: (N,).
        weight: Width that a gap must gain for each unit it is further from zero.

    >>> gap_near_zero([5.0, 4.0, 1.0, -1.0], 0.0), gap_near_zero([5.0, 4.0, 1.0, -1.0], 3.0)
    (2.5, 0.0)
    """
    ordered = _sorted(scores)
    if not len(ordered) or ordered[-1] > 0 or ordered[0] <= 0:
        best, threshold = 0.0, 0.0
    else:
        best, threshold = -math.inf, 0.0
    for high, low in pairwise(ordered):
        value = (high - low) - weight * max(low, -high, 0.0)
        if high > low and value > best:
            best, threshold = value, _between(high, low)
    return threshold


def two_means(scores: Sequence[float], *, otherwise: float = 0.0) -> float:
    """The split into two groups with the least squares around their means (Otsu's threshold); moves and scales.

    Args:
        scores: (N,).
        otherwise: Returned where there are not two different scores.

    Returns:
        The middle between the lowest score of the upper group and the highest of the lower one.

    >>> two_means([9.0, 8.0, 2.0, 1.0, 0.0])
    5.0
    """
    ordered = _sorted(scores)
    place = _otsu(ordered)
    return otherwise if place is None else _between(ordered[place], ordered[place + 1])


def mixture(scores: Sequence[float], *, steps: int = 200, otherwise: float = 0.0) -> float:
    """Where two normal distributions of one variance, fitted to the scores by EM, are equally likely; moves and scales.

    EM starts from the groups of `two_means`.

    Args:
        scores: (N,).
        steps: Of EM, at most.
        otherwise: Returned where there are not two different scores, or one group has swallowed the other.
    """
    ordered = _sorted(scores)
    place = _otsu(ordered)
    if place is None:
        return otherwise
    width = ordered[0] - ordered[-1]  # first, lest the squares of tiny scores vanish
    scale = width * (ordered / width).std()
    values = (ordered - ordered.mean()) / scale
    upper = (np.arange(len(values)) <= place).astype(float)
    means, share, variance = np.zeros(2), 0.5, 1.0
    for _ in range(steps):
        weights = np.stack([1 - upper, upper])
        sizes = weights.sum(1)
        if sizes.min() < 1e-6:
            return otherwise
        means, share = weights @ values / sizes, sizes[1] / len(values)
        # The floor keeps a group of equal scores from becoming a spike; it is a hundredth of the spread of all.
        variance = max(float((weights * (values - means[:, None]) ** 2).sum() / len(values)), 1e-4)
        log_odds = math.log(share / (1 - share)) + (means[1] - means[0]) * (values - means.mean()) / variance
        moved = 1 / (1 + np.exp(-np.clip(log_odds, -700, 700)))
        if np.abs(moved - upper).max() < 1e-9:
            break
        upper = moved
    if means[1] - means[0] < 1e-6:
        return otherwise
    crossing = means.mean() - variance / (means[1] - means[0]) * math.log(share / (1 - share))
    return float(ordered.mean() + scale * crossing)


def mean_and_spreads(values: Sequence[float], spreads: float) -> float:
    """Mean plus so many standard deviations, of the candidates' scores or of the null's; moves and scales.

    >>> mean_and_spreads([1.0, 3.0], 2.0)
    4.0
    """
    return float(np.mean(values) + spreads * np.std(values)) if len(values) else 0.0


def median_and_spreads(values: Sequence[float], spreads: float) -> float:
    """Median plus so many median absolute deviations from it; moves and scales.

    >>> median_and_spreads([0.0, 1.0, 2.0, 30.0], 2.0)
    3.5
    """
    if not len(values):
        return 0.0
    middle = float(np.median(values))
    return middle + spreads * float(np.median(np.abs(np.asarray(values) - middle)))


def quantile(values: Sequence[float], level: float) -> float:
    """A quantile of the candidates' scores (keep the top share) or of the null's (a false-positive rate).

    Moves and scales.

    >>> quantile([0.0, 1.0, 2.0, 3.0], 0.5)
    1.5
    """
    return float(np.quantile(values, level)) if len(values) else 0.0


def below_the_best(scores: Sequence[float], distance: float) -> float:
    """So much below the best score: keeps what nearly ties with it. Moves.

    >>> below_the_best([1.0, 4.0], 1.5)
    2.5
    """
    return max(scores) - distance if len(scores) else 0.0


def false_discovery(scores: Sequence[float], null: Sequence[float], rate: float, *, normal: bool = False) -> float:
    """Benjamini and Hochberg's rule: of what is kept, at most a share ``rate`` is expected to be like the null.

    Moves and scales.

    Args:
        scores: (N,).
        null: (M,) scores of random documents for the same query.
        rate: Expected share of false discoveries, if the irrelevant candidates score as random documents do.
        normal: p-values from a normal distribution with the null's mean and deviation instead of from its ranks, of
            which none is below 1 / (M + 1).

    Returns:
        The middle between the lowest score kept and the next; the highest score where nothing is kept.

    >>> false_discovery([9.0, 1.0], [0.0, 1.0, 2.0], 0.5)
    5.0
    """
    if not len(scores) or not len(null):
        return 0.0
    ordered, random = _sorted(scores), np.asarray(null, dtype=float)
    if normal:
        tail = NormalDist(0.0, 1.0)
        spread = float(random.std()) or 1e-12
        p_values = np.array([tail.cdf(-(score - random.mean()) / spread) for score in ordered])
    else:
        p_values = (1 + (random[None, :] >= ordered[:, None]).sum(1)) / (len(random) + 1)
    adjusted = scipy_stats().false_discovery_control(p_values)
    return _keeping(ordered, int((adjusted <= rate * (1 + 1e-9)).sum()))


def expected_f1(scores: Sequence[float], slope: float, offset: float) -> float:
    """The threshold with the highest expected F1, if a score's chance of being relevant is a logistic function of it.

    With chances p, the best k documents have about the F1 2 (p_1 + ... + p_k) / (k + p_1 + ... + p_N); keeping nothing
    has F1 1 where nothing is relevant. So a document is kept if its chance is above half of the F1 that can be had: the
    surer the best documents, the higher the threshold of the others.

    Args:
        scores: (N,).
        slope: Log-odds a unit of score, above 0.
        offset: The score at which relevant and irrelevant are equally likely.

    Returns:
        The middle between the last document kept and the next; the highest score where nothing is best kept, and a hair
        below the lowest where everything is.
    """
    ordered = _sorted(scores)
    if not len(ordered):
        return offset
    chances = 1 / (1 + np.exp(-np.clip(slope * (ordered - offset), -700, 700)))
    expected = 2 * np.cumsum(chances) / (np.arange(1, len(ordered) + 1) + chances.sum())
    expected[:-1][ordered[:-1] == ordered[1:]] = -1.0  # equal scores cannot be parted
    kept = int(np.argmax(expected)) + 1
    return _keeping(ordered, 0 if np.prod(1 - chances) > expected[kept - 1] else kept)


def standardised(scores: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Scores in standard deviations above the mean of others, such as the null's; 0 spread counts as 1.

    >>> standardised([3.0], [0.0, 2.0])
    [2.0]
    """
    spread = float(np.std(reference)) if len(reference) else 0.0
    middle = float(np.mean(reference)) if len(reference) else 0.0
    return [(score - middle) / (spread or 1.0) for score in scores]


def guaranteed_recall(queries: Sequence[ScoredQuery], recall: float) -> float:
    """The highest threshold whose expected recall on a new query is at least ``recall``.

    Conformal risk control (Angelopoulos and others, 2022) with the loss 1 - recall. The promise holds over the draw of
    calibration queries and new query together, for queries exchangeable with those of the calibration, and for no set
    of another kind. Queries with nothing relevant have recall 1.

    Args:
        queries: Labelled queries that the model was not trained on.
        recall: Between 0 and 1.

    Returns:
        A hair below a score; minus infinity where so few queries can promise nothing.

    Raises:
        InputError: Recall is not between 0 and 1.

    >>> found = guaranteed_recall([ScoredQuery([2.0, 1.0], [True, False])] * 9, 0.9)
    >>> round(found, 6)
    2.0
    """
    allowed = _risk(recall) * (len(queries) + 1) - 1.0  # total loss that the calibration queries may have
    losses = sorted(
        (score, 1 / sum(query.relevant))
        for query in queries
        for score, relevant in zip(query.scores, query.relevant, strict=True)
        if relevant
    )
    if allowed < -1e-9 or not losses:
        return -math.inf
    total = 0.0
    for score, loss in losses:
        total += loss
        if total > allowed + 1e-9:
            return math.nextafter(score, -math.inf)
    return losses[-1][0]


def guaranteed_evidence(queries: Sequence[ScoredQuery], confidence: float) -> float:
    """The threshold that keeps all relevant documents of a new query with a probability of at least ``confidence``.

    Split conformal prediction with the lowest score of a query's relevant documents. As for `guaranteed_recall`, new
    queries must be exchangeable with those of the calibration. Queries with nothing relevant are left out.

    Args:
        queries: Labelled queries that the model was not trained on.
        confidence: Between 0 and 1.

    Returns:
        A hair below a score; minus infinity where so few queries can promise nothing.

    Raises:
        InputError: Confidence is not between 0 and 1.
    """
    lowest = sorted(
        min(score for score, relevant in zip(query.scores, query.relevant, strict=True) if relevant)
        for query in queries
        if any(query.relevant)
    )
    rank = math.floor(_risk(confidence) * (len(lowest) + 1) + 1e-9)
    return -math.inf if rank < 1 else math.nextafter(lowest[min(rank, len(lowest)) - 1], -math.inf)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a rule may see of a query, and the labels it is judged by.

    Attributes:
        query: Scores and labels.
        null: (M,) scores of random documents for the same query; empty where there are none.
    """

    query: ScoredQuery
    null: Sequence[float] = ()


Rule = Callable[[Sequence[float], Sequence[float]], float]
"""Scores and null scores of one query -> its threshold."""


def f1_by_rule(rule: Rule, queries: Sequence[Observed]) -> list[float]:
    """F1 of each query at its own threshold."""
    return [f1_at(seen.query, rule(seen.query.scores, seen.null)) for seen in queries]


def best_choice(
    make: Callable[[Parameter], Rule], choices: Iterable[Parameter], sets: Sequence[Sequence[Observed]]
) -> Parameter:
    """The parameter with the highest mean F1 over sets, each set counting the same; the first of equally good ones.

    Args:
        make: Parameter -> rule.
        choices: Parameters to try, at least one.
        sets: Labelled queries of each set to choose on, never those it is measured on.
    """

    def quality(choice: Parameter) -> float:
        rule = make(choice)
        return math.fsum(math.fsum(f1_by_rule(rule, queries)) / len(queries) for queries in sets)

    return max(choices, key=quality)


def _risk(promise: float) -> float:
    if not 0 < promise < 1:
        raise InputError(f"A promise must lie between 0 and 1, got {promise}.")
    return 1 - promise


def _sorted(scores: Sequence[float]) -> np.ndarray:
    """Best first."""
    return np.sort(np.asarray(scores, dtype=float))[::-1]


def _between(high: float, low: float) -> float:
    """A threshold that keeps the higher and drops the lower of two neighbours."""
    middle = (float(high) + float(low)) / 2
    return middle if middle < high else float(low)


def _keeping(ordered: np.ndarray, count: int) -> float:
    """A threshold that keeps the best ``count`` of the sorted scores."""
    if count == 0:
        return float(ordered[0])
    return (
        _between(ordered[count - 1], ordered[count]) if count < len(ordered) else math.nextafter(ordered[-1], -math.inf)
    )


def _otsu(ordered: np.ndarray) -> int | None:
    """Position of the last score of the upper group; None without two different scores."""
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return None
    values = (ordered - ordered.mean()) / (ordered[0] - ordered[-1])
    upper, size = np.cumsum(values)[:-1], np.arange(1, len(values))
    between = upper**2 / (size * (len(values) - size))  # proportional to the variance between the groups
    between[ordered[:-1] == ordered[1:]] = -1.0
    # Of splits that differ by rounding alone, the one with the smallest upper group.
    return int(np.flatnonzero(between >= between.max() * (1 - 1e-9))[0])
