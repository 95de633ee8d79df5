"""Choose the gap and the fallback of an artifact's rule on validation queries."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rsrank_rag.evaluation.metrics import ScoredQuery, selection_measures
from rsrank_rag.passages.rule import Fallback, Rule

GAPS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
FALLBACK_GAPS = (1.0, 2.0, 3.0)
FALLBACK_DEPTHS = (2.0, 3.0, 4.0, 6.0)

LOSS = 0.06
"""Share of answerable queries that may lose all relevant passages."""


def choose_rule(sets: Mapping[str, Sequence[ScoredQuery]]) -> Rule:
    """The rule at threshold 0 with the best mean F1 of those that lose few answers.

    Few are at most `LOSS`, or the fewest that a rule loses. Means count each set the same.

    Args:
        sets: Scored validation queries, by set.
    """
    results = {}
    for gap, fallback_gap, depth in itertools.product(GAPS, FALLBACK_GAPS, FALLBACK_DEPTHS):
        rule = Rule(0.0, max_gap=gap, fallback=Fallback(fallback_gap, depth))
        results[rule] = f1_and_loss(sets, rule)
    limit = max(LOSS, min(loss for _, loss in results.values()))
    tolerated = [rule for rule, (_, loss) in results.items() if loss <= limit]
    return max(tolerated, key=lambda rule: results[rule][0])


def f1_and_loss(sets: Mapping[str, Sequence[ScoredQuery]], rule: Rule) -> tuple[float, float]:
    """Mean F1, and the share of answerable queries that keep nothing relevant."""
    means = []
    for queries in sets.values():
        measures = selection_measures(queries, rule)
        means.append((measures["f1"].mean(), np.nanmean(measures["left_with_nothing"])))
    f1, loss = np.mean(means, axis=0)
    return float(f1), float(loss)
