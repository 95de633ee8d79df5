"""Which documents of a list are kept: one rule for ranking, the service, evaluation and tuning.

The paper keeps what scores above zero. A list tells more than each of its scores: documents far
below the best one are rarely relevant, and where nothing scores above zero, the best one often is.
So the rule has two more parts, a gap and a fallback. Both can be switched off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

from ..errors import InputError, check_count

BLANK_SCORE = -10_000.0
"""Score of a document without text: below any other, so that whatever sorts by score puts it last.

Finite, because JSON has no infinity and other tools average or subtract; exact in float16. Scores
of RSRank lie within plus or minus layers x heads (288 for Qwen3-8B); those of other systems are
logits, cosines and probabilities.
"""

Native = Literal["native"]
"""The reranker's own value of a part of the rule."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """What is kept of a list in which no document scores above the threshold.

    Attributes:
        max_gap: Documents at most so far below the best one are kept.
        max_depth: Only documents that score above ``threshold - max_depth`` are kept.

    Raises:
        InputError: A value is no number of at least 0.
    """

    max_gap: float
    max_depth: float

    def __post_init__(self) -> None:
        check_distance("fallback.max_gap", self.max_gap)
        check_distance("fallback.max_depth", self.max_depth)


class Limits(TypedDict, total=False):
    """The parts of a `Rule` as arguments. "native" stands for the reranker's own value."""

    threshold: float | Native | None
    max_gap: float | Native | None
    fallback: Fallback | Native | None
    top_n: int | None


@dataclass(frozen=True, slots=True)
class Bar:
    """What a score has to reach in one list.

    Attributes:
        above: A score has to be above this number.
        least: A score has to be at least this number.
        weak: Whether the bar is that of the fallback.
        blanks: Whether documents without text are kept.
    """

    above: float
    least: float
    weak: bool = False
    blanks: bool = False

    def passes(self, score: float) -> bool:
        """Whether a score reaches the bar."""
        if score == BLANK_SCORE:
            return self.blanks
        return score > self.above and score >= self.least


@dataclass(frozen=True, slots=True)
class Rule:
    """Which documents of a list are kept. ``str(rule)`` says it in words.

    Documents without text (`BLANK_SCORE`) are kept only if the rule has neither a threshold nor a
    gap.

    Attributes:
        threshold: Keep what scores above it; None for no threshold.
        max_gap: Of these, keep documents at most so far below the best one; None for no gap.
        fallback: What is kept if no document scores above the threshold; None for nothing.
        top_n: Keep at most this many, the best ones; None for no limit.

    Raises:
        InputError: A value is out of range, or has no effect.

    >>> rule = Rule(threshold=0.0, max_gap=2.0, fallback=Fallback(max_gap=1.0, max_depth=2.0))
    >>> rule.select([0.5, 3.0, 1.5]), rule.select([-4.0, -0.5, -1.5]), rule.select([-3.0])
    ([1, 2], [1, 2], [])
    >>> print(rule)
    zero and within 2 of the best, else within 1 of the best and above -2
    """

    threshold: float | None = None
    max_gap: float | None = None
    fallback: Fallback | None = None
    top_n: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not is_number(self.threshold):
            raise InputError(
                f"threshold must be a number, 'native' or None, got {self.threshold!r}."
            )
        if self.max_gap is not None:
            check_distance("max_gap", self.max_gap)
        if self.fallback is not None:
            if not isinstance(self.fallback, Fallback):
                raise InputError(
                    "fallback must be a Fallback(max_gap, max_depth), 'native' or None, "
                    f"got {self.fallback!r}."
                )
            if self.threshold is None:
                raise InputError("fallback has no effect without a threshold. Leave it out.")
        if self.top_n is not None:
            check_count("top_n", self.top_n, 1)

    def with_limits(self, limits: Limits) -> "Rule":
        """This rule with other values for some of its parts.

        Without a threshold, the native gap and the native fallback do not apply: documents are
        ranked, and all of them are kept.

        Raises:
            InputError: A limit is out of range, or has no effect.
        """
        native = self
        threshold = limits.get("threshold", "native")
        if threshold == "native":
            threshold = native.threshold
        if threshold is None:
            native = Rule()
        max_gap = limits.get("max_gap", "native")
        if max_gap == "native":
            max_gap = native.max_gap
        fallback = limits.get("fallback", "native")
        if fallback == "native":
            fallback = native.fallback
        return Rule(threshold, max_gap, fallback, limits.get("top_n"))

    def bar(self, scores: Sequence[float]) -> Bar:
        """What a score of a list has to reach, before ``top_n``."""
        if self.threshold is None and self.max_gap is None:
            return Bar(-math.inf, -math.inf, blanks=True)
        best = max((score for score in scores if score != BLANK_SCORE), default=BLANK_SCORE)
        threshold = -math.inf if self.threshold is None else self.threshold
        if passes(best, threshold):
            max_gap = math.inf if self.max_gap is None else self.max_gap
            return Bar(threshold, best - max_gap)
        if self.fallback is None:
            return Bar(math.inf, math.inf)
        return Bar(threshold - self.fallback.max_depth, best - self.fallback.max_gap, weak=True)

    def select(self, scores: Sequence[float]) -> list[int]:
        """Positions of the documents that are kept, best first."""
        bar = self.bar(scores)
        kept = [place for place in best_first(scores) if bar.passes(scores[place])]
        return kept[: self.top_n]

    def __str__(self) -> str:
        parts = []
        if self.threshold is not None:
            parts.append(f"threshold {plain(self.threshold)}" if self.threshold else "zero")
        if self.max_gap is not None:
            parts.append(f"within {plain(self.max_gap)} of the best")
        words = " and ".join(parts)
        if self.fallback is not None and self.threshold is not None:
            lowest = self.threshold - self.fallback.max_depth
            words += (
                f", else within {plain(self.fallback.max_gap)} of the best "
                f"and above {plain(lowest)}"
            )
        if self.top_n is not None:
            words = f"top {self.top_n}" + (f" of {words}" if words else "")
        return words or "all"


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or numpy, and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def check_distance(name: str, value: Any) -> None:
    """InputError if a value is no number of at least 0; ``name`` is its name."""
    if not is_number(value) or value < 0:
        raise InputError(f"{name} must be a number of at least 0, got {value!r}.")


def passes(score: float, threshold: float | None) -> bool:
    """Whether a score is above a threshold. `BLANK_SCORE` passes no threshold but None."""
    return threshold is None or (score > threshold and score != BLANK_SCORE)


def best_first(scores: Sequence[float]) -> list[int]:
    """Positions of scores: the highest first, `BLANK_SCORE` last; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda n: (scores[n] == BLANK_SCORE, -scores[n]))


def plain(value: float | None) -> str:
    """A number of three decimals, or of two digits if it is smaller. Only zero is shown as 0.

    >>> plain(-0.0), plain(4.0), plain(0.1254), plain(13145), plain(-0.000451), plain(None)
    ('0', '4', '0.125', '13145', '-0.00045', '-')
    """
    if value is None:
        return "-"
    number = round(value, 3) or float(f"{value:.2g}")
    return f"{number + 0.0:.10g}"
