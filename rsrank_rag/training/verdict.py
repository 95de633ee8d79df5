"""Two ways to select documents, compared on the same queries: what was gained, and what was lost.

A loss or a gain counts when the 95% interval of the difference (paired bootstrap over queries) lies
on one side of zero. Few queries miss most losses.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ..evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from ..evaluation.statistics import FEWEST, Array, Estimate, Record, bootstrap, estimate
from ..ranking.rule import Rule

Outcome = Literal["better", "worse", "no difference beyond chance"]

MEASURES = {
    "ndcg@5": "nDCG@5",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "lost": "the share of answers lost",
}
"""What a verdict on weights looks at, and the words for it."""

RULE_MEASURES = {
    "lost": MEASURES["lost"],
    "kept": "passages kept per query",
    "recall": MEASURES["recall"],
}
"""What a verdict on rules looks at."""

LESS_IS_BETTER = ("lost", "kept")

ZERO = Rule(0.0)
"""The paper's rule."""

# Fewer queries cannot rule out a loss. Of 36 draws of 20 queries in which nothing was lost beyond
# chance, 31 lost something on other queries, and of 10 draws of 50 queries all 10
# (docs/few-queries.json). Nothing was measured between 50 and 100.
FEW_QUERIES = 100


class Verdict(Record):
    """Two selections of the same queries.

    Each mean is taken over the queries for which its measure means something: precision over those
    that keep a document, recall and lost answers over those with a relevant document. With few such
    queries, it has no interval (see `bootstrap`). A measure that means nothing for all queries of a
    selection is left out there.
    """

    queries: int
    before: dict[str, Estimate]
    after: dict[str, Estimate]
    difference: dict[str, Estimate]

    @property
    def gains(self) -> list[str]:
        """Measures that became better beyond chance."""
        return [name for name in self.difference if self._direction(name) > 0]

    @property
    def losses(self) -> list[str]:
        """Measures that became worse beyond chance."""
        return [name for name in self.difference if self._direction(name) < 0]

    @property
    def unjudged(self) -> list[str]:
        """Measures without an interval, because fewer than `FEWEST` queries count."""
        return [name for name, change in self.difference.items() if change.low is None]

    @property
    def problem(self) -> str | None:
        """Why fine-tuned weights should not be written; None if nothing speaks against them.

        No measure is gained, one is lost or cannot be judged, or the queries are few.
        """
        if self.queries < FEW_QUERIES and not self.losses:
            return (
                f"{self.queries} queries held out (fewer than {FEW_QUERIES}) cannot rule out a loss"
            )
        if self.outcome != "better" or self.unjudged:
            return f"the result on {self.queries} queries held out is {self}"
        return None

    @property
    def outcome(self) -> Outcome:
        """Worse if anything was lost, else better if anything was gained."""
        if self.losses:
            return "worse"
        if self.gains:
            return "better"
        return "no difference beyond chance"

    def __str__(self) -> str:
        """Every measure that changed beyond chance, losses first, or that none did."""
        words = MEASURES | RULE_MEASURES
        text = ""
        for word, names in (
            ("worse", self.losses),
            ("better", self.gains),
            (f"fewer than {FEWEST} queries cannot judge", self.unjudged),
        ):
            changes = [f"{words[name]} changes by {self.difference[name]}" for name in names]
            if changes:
                text += f"; {word}: {', '.join(changes)}"
        if self.outcome not in text:
            text = f"; {self.outcome}{text}"
        return text[2:]

    def _direction(self, name: str) -> int:
        """1 for a measure that became better beyond chance, -1 for worse, 0 for neither."""
        better = -1 if name in LESS_IS_BETTER else 1
        return better * self.difference[name].sign


def judge(
    before: Sequence[ScoredQuery], after: Sequence[ScoredQuery], rule: Rule = ZERO
) -> Verdict:
    """Compare two scorings of the same queries by one rule.

    Needs ir-measures (the ``eval`` extra).
    """
    return verdict_on(measure(before, rule), measure(after, rule))


def verdict_on(before: Mapping[str, Array], after: Mapping[str, Array]) -> Verdict:
    """Compare two selections by the measures of ``after``, (queries,) each."""
    count = len(next(iter(after.values())))
    verdict = Verdict(queries=count, before={}, after={}, difference={})
    for name in after:
        base = bootstrap(before[name])
        other = bootstrap(after[name])
        means = {"before": base, "after": other, "difference": other - base}
        for side, drawn in means.items():
            if not np.isnan(drawn[0]):
                getattr(verdict, side)[name] = estimate(drawn)
    return verdict


def measure(queries: Sequence[ScoredQuery], rule: Rule = ZERO) -> dict[str, Array]:
    """`MEASURES` of each query, (queries,), by a rule."""
    values = {**ranking_measures(queries), **selection_measures(queries, rule)}
    return {name: values[name] for name in MEASURES}
