"""Bootstrap intervals: by hand and against slow references."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag.evaluation import statistics
from rsrank_rag.evaluation.statistics import bootstrap, estimate


@pytest.fixture(autouse=True)
def intervals_of_few(monkeypatch):
    """Small samples, which can be checked by hand."""
    monkeypatch.setattr(statistics, "FEWEST", 2)


def estimate_mean(sample):
    return estimate(bootstrap(sample))


def mean(values):
    return math.fsum(values) / len(values)


def test_the_bootstrap_interval_equals_the_exact_one_of_all_resamples():
    values = [0.0, 0.2, 0.9, 1.0]
    exact = np.percentile(
        [mean(draw) for draw in product(values, repeat=4)], [2.5, 97.5]
    )  # all 256 samples
    actual = estimate(bootstrap(values, resamples=20000))
    assert actual.mean == pytest.approx(mean(values))
    assert (actual.low, actual.high) == (
        pytest.approx(exact[0], abs=0.02),
        pytest.approx(exact[1], abs=0.02),
    )


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    actual = [
        estimate(bootstrap(list(rng.normal(3.0, 1.0, 50)), resamples=300)) for _ in range(200)
    ]
    assert 0.88 <= mean([low.low <= 3.0 <= low.high for low in actual]) <= 0.99


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
    st.integers(0, 3),
)
def test_the_interval_contains_the_mean_and_is_repeatable(sample, seed):
    actual = estimate(bootstrap(sample, resamples=100, seed=seed))
    assert actual.low <= actual.mean <= actual.high
    assert actual == estimate(bootstrap(sample, resamples=100, seed=seed))


def test_the_interval_shrinks_with_the_root_of_the_number_of_queries():
    rng = np.random.default_rng(0)
    few, many = (estimate_mean(list(rng.random(count))) for count in (50, 800))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.3)


def test_one_query_has_a_mean_and_no_interval():
    actual = estimate_mean([0.5])
    assert (actual.mean, actual.low, actual.high) == (0.5, None, None)


def test_a_paired_interval_is_tighter_than_the_difference_of_two_means():
    rng = np.random.default_rng(1)
    hard = rng.random(100)  # what both systems share: how hard each query is
    first, second = list(hard + 0.05 + rng.normal(0, 0.01, 100)), list(hard)
    actual = estimate_mean(np.subtract(first, second))
    assert 0 < actual.low < 0.05 < actual.high
    alone = estimate_mean(first)
    assert actual.high - actual.low < (alone.high - alone.low) / 5


def test_the_difference_of_two_bootstraps_is_that_of_paired_samples():
    rng = np.random.default_rng(1)
    first = rng.random(20)
    second = rng.random(20)
    apart = estimate(bootstrap(first) - bootstrap(second))
    together = estimate_mean(first - second)
    assert vars(apart) == pytest.approx(vars(together))


def test_queries_without_a_value_do_not_count_in_a_mean():
    values = np.array([1.0, np.nan, 0.0, np.nan])
    assert estimate_mean(values).mean == 0.5
    # A draw without a value has no mean, and is left out of the interval.
    assert estimate_mean(values).low == 0.0
    assert np.isnan(bootstrap(values)).any()


def test_few_numbers_have_a_mean_and_no_interval(monkeypatch):
    monkeypatch.undo()
    present = [0.1 * number for number in range(10)]
    assert estimate_mean([*present, math.nan]).low < 0.45
    few = estimate_mean([*present[:9], math.nan, math.nan])
    assert (few.mean, few.low, few.high) == (pytest.approx(0.4), None, None)
