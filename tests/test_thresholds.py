"""Thresholds of one query: by hand, invariant where promised, and promises that hold on exchangeable data."""

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.metrics import ScoredQuery, f1_at
from rsrank_rag.evaluation.thresholds import (
    Observed,
    below_the_best,
    best_choice,
    expected_f1,
    f1_by_rule,
    false_discovery,
    gap_near_zero,
    guaranteed_evidence,
    guaranteed_recall,
    largest_gap,
    mean_and_spreads,
    median_and_spreads,
    mixture,
    quantile,
    shrunk,
    standardised,
    two_means,
)

NULL = [-1.0, 0.5, -0.25, 0.75]
MOVE_AND_SCALE = {
    "largest gap": lambda s, n: largest_gap(s, most=3, spreads=0.5, otherwise=float(np.mean(s))),
    "two means": lambda s, n: two_means(s),
    "mixture": lambda s, n: mixture(s, otherwise=float(np.mean(s))),
    "mean and spreads": lambda s, n: mean_and_spreads(s, 0.7),
    "median and spreads": lambda s, n: median_and_spreads(s, 0.7),
    "quantile": lambda s, n: quantile(s, 0.3),
    "null spread": lambda s, n: mean_and_spreads(n, 1.5),
    "false discovery": lambda s, n: false_discovery(s, n, 0.4),
    "false discovery, normal": lambda s, n: false_discovery(s, n, 0.2, normal=True),
}
EVERY = {
    **MOVE_AND_SCALE,
    "gap near zero": lambda s, n: gap_near_zero(s, 0.5),
    "below the best": lambda s, n: below_the_best(s, 0.5),
    "expected F1": lambda s, n: expected_f1(s, 3.0, 0.1),
}
score_lists = st.lists(st.integers(-20, 20).map(lambda i: i / 8), min_size=3, max_size=9, unique=True)


def kept(scores, threshold):
    return [place for place, score in enumerate(scores) if score > threshold]


@pytest.mark.parametrize("rule", MOVE_AND_SCALE.values(), ids=list(MOVE_AND_SCALE))
@settings(max_examples=60, deadline=None)
@given(score_lists, st.sampled_from([0.25, 2.0, 8.0]), st.sampled_from([-4.0, 0.5, 3.0]))
def test_a_rule_moves_and_scales_with_the_scores(rule, scores, scale, offset):
    def moved(values):
        return [scale * value + offset for value in values]

    assert rule(moved(scores), moved(NULL)) == pytest.approx(scale * rule(scores, NULL) + offset, abs=1e-6)


@pytest.mark.parametrize("rule", EVERY.values(), ids=list(EVERY))
@settings(max_examples=40, deadline=None)
@given(score_lists, st.randoms(use_true_random=False))
def test_a_rule_does_not_depend_on_the_order_of_the_documents(rule, scores, rng):
    mixed = rng.sample(scores, len(scores))
    assert rule(mixed, NULL) == pytest.approx(rule(scores, NULL), abs=1e-12)


@pytest.mark.parametrize("rule", EVERY.values(), ids=list(EVERY))
@pytest.mark.parametrize("scores", [[0.4], [0.3, 0.3, 0.3], [-2.0, -2.0], [1e-300, 0.0], [5.0, -5.0]])
def test_a_rule_gives_a_finite_threshold_for_one_document_and_for_equal_scores(rule, scores):
    assert math.isfinite(rule(scores, NULL))
    assert math.isfinite(rule(scores, [0.0, 0.0]))


@pytest.mark.parametrize("rule", EVERY.values(), ids=list(EVERY))
def test_a_rule_gives_a_finite_threshold_where_there_is_nothing_to_go_by(rule):
    if (
        rule is not MOVE_AND_SCALE["largest gap"] and rule is not MOVE_AND_SCALE["mixture"]
    ):  # their means are the test's
        assert math.isfinite(rule([], []))


def test_the_largest_gap_lies_between_the_two_scores_furthest_apart():
    assert largest_gap([1.0, 10.0, 4.0, 9.0]) == 6.5
    assert largest_gap([2.0, 2.0, 2.0], otherwise=0.3) == 0.3
    assert largest_gap([2.0], otherwise=0.3) == 0.3


def test_the_gap_must_keep_as_many_documents_as_asked_for():
    scores = [10.0, 6.0, 5.0, 3.0, 2.5, 0.0]  # gaps 4, 1, 2, 0.5, 2.5
    assert largest_gap(scores) == 8.0
    assert largest_gap(scores, least=2) == 1.25
    assert largest_gap(scores, least=2, most=4) == 4.0
    assert largest_gap(scores, least=7, otherwise=-1.0) == -1.0


