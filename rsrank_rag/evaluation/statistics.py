"""How sure a mean or a difference is: bootstrap intervals and the paired t-test (scipy)."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from ..errors import required

LEVEL = 0.95  # confidence level of the intervals
RESAMPLES = 2000  # bootstrap samples

# Numbers drawn at a time, so that memory does not grow with the number of queries.
NUMBERS_AT_A_TIME = 1_000_000


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


class PairedTest(Record):
    """A paired t-test.

    ``t`` and ``p`` (two-sided) are None where the test is not defined: with fewer than two pairs,
    and if all pairs differ by the same amount.
    """

    difference: float  # mean of first minus second
    t: float | None
    p: float | None


def estimate_mean(*samples: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of the samples' means, with its percentile bootstrap interval.

    Args:
        samples: One number for each query; for two systems, the paired differences. Several samples
            are several sets. Each set counts the same whatever its size, and is resampled by
            itself.
        resamples: Number of bootstrap samples.
        seed: The same numbers and the same seed give the same interval.

    Raises:
        ValueError: A sample is empty, or there is none.
        MissingDependencyError: scipy is not installed.
    """
    if not samples or not all(samples):
        raise ValueError("estimate_mean needs samples with numbers in them.")
    mean = statistics.fmean(map(statistics.fmean, samples))
    largest = max(map(len, samples))
    if min(map(len, samples)) < 2:
        return Estimate(mean=mean, low=None, high=None)
    result = scipy_stats().bootstrap(
        samples,
        _mean_of_means,
        n_resamples=resamples,
        batch=max(1, NUMBERS_AT_A_TIME // largest),
        confidence_level=LEVEL,
        # BCa, the default, has no answer where a metric is the same for all queries.
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = map(float, result.confidence_interval)
    # The bounds and the mean of equal numbers may differ by rounding.
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean))


def _mean_of_means(*samples: Any, axis: int) -> Any:
    return sum(sample.mean(axis=axis) for sample in samples) / len(samples)


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """First minus second, query by query; ValueError if they differ in length."""
    return [a - b for a, b in zip(first, second, strict=True)]


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """The paired t-test of the paper's Table 1.

    There it compares each query's best F1 with its F1 at the set's best threshold.
    """
    differences = paired_differences(first, second)
    if not differences:
        return PairedTest(difference=0.0, t=None, p=None)
    mean = statistics.fmean(differences)
    if max(differences) - min(differences) < 1e-12:
        return PairedTest(difference=mean, t=None, p=None)
    result = scipy_stats().ttest_rel(first, second)
    return PairedTest(difference=mean, t=float(result.statistic), p=float(result.pvalue))


def scipy_stats() -> Any:
    """The library; MissingDependencyError if it is not installed."""
    return required("scipy", "Intervals and tests need scipy.", "eval").stats
