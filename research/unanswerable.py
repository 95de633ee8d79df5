"""How well the best score tells lists with a relevant passage from lists without one."""

import math
from collections.abc import Sequence

from scipy.stats import mannwhitneyu

from rsrank_rag.evaluation.metrics import ScoredQuery


def best_scores(queries: Sequence[ScoredQuery]) -> tuple[list[float], list[float]]:
    """The best score of each list with a relevant passage, and of each list without one.

    Lists without a relevant passage are the queries that have none, and an absent twin for every
    other query: its list with the relevant passages taken out. Empty lists have no best score.
    """
    answerable = []
    unanswerable = []
    for query in queries:
        pairs = zip(query.scores, query.relevant, strict=True)
        irrelevant = [score for score, label in pairs if not label]
        if any(query.relevant):
            answerable.append(max(query.scores))
        if irrelevant:
            unanswerable.append(max(irrelevant))
    return answerable, unanswerable


def auroc(positives: Sequence[float], negatives: Sequence[float]) -> float | None:
    """The probability that a positive's score is above a negative's; equal scores count one half.

    None if there are no positives or no negatives.

    >>> auroc([3.0, 1.0], [2.0, 1.0])
    0.625
    """
    if not positives or not negatives:
        return None
    wins = mannwhitneyu(positives, negatives).statistic
    return float(wins) / len(positives) / len(negatives)


def false_accepts(
    positives: Sequence[float], negatives: Sequence[float], recall: float = 0.9
) -> float | None:
    """Share of negatives that are accepted where at least ``recall`` of the positives are.

    A score is accepted if it reaches the highest limit at which enough positives do. None if there
    are no positives or no negatives.

    >>> false_accepts([5.0, 4.0, 3.0, 1.0], [4.5, 3.0, 2.0, 0.0], recall=0.75)
    0.5
    """
    if not positives or not negatives:
        return None
    # Rounding must not ask for one positive more: 0.9 * 10 is 9, not 9.000000000000002.
    count = math.ceil(recall * len(positives) - 1e-9)
    limit = sorted(positives, reverse=True)[max(count, 1) - 1]
    return sum(score >= limit for score in negatives) / len(negatives)
