"""How sure a mean or a difference is: percentile bootstrap intervals over queries."""

import statistics
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Array = NDArray[np.float64]

LEVEL = 0.95  # confidence level of the intervals
RESAMPLES = 2000  # bootstrap samples


class Record(BaseModel):
    """Figures that are written as JSON and read back."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Estimate(Record):
    """A mean and its bootstrap confidence interval.

    The interval is None if a set has fewer than two queries.
    """

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Such as ``0.100 (0.025 to 0.200)``."""
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"

    def is_below(self, value: float) -> bool:
        """Whether all of the interval is below a value."""
        return self.high is not None and self.high < value


def estimate_mean(*samples: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of the samples' means, with its interval.

    Args:
        samples: One number for each query; for two systems, the paired differences. Several samples
            are several sets. Each set counts the same whatever its size, and is resampled by
            itself.
        resamples: Number of bootstrap samples.
        seed: The same numbers and the same seed give the same interval.

    Raises:
        ValueError: A sample is empty, or there is none.
    """
    if not samples or not all(samples):
        raise ValueError("estimate_mean needs samples with numbers in them.")
    drawn = []
    for number, sample in enumerate(samples):
        draws = resampled(len(sample), resamples, seed + number)
        drawn.append(draws @ np.array(sample) / len(sample))
    mean = statistics.fmean(map(statistics.fmean, samples))
    return estimate(mean, np.mean(drawn, 0), min(map(len, samples)))


def estimate(mean: float, drawn: Array, queries: int) -> Estimate:
    """A mean with its interval; a single query has none.

    Args:
        mean: Over all queries.
        drawn: The mean of each bootstrap sample.
        queries: Number of queries.
    """
    if queries < 2:
        return Estimate(mean=mean, low=None, high=None)
    low, high = interval(drawn)
    # The bounds and the mean of equal numbers may differ by rounding.
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean))


@lru_cache(maxsize=4)
def resampled(count: int, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each of so many queries is drawn, (resamples, queries), in a seeded bootstrap."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), resamples).astype(float)


def mean_present(values: Array, draws: Array | None = None) -> Array:
    """Means over the queries that have a value; NaN where none has one.

    Args:
        values: One for each query, (queries, ...), NaN for none.
        draws: How often each query counts, (samples, queries); None for once each.

    Returns:
        (...), or (samples, ...) with draws.
    """
    weights = draws
    if weights is None:
        weights = np.ones(len(values))
    present = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = weights @ np.where(present, values, 0.0) / (weights @ present)
    return mean


def interval(drawn: Array) -> tuple[float, float]:
    """Ends of the middle 95% of the drawn means that are numbers."""
    tail = 50 * (1 - LEVEL)
    low, high = np.nanpercentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """First minus second, query by query; ValueError if they differ in length."""
    return [a - b for a, b in zip(first, second, strict=True)]
