"""How sure a mean or a difference is: bootstrap intervals and the paired t-test (scipy), over queries."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from ..errors import required

LEVEL = 0.95  # confidence level of the intervals
RESAMPLES = 2000  # bootstrap samples

_AT_ONCE = (
    1_000_000  # numbers drawn at a time, so that memory does not grow with the number of queries
)


class Record(BaseModel):
    """Figures that are written as JSON and read back."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Estimate(Record):
    """A mean and its bootstrap confidence interval; no interval (None) with fewer than two queries in a set."""

    mean: float
    low: float | None
    high: float | None


class PairedTest(Record):
    """A paired t-test."""

    difference: float  # mean of first minus second
    t: (
        float | None
    )  # None where it is not defined: fewer than two pairs, or all differ by the same amount
    p: (
        float | None
    )  # two-sided; None with fewer than two pairs, 1 where no pair differs, 0 where all do by the same


def estimate_mean(*samples: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Mean of the samples' means with its percentile bootstrap interval.

    `samples`: one number a query (for two systems, the paired differences). Several are sets, each counting the same
    whatever its size and each resampled by itself. ValueError: one is empty, or there is none. `seed`: the same
    numbers give the same interval.
    """
    if not samples or not all(samples):
        raise ValueError("estimate_mean needs samples with numbers in them.")
    mean = math.fsum(math.fsum(sample) / len(sample) for sample in samples) / len(samples)
    if min(map(len, samples)) < 2:
        return Estimate(mean=mean, low=None, high=None)

    def mean_of_means(*drawn: Any, axis: int) -> Any:
        return sum(sample.mean(axis=axis) for sample in drawn) / len(drawn)

    found = scipy_stats().bootstrap(
        [np.asarray(sample, dtype=float) for sample in samples],
        mean_of_means,
        n_resamples=resamples,
        batch=max(1, _AT_ONCE // max(map(len, samples))),
        confidence_level=LEVEL,
        method="percentile",  # BCa, the default, has no answer where a metric is the same for all queries
        rng=np.random.default_rng(seed),
    )
    low, high = map(float, found.confidence_interval)
    return Estimate(
        mean=mean, low=min(low, mean), high=max(high, mean)
    )  # equal numbers differ by rounding


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """First minus second, query by query; ValueError where they differ in length."""
    return [a - b for a, b in zip(first, second, strict=True)]


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Paired t-test, such as the paper's Table 1: each query's best F1 against its F1 at the set's best threshold."""
    differences = paired_differences(first, second)
    mean = math.fsum(differences) / max(len(differences), 1)
    t, p = None, None
    if len(differences) > 1 and max(differences) - min(differences) > 1e-12:
        t, p = map(float, scipy_stats().ttest_rel(first, second))
    elif len(differences) > 1:  # all pairs differ by the same amount
        t, p = (0.0, 1.0) if abs(mean) < 1e-12 else (None, 0.0)
    return PairedTest(difference=mean, t=t, p=p)


def scipy_stats() -> Any:
    """The library; MissingDependencyError where it is not installed."""
    return required("scipy", "Intervals and tests need scipy.", "eval").stats
