"""The best threshold of several queries, against an exhaustive search."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import f1_at

from research.best_threshold import best_threshold, shared_threshold
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.reranker import BLANK_SCORE

# scores, best first: 3+ 2- 1+ 0-   (+ relevant)
MIXED = ScoredQuery([0.0, 3.0, 1.0, 2.0], [False, True, True, False])

documents = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.booleans()), min_size=1, max_size=6
)
query_lists = st.lists(
    documents.map(lambda rows: ScoredQuery([s for s, _ in rows], [r for _, r in rows])),
    min_size=1,
    max_size=4,
)


def test_the_best_threshold_lies_between_the_last_kept_and_the_first_dropped_score():
    assert best_threshold([MIXED]) == (pytest.approx(0.5), pytest.approx(4 / 5))


@settings(max_examples=200, deadline=None)
@given(query_lists)
def test_the_best_threshold_equals_an_exhaustive_search(queries):
    scores = sorted({score for query in queries for score in query.scores})
    tries = [scores[0] - 1, scores[-1] + 1, *[(a + b) / 2 for a, b in pairwise(scores)]]
    expected = max(math.fsum(f1_at(query, t) for query in queries) / len(queries) for t in tries)
    threshold, value = best_threshold(queries)
    assert value == pytest.approx(expected)
    assert math.fsum(f1_at(query, threshold) for query in queries) / len(queries) == pytest.approx(
        expected
    )


def test_the_best_threshold_moves_with_the_scores_even_where_all_or_nothing_is_best():
    everything, nothing = (
        ScoredQuery([0.2, 0.1], [True, True]),
        ScoredQuery([0.2, 0.1], [False, False]),
    )
    assert best_threshold([everything]) == (pytest.approx(0.0999), 1.0)
    assert f1_at(everything, best_threshold([everything])[0]) == 1.0
    assert best_threshold([nothing]) == (0.2, 1.0)
    assert f1_at(nothing, 0.2) == 1.0


def test_the_shared_threshold_counts_each_set_the_same_whatever_its_size():
    large = [ScoredQuery([0.0], [False])] * 9 + [ScoredQuery([1.0], [True])]
    small = [ScoredQuery([5.0, 0.5], [True, True])]
    # Only a threshold below 0.5 gets the small set right. It drops the large set's 0.0, too.
    assert 0.0 <= shared_threshold([large, small]) < 0.5


def test_no_threshold_keeps_a_blank_document():
    query = ScoredQuery([BLANK_SCORE, -20_000.0, -30_000.0], [False, True, False])
    assert best_threshold([query]) == (-25_000.0, 1.0)
