"""Lists with a relevant passage against lists without one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.unanswerable import auroc, best_scores, false_accepts
from rsrank_rag.evaluation.metrics import ScoredQuery

MIXED = ScoredQuery([0.0, 3.0, 1.0, 2.0], [False, True, True, False])
BELOW = ScoredQuery([1.0, -1.0, -3.0, -2.0], [False, True, False, True])
NO_ANSWER = ScoredQuery([0.5, -0.5], [False, False])


def test_best_scores_are_of_lists_with_and_without_a_relevant_passage_with_absent_twins():
    only_relevant = ScoredQuery([4.0], [True])
    answerable, unanswerable = best_scores(
        [MIXED, BELOW, NO_ANSWER, only_relevant, ScoredQuery([], [])]
    )
    assert answerable == [3.0, 1.0, 4.0]
    # Without their relevant passages MIXED's best is 2 and BELOW's stays 1.
    assert unanswerable == [2.0, 1.0, 0.5]


def test_auroc_and_false_accepts_equal_the_fractions_by_hand():
    positives, negatives = [3.0, 1.0, 4.0], [2.0, 1.0, 0.5]
    # 3 and 4 are above all three; 1 is above one and equal to one.
    assert auroc(positives, negatives) == pytest.approx((3 + 1.5 + 3) / 9)
    # All three must be accepted for 90%: the limit is 1, which two of the negatives reach.
    assert false_accepts(positives, negatives) == pytest.approx(2 / 3)
    # 9 of 10 are enough: the limit is 2.
    assert false_accepts([float(i) for i in range(1, 11)], [1.5, 2.0, 0.0, 7.0]) == 2 / 4
    assert auroc([], negatives) is auroc(positives, []) is false_accepts(positives, []) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1), st.lists(st.integers(-3, 3), min_size=1))
def test_auroc_equals_the_count_over_all_pairs(positives, negatives):
    wins = sum((x > y) + (x == y) / 2 for x in positives for y in negatives)
    assert auroc(positives, negatives) == pytest.approx(wins / len(positives) / len(negatives))
