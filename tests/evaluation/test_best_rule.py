"""The best rule on labelled queries: against a slow search, and where rules do not matter."""

import random

import pytest
from measures import scored_lists

from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.best_rule import Goal, best_rule
from rsrank_rag.evaluation.evaluate import shared_rule
from rsrank_rag.evaluation.metrics import ScoredQuery, apply_rule
from rsrank_rag.ranking.rule import BLANK_SCORE, Fallback, Rule


def cost(queries, rule, goal):
    """What is missing to the goal, then the cost of the rule."""
    result = apply_rule(queries, rule)
    answerable = sum(any(query.relevant) for query in queries)
    missing = max(result.lost / answerable - goal.lost, 0) + max(goal.recall - result.recall, 0)
    errors = 0
    for query in queries:
        errors += (max(query.scores) > rule.threshold) != any(query.relevant)
    return round(missing, 9), round(result.kept + errors / len(queries), 9)


@pytest.mark.parametrize(
    "goal", [Goal(), Goal(lost=0.0, recall=0.0), Goal(lost=0.4, recall=0.3), Goal(0.0, 1.0)]
)
def test_no_rule_nearby_reaches_the_goal_at_a_lower_cost(goal):
    queries = scored_lists(60)
    best = best_rule(queries, goal)
    reached = cost(queries, best, goal)
    assert reached[0] == 0.0
    rng = random.Random(1)
    # A rule between two rules of the grid may be a little better.
    for _ in range(300):
        fallback = Fallback(rng.uniform(0, 3), rng.uniform(0, 4))
        other = Rule(
            rng.uniform(-4, 3), rng.choice([None, rng.uniform(0, 4)]), rng.choice([None, fallback])
        )
        missing, kept = cost(queries, other, goal)
        assert missing > 0 or kept > reached[1] - 0.15


def test_a_rule_needs_only_the_parts_that_help():
    queries = [ScoredQuery([1.0, -1.0, -1.5], [True, False, False])] * 4
    queries += [ScoredQuery([-1.0, -2.0], [False, False])] * 2
    rule = best_rule(queries)
    assert (rule.max_gap, rule.fallback) == (None, None)
    assert -1.0 <= rule.threshold < 1.0


def test_the_threshold_separates_lists_with_an_answer_from_lists_without_one():
    # A threshold above all scores would keep the same documents, as the fallback's.
    queries = [ScoredQuery([2.0, 1.9], [True, False])] * 3
    queries += [ScoredQuery([-2.0, -2.1], [True, False])] * 3
    rule = best_rule(queries)
    assert rule.threshold < -2.0
    assert rule.max_gap < 0.1


def test_a_threshold_can_be_fixed():
    queries = scored_lists(60)
    assert best_rule(queries).threshold != 0.0
    best = best_rule(queries, threshold=0.0)
    assert best.threshold == 0.0
    assert cost(queries, best, Goal()) < cost(queries, Rule(0.0), Goal())


def test_a_goal_that_cannot_be_reached_is_approached():
    # A threshold keeps no document without text, so that half of the answers are lost at least.
    queries = [
        ScoredQuery([BLANK_SCORE, 1.0], [True, False]),
        ScoredQuery([1.0, 0.0], [True, False]),
    ]
    assert apply_rule(queries, best_rule(queries)).lost == 1


def test_equal_scores_and_empty_lists_have_a_rule():
    queries = [ScoredQuery([0.0, 0.0], [True, True]), ScoredQuery([], [])]
    assert best_rule(queries).select([0.0, 0.0]) == [0, 1]


@pytest.mark.parametrize("queries", [[ScoredQuery([1.0], [False])], [ScoredQuery([], [])]])
def test_queries_without_a_relevant_document_have_no_best_rule(queries):
    with pytest.raises(InputError, match="no query has a relevant document"):
        best_rule(queries)


def test_a_shared_rule_counts_each_set_the_same_whatever_its_size():
    # To keep the answer of the small set, each of many lists has to keep a wrong document, too.
    large = [ScoredQuery([3.0, 1.0], [True, False])] * 30
    small = [ScoredQuery([1.5, 0.5], [False, True])]
    assert apply_rule(small, shared_rule([large, small])).lost == 0
    assert apply_rule(small, best_rule([*large, *small])).lost == 1
