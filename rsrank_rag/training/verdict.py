"""Did training help? The base against the trained weights on the same queries, which neither has seen."""

from collections.abc import Sequence
from typing import Literal

from ..evaluation.metrics import ScoredQuery, ranking_by_query, selection
from ..evaluation.statistics import Estimate, Record, estimate_mean, paired_differences

Outcome = Literal["better", "no difference that can be told", "worse: the base is kept", "worse: taken all the same"]

WORSE: Outcome = "worse: the base is kept"

DECIDING = ("ndcg@5", "f1")
"""What training must not lower, and should raise one of: the order of documents, and which of them are kept."""


class Verdict(Record):
    """Base and trained weights on so many held-out queries: ``ndcg@5``; ``precision``, ``recall``, ``f1`` of the kept.

    Worse if the interval of a difference of one of `DECIDING` lies below zero, else better if one lies above.
    """

    queries: int
    base: dict[str, Estimate]
    trained: dict[str, Estimate]
    difference: dict[str, Estimate]  # trained minus base, query by query (paired bootstrap)
    outcome: Outcome


def judge(
    base: Sequence[ScoredQuery], trained: Sequence[ScoredQuery], thresholds: tuple[float, float] = (0.0, 0.0)
) -> Verdict:
    """Compare two scorings of the same queries, each with its threshold."""
    first, second = map(by_query, (base, trained), thresholds)
    difference = {name: estimate_mean(paired_differences(second[name], first[name])) for name in first}
    deciding = [difference[name] for name in DECIDING]
    outcome: Outcome = "no difference that can be told"
    if any(found.high is not None and found.high < 0 for found in deciding):
        outcome = WORSE
    elif any(found.low is not None and found.low > 0 for found in deciding):
        outcome = "better"
    means = [{name: estimate_mean(values) for name, values in found.items()} for found in (first, second)]
    return Verdict(queries=len(base), base=means[0], trained=means[1], difference=difference, outcome=outcome)


def by_query(rows: Sequence[ScoredQuery], threshold: float = 0.0) -> dict[str, list[float]]:
    """Each query's ``ndcg@5``, and ``precision``, ``recall`` and ``f1`` of what scores above the threshold."""
    kept = [selection(query, threshold) for query in rows]
    parts = {name: [found[place] for found in kept] for place, name in enumerate(("precision", "recall", "f1"))}
    return {"ndcg@5": ranking_by_query(rows)["ndcg@5"], **parts}