def test_a_gap_that_is_small_beside_the_spread_is_none():
    scores = [3.0, 2.0, 1.0, 0.0]  # every gap is 1, the deviation 1.118
    assert largest_gap(scores, spreads=0.8, otherwise=9.0) == 2.5
    assert largest_gap(scores, spreads=0.9, otherwise=9.0) == 9.0


def test_the_weight_leads_from_the_largest_gap_to_zeros_own_decision():
    scores = [5.0, 4.0, 1.0, -1.0, -8.0]
    assert gap_near_zero(scores, 0.0) == -4.5
    assert gap_near_zero(scores, 1.0) == -4.5  # 7 - 1 against 2 and 3 - 1
    assert gap_near_zero(scores, 6.0) == 0.0  # 7 - 6 against 2


@settings(max_examples=100, deadline=None)
@given(score_lists)
def test_a_heavy_weight_keeps_what_zero_keeps(scores):
    scores = [score + 1 / 16 for score in scores]  # none is zero
    assert kept(scores, gap_near_zero(scores, 1e6)) == kept(scores, 0.0)


@settings(max_examples=100, deadline=None)
@given(score_lists)
def test_two_means_have_the_least_squares_of_all_splits(scores):
    def squares(group):
        return float(((np.array(group) - np.mean(group)) ** 2).sum())

    def both(threshold):
        upper = [score for score in scores if score > threshold]
        return squares(upper) + squares([score for score in scores if score <= threshold])

    splits = [(a + b) / 2 for a, b in combinations(sorted(scores), 2)]
    assert both(two_means(scores)) == pytest.approx(min(map(both, splits)))


def test_the_mixture_equals_scikit_learns():
    mixtures = pytest.importorskip("sklearn.mixture")
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(2.0, 0.5, 12), rng.normal(-1.0, 0.5, 40)])
    found = mixtures.GaussianMixture(
        2, covariance_type="tied", means_init=[[-1.0], [2.0]], tol=1e-12, max_iter=5000, reg_covar=0.0
    ).fit(scores[:, None])
    grid = np.linspace(-1.0, 2.0, 300001)
    upper = found.predict_proba(grid[:, None])[:, int(np.argmax(found.means_))]
    assert mixture(scores, steps=5000) == pytest.approx(grid[np.argmin(np.abs(upper - 0.5))], abs=1e-4)


def test_two_equal_groups_part_in_the_middle():
    assert mixture([3.0, 3.1, 2.9, -1.0, -1.1, -0.9]) == pytest.approx(1.0)


def test_spreads_and_quantiles_equal_the_numbers_by_hand():
    values = [0.0, 1.0, 2.0, 3.0, 14.0]  # mean 4, variance 26; median 2, deviations 2 1 0 1 12
    assert mean_and_spreads(values, 0.5) == pytest.approx(4 + 0.5 * math.sqrt(26))
    assert median_and_spreads(values, 3.0) == 5.0
    assert quantile(values, 0.25) == 1.0
    assert below_the_best(values, 1.5) == 12.5
    assert shrunk(4.0, 0.25) == 1.0
    assert shrunk(4.0, 0.25, towards=2.0) == 2.5
    assert standardised([5.0], [1.0, 3.0]) == [3.0]
    assert standardised([5.0], [1.0, 1.0]) == [4.0]


def test_false_discoveries_are_controlled_as_benjamini_and_hochberg_say():
    # Of 9 random documents 0, 1 and 5 score as high, so that p = 0.1, 0.2 and 0.6: allowed are 0.3 / 3 a rank.
    null = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    scores = [10.0, 7.5, 3.5]
    assert kept(scores, false_discovery(scores, null, 0.3)) == [0, 1]
    assert kept(scores, false_discovery(scores, null, 0.29)) == []
    assert kept(scores, false_discovery(scores, null, 0.6)) == [0, 1, 2]


def test_normal_p_values_reach_beyond_the_ranks():
    null = [-1.0, 1.0]  # mean 0, deviation 1
    allowed = 1 - NormalDist().cdf(3.0)
    assert kept([3.0], false_discovery([3.0], null, allowed * 1.01, normal=True)) == [0]
    assert kept([3.0], false_discovery([3.0], null, allowed * 0.99, normal=True)) == []
    assert kept([3.0], false_discovery([3.0], null, 0.3)) == []  # one of three ranks


@settings(max_examples=80, deadline=None)
@given(score_lists, st.sampled_from([0.5, 2.0, 6.0]), st.sampled_from([-0.5, 0.0, 1.0]))
def test_expected_f1_is_the_best_of_all_cuts(scores, slope, offset):
    def value(threshold):
        chance = [1 / (1 + math.exp(-slope * (score - offset))) for score in scores]
        inside = kept(scores, threshold)
        if not inside:
            return math.prod(1 - p for p in chance)
        return 2 * sum(chance[i] for i in inside) / (len(inside) + sum(chance))

    cuts = [*scores, min(scores) - 1]
    assert value(expected_f1(scores, slope, offset)) == pytest.approx(max(map(value, cuts)))


