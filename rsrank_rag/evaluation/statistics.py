"""How sure a mean or a difference is: percentile bootstrap intervals over queries."""

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

from ..errors import InputError

Array = NDArray[np.float64]

LEVEL = 0.95  # confidence level of the intervals
RESAMPLES = 2000  # bootstrap samples
FEWEST = 10  # of fewer numbers, a bootstrap interval is far too narrow


class Record(BaseModel):
    """Figures that are written as JSON and read back."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Estimate(Record):
    """A mean and its bootstrap confidence interval.

    The interval is None if a set has fewer than `FEWEST` queries with a number.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1 or -1 for an interval on one side of zero, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        """Such as ``0.100 (0.025 to 0.200)``.

        An interval without width is left out: queries that all agree say little about others.
        """
        return self.shown("{:.3f}".format)

    def shown(self, number: Callable[[float], str]) -> str:
        """As ``str``, with another format for numbers."""
        if self.low is None or self.high is None or self.low == self.high:
            return number(self.mean)
        return f"{number(self.mean)} ({number(self.low)} to {number(self.high)})"


def bootstrap(sample: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """The mean of a sample, then that of each bootstrap sample, (1 + resamples,).

    Args:
        sample: One number for each query, (queries,), NaN for a query without one.
        resamples: Number of bootstrap samples. They are NaN if fewer than `FEWEST` queries have a
            number.
        seed: The same seed draws the same queries. The difference of two results is therefore that
            of paired samples.
    """
    values = np.asarray(sample, dtype=float)
    drawn = mean_present(values, resampled(len(values), resamples, seed))
    if np.isfinite(values).sum() < FEWEST:
        drawn[1:] = np.nan
    return drawn


def estimate(drawn: Array) -> Estimate:
    """A number with the middle 95% of its bootstrap samples.

    Args:
        drawn: The number, then its value in each bootstrap sample, NaN for a sample without one.
    """
    mean = float(drawn[0])
    present = drawn[1:][~np.isnan(drawn[1:])]
    if not len(present):
        return Estimate(mean=mean, low=None, high=None)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(present, [tail, 100 - tail])
    # The bounds and the mean of equal numbers may differ by rounding.
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean))


@lru_cache(maxsize=4)
def resampled(count: int, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each of so many queries counts, (1 + resamples, queries): once, then as drawn."""
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(count, np.full(count, 1 / count), resamples)
    return np.vstack([np.ones(count), drawn])


def mean_present(values: Array, weights: Array | None = None) -> Array:
    """Means over the queries that have a value; NaN where none has one.

    Args:
        values: One for each query, (queries,), NaN for none.
        weights: How often each query counts, (queries,) or (samples, queries); None for once each.

    Returns:
        One mean, or one for each sample.
    """
    if weights is None:
        weights = np.ones(len(values))
    present = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = weights @ np.where(present, values, 0.0) / (weights @ present)
    return mean


def folds(count: int, parts: int) -> list[list[int]]:
    """Numbers of the queries that are left out of training, one list for each fold.

    There are ``parts`` folds, but no more than queries. Each query is left out once. The order is
    random, with a fixed seed.

    Raises:
        InputError: There are fewer than two queries.
    """
    if count < 2:
        raise InputError(
            f"{count} labelled queries cannot be learned from and measured on. Label more."
        )
    order = list(range(count))
    random.Random("folds-0").shuffle(order)
    return [sorted(order[start::parts]) for start in range(min(parts, count))]
