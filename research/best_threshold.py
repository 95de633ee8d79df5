"""The single threshold with the highest mean F1, as the paper measures systems without a zero."""

from collections.abc import Sequence

import numpy as np

from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import Array
from rsrank_rag.ranking.rule import BLANK_SCORE, best_first

# Means that differ by less are equal.
ROUNDING = 1e-9


def best_threshold(
    queries: Sequence[ScoredQuery], weights: Array | None = None
) -> tuple[float, float]:
    """The single threshold with the highest mean F1 over all queries, and the mean F1 there.

    The search is exact. From one threshold to the next, one document more is kept, so each step
    changes one query. Thresholds are halfway between two scores. The highest threshold is the
    highest score, at which nothing is kept. The lowest is below all scores by a thousandth of their
    range, or by 0.001 if all are equal. Of several equally good thresholds the highest is returned.

    Args:
        queries: Scored queries.
        weights: The weight of each query in the mean, (queries,); None weighs all the same.

    >>> first = ScoredQuery([3.0, 1.0], [True, False])
    >>> best_threshold([first, ScoredQuery([2.0, 0.0], [True, False])])
    (1.5, 1.0)
    """
    if weights is None:
        weights = np.ones(len(queries))
    mean_without_documents = 0.0
    columns = []
    for query, weight in zip(queries, weights / weights.sum(), strict=True):
        labels = np.array(query.relevant, dtype=float)[best_first(query.scores)]
        # Blank documents are last, and no threshold keeps them.
        scores = sorted(score for score in query.scores if score != BLANK_SCORE)[::-1]
        count = len(scores)
        hits = np.append(0.0, labels.cumsum())[: count + 1]
        with np.errstate(invalid="ignore"):
            f1 = np.nan_to_num(2 * hits / (np.arange(count + 1) + labels.sum()), nan=1.0)
        f1 *= weight * (len(labels) > 0)
        mean_without_documents += f1[0]
        columns.append(np.stack([scores, np.diff(f1)]))
    # By document, best first: its score, and what changes.
    scores, changes = np.hstack(columns)
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    means = mean_without_documents + np.append(0.0, changes[order].cumsum())
    # Documents with equal scores are kept together: the last of each counts.
    last = np.flatnonzero(np.diff(scores, append=-np.inf))
    scores = scores[last]
    means = means[np.append(0, last + 1)]
    next_below = np.nextafter(scores, -np.inf)
    spread = scores[:1] - scores[-1:]
    next_below[-1:] -= 0.001 * np.where(spread > 0, spread, 1.0)
    # Halfway between neighbouring numbers there is no other number.
    between = np.minimum((scores[:-1] + scores[1:]) / 2, next_below[:-1])
    thresholds = np.concatenate([np.append(scores, 0.0)[:1], between, next_below[-1:]])
    place = np.flatnonzero(means >= means.max() - ROUNDING)[0]
    return float(thresholds[place]), float(means[place])


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    No other threshold for all sets together has a higher F1 on these labels.
    """
    queries: list[ScoredQuery] = []
    weights: list[float] = []
    for scored in sets:
        queries += scored
        weights += [1.0 / len(scored)] * len(scored)
    return best_threshold(queries, np.array(weights))[0]