def test_sure_documents_raise_the_bar_for_the_others():
    unsure, sure = [0.0, -0.5], [3.0, 3.0, 0.0, -0.5]
    assert kept(unsure, expected_f1(unsure, 1.0, 0.0)) == [0, 1]
    assert kept(sure, expected_f1(sure, 1.0, 0.0)) == [0, 1, 2]


def test_the_best_choice_weighs_sets_and_not_queries():
    high = Observed(ScoredQuery([3.0, 2.0], [True, False]))
    low = Observed(ScoredQuery([1.0, 0.0], [True, False]))
    sets = [[high] * 5, [low]]
    # 2.5 has F1 1 on the large set and 0 on the small one; 0.5 has 2/3 and 1.
    assert best_choice(lambda c: lambda s, n: c, [2.5, 0.5], sets) == 0.5
    assert best_choice(lambda c: lambda s, n: c, [2.5, 0.5], [[high] * 5 + [low]]) == 2.5
    assert f1_by_rule(lambda s, n: 0.5, sets[1]) == [1.0]


def test_a_rule_sees_the_null_and_no_labels():
    one = Observed(ScoredQuery([1.0], [True]), [4.0, 5.0])
    seen = []
    f1_by_rule(lambda *given: seen.append(given) or 0.0, [one])
    assert seen == [([1.0], [4.0, 5.0])]


def exchangeable(rng, queries):
    """Queries with 0 to 4 relevant documents, whose scores share a shift of the query's own."""
    made = []
    for _ in range(queries):
        relevant = rng.random(10) < 0.2
        made.append(ScoredQuery((rng.normal(0, 0.5) + rng.normal(relevant * 1.0, 1.0)).tolist(), relevant.tolist()))
    return made


def recall(query, threshold):
    hits = sum(label for score, label in zip(query.scores, query.relevant, strict=True) if score > threshold)
    return hits / sum(query.relevant) if any(query.relevant) else 1.0


@pytest.mark.parametrize("promise", [0.7, 0.9])
def test_promised_recall_is_kept_in_the_mean_over_calibrations(promise):
    rng = np.random.default_rng(0)
    measured = []
    for _ in range(300):
        threshold = guaranteed_recall(exchangeable(rng, 40), promise)
        measured.append(np.mean([recall(query, threshold) for query in exchangeable(rng, 40)]))
    assert promise - 0.01 < np.mean(measured) < promise + 0.05  # kept, and not by keeping everything


@pytest.mark.parametrize("promise", [0.7, 0.9])
def test_promised_evidence_is_complete_as_often_as_said(promise):
    rng = np.random.default_rng(1)
    measured = []
    for _ in range(300):
        threshold = guaranteed_evidence(exchangeable(rng, 40), promise)
        queries = [query for query in exchangeable(rng, 40) if any(query.relevant)]
        measured.append(np.mean([recall(query, threshold) == 1.0 for query in queries]))
    assert promise - 0.01 < np.mean(measured) < promise + 0.05


def test_promises_by_hand():
    queries = [ScoredQuery([float(i), -5.0], [True, False]) for i in range(1, 10)]
    # Nine queries: 0.2 x 10 - 1 = 1 of the recall may be lost in all, so the lowest one is given up.
    assert guaranteed_recall(queries, 0.8) == pytest.approx(2.0)
    assert f1_at(queries[1], guaranteed_recall(queries, 0.8)) == 1.0
    assert guaranteed_evidence(queries, 0.8) == pytest.approx(2.0)
    assert guaranteed_evidence(queries, 0.9) == pytest.approx(1.0)


@pytest.mark.parametrize("promised", [guaranteed_recall, guaranteed_evidence])
def test_too_few_queries_can_promise_nothing_but_everything(promised):
    queries = [ScoredQuery([1.0, 0.0], [True, False])] * 8
    assert promised(queries, 0.9) == -math.inf
    assert promised([], 0.9) == -math.inf
    assert promised([ScoredQuery([1.0], [False])] * 99, 0.9) == -math.inf


@pytest.mark.parametrize("promised", [guaranteed_recall, guaranteed_evidence])
@pytest.mark.parametrize("promise", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_promise_that_is_no_share_is_refused(promised, promise):
    with pytest.raises(InputError, match="between 0 and 1"):
        promised([ScoredQuery([1.0], [True])], promise)


def test_of_two_equally_good_splits_the_one_that_keeps_fewer_is_taken_at_every_scale():
    scores = [0.0, -0.125, 0.375, -0.375, -0.625, 1.375, -1.5, 1.625, -2.25]
    assert two_means([0.25 * score - 4.0 for score in scores]) == 0.25 * two_means(scores) - 4.0
