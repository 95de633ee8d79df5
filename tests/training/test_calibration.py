"""Threshold stability, F1 gaps, intervals and tests: by hand and against slow references."""

import math
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag.errors import MissingDependencyError
from rsrank_rag.evaluation.comparison import Measured, compare, share_above, threshold_stability
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.metrics import ScoredQuery, best_threshold, f1_at
from rsrank_rag.evaluation.statistics import estimate_mean, paired_differences, paired_t_test
from rsrank_rag.reranker import BLANK_SCORE

# Best first: + - + - for the first, - + for the second.
FIRST = ScoredQuery([1.0, 4.0, 3.0, 2.0], [False, True, False, True])
SECOND = ScoredQuery([5.0, 0.0], [False, True])

documents = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.booleans()), min_size=1, max_size=5
)
query_lists = st.lists(
    documents.map(lambda rows: ScoredQuery([s for s, _ in rows], [r for _, r in rows])),
    min_size=1,
    max_size=3,
)


def moved(queries, scale, offset):
    return [
        ScoredQuery([scale * score + offset for score in query.scores], query.relevant)
        for query in queries
    ]


def mean(values):
    return math.fsum(values) / len(values)


def test_bias_and_variance_equal_the_fractions_by_hand():
    # All scores span -2..8, so that a unit is a tenth. Best thresholds: 3 (of "a") and 5 (of "b").
    sets = {
        "a": [ScoredQuery([-2.0, 2.0, 4.0], [False, False, True])],
        "b": [ScoredQuery([8.0, 6.0, 4.0], [True, True, False])],
    }
    found = threshold_stability(sets, threshold=3.5)
    assert found.ranges == {"a": (0.0, pytest.approx(0.6)), "b": (pytest.approx(0.6), 1.0)}
    assert found.natural == pytest.approx(0.55)
    assert found.best == {"a": pytest.approx(0.5), "b": pytest.approx(0.7)}
    assert found.bias == pytest.approx(
        (0.05 + 0.15) / 2
    )  # one too high, one too low: they do not cancel
    assert found.variance == pytest.approx(0.1**2)


def test_a_blank_document_does_not_stretch_the_range_of_the_scores():
    queries = [ScoredQuery([-2.0, 2.0, 4.0], [False, False, True])]
    with_blank = [*queries, ScoredQuery([4.0, BLANK_SCORE], [True, False])]
    found, expected = (
        threshold_stability({"a": with_blank}, 3.5),
        threshold_stability({"a": queries}, 3.5),
    )
    assert (found.ranges, found.natural, found.best) == (
        expected.ranges,
        expected.natural,
        expected.best,
    )


def test_bias_is_zero_where_the_natural_threshold_is_the_best_one():
    queries = [FIRST, SECOND]
    assert threshold_stability({"a": queries}, best_threshold(queries)[0]).bias == 0.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(query_lists, min_size=1, max_size=3),
    st.sampled_from([0.25, 2.0, 8.0]),
    st.sampled_from([-4.0, 0.5]),
)
def test_stability_does_not_depend_on_the_scale_and_origin_of_the_scores(sets, scale, offset):
    before = threshold_stability({str(i): queries for i, queries in enumerate(sets)}, 0.5)
    after = threshold_stability(
        {str(i): moved(queries, scale, offset) for i, queries in enumerate(sets)},
        scale * 0.5 + offset,
    )
    if len({end for ends in before.ranges.values() for end in ends}) > 1:  # scores differ
        assert (after.bias, after.variance) == (
            pytest.approx(before.bias),
            pytest.approx(before.variance),
        )
        assert after.best == pytest.approx(before.best)
        assert all(-1e-12 <= value <= 1 + 1e-12 for value in before.best.values())


def test_sets_with_one_score_for_everything_have_finite_stability():
    found = threshold_stability({"a": [ScoredQuery([2.0, 2.0], [True, False])]}, threshold=2.0)
    assert (found.bias, found.variance) == (pytest.approx(0.0), 0.0)


def f1_gaps(queries):
    labelled = []
    for query in queries:
        documents = tuple(
            LabelledDocument(id=str(i), text="x", relevant=label)
            for i, label in enumerate(query.relevant)
        )
        labelled.append(LabelledQuery(id=str(len(labelled)), query="?", documents=documents))
    (system,) = compare(
        [Measured("x", 0.0, "given", {"s": queries})], {"s": labelled}, resamples=10
    ).systems
    return [row.gap for row in system.sets["s"].queries]


def test_f1_gaps_equal_the_fractions_by_hand():
    # Alone, the first query reaches 4/5 (three kept), the second 2/3 (both kept). Together, keeping
    # everything is best: 2 * 2 / (4 + 2) and 2 / 3.
    assert best_threshold([FIRST, SECOND])[1] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert f1_gaps([FIRST, SECOND]) == pytest.approx([4 / 5 - 2 / 3, 0.0])


@settings(max_examples=100, deadline=None)
@given(query_lists)
def test_f1_gaps_equal_an_exhaustive_search(queries):
    threshold, _ = best_threshold(queries)
    for query, gap in zip(queries, f1_gaps(queries), strict=True):
        tries = [min(query.scores) - 1, *query.scores]
        assert gap == pytest.approx(max(f1_at(query, t) for t in tries) - f1_at(query, threshold))
        assert gap >= 0


def test_rounding_does_not_lift_a_gap_above_a_limit():
    assert share_above([0.8 - 0.7, 0.3, 0.05], 0.1) == pytest.approx(1 / 3)
    assert share_above([], 0.1) == 0.0


# Statistics


def test_the_bootstrap_interval_equals_the_exact_one_of_all_resamples():
    values = [0.0, 0.2, 0.9, 1.0]
    exact = np.percentile(
        [mean(draw) for draw in product(values, repeat=4)], [2.5, 97.5]
    )  # all 256 samples
    found = estimate_mean(values, resamples=20000)
    assert found.mean == pytest.approx(mean(values))
    assert (found.low, found.high) == (
        pytest.approx(exact[0], abs=0.02),
        pytest.approx(exact[1], abs=0.02),
    )


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [estimate_mean(list(rng.normal(3.0, 1.0, 50)), resamples=300) for _ in range(200)]
    assert 0.88 <= mean([low.low <= 3.0 <= low.high for low in found]) <= 0.99


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_the_interval_contains_the_mean_and_is_repeatable(samples, seed):
    found = estimate_mean(*samples, resamples=100, seed=seed)
    assert found.low <= found.mean <= found.high
    assert found == estimate_mean(*samples, resamples=100, seed=seed)


def test_the_interval_shrinks_with_the_root_of_the_number_of_queries():
    rng = np.random.default_rng(0)
    few, many = (estimate_mean(list(rng.random(count))) for count in (50, 800))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.3)


def test_every_set_counts_the_same_in_a_mean_over_sets_whatever_its_size():
    found = estimate_mean([1.0] * 90, [0.0, 0.5])
    assert found.mean == pytest.approx((1 + 0.25) / 2)
    assert (found.low, found.high) == (
        pytest.approx(0.5),
        pytest.approx(0.75),
    )  # only the small set varies


def test_one_query_has_a_mean_and_no_interval():
    found = estimate_mean([0.5])
    assert (found.mean, found.low, found.high) == (0.5, None, None)
    assert estimate_mean([0.5], [0.1, 0.2]).low is None
    with pytest.raises(ValueError, match="numbers in them"):
        estimate_mean([0.5], [])


def test_a_paired_interval_is_tighter_than_the_difference_of_two_means():
    rng = np.random.default_rng(1)
    hard = rng.random(100)  # what both systems share: how hard each query is
    first, second = list(hard + 0.05 + rng.normal(0, 0.01, 100)), list(hard)
    found = estimate_mean(*[paired_differences(first, second)])
    assert 0 < found.low < 0.05 < found.high
    alone = estimate_mean(first)
    assert found.high - found.low < (alone.high - alone.low) / 5
    with pytest.raises(ValueError, match="shorter"):
        paired_differences(first, second[:-1])


def test_the_paired_t_test_equals_the_textbook_formula():
    first, second = [0.9, 0.8, 0.7, 1.0], [0.5, 0.7, 0.7, 0.6]
    differences = np.subtract(first, second)
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(4))
    found = paired_t_test(first, second)
    assert found.difference == pytest.approx(differences.mean())
    assert found.t == pytest.approx(t)
    # Student's t with 3 degrees of freedom has a closed form.
    x = t / math.sqrt(3)
    assert found.p == pytest.approx(2 * (0.5 - (x / (1 + x * x) + math.atan(x)) / math.pi))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("first", "second", "t", "p"),
    [
        ([0.5, 1.0, 0.2], [0.5, 1.0, 0.2], None, None),
        ([0.6, 1.1, 0.3], [0.5, 1.0, 0.2], None, None),
        ([0.6], [0.5], None, None),
        ([], [], None, None),
    ],
)
def test_the_paired_t_test_of_pairs_without_variance_is_no_nan(first, second, t, p):
    found = paired_t_test(first, second)
    assert (found.t, found.p) == (t, p)


def test_missing_scipy_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[eval\]"):
        estimate_mean([0.0, 1.0])
