"""Verdicts: two selections of the same queries, with what was gained and lost beyond chance."""

import random
import statistics

import pytest
from training_helpers import means, scorings

from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import Estimate
from rsrank_rag.ranking.rule import Fallback, Rule
from rsrank_rag.training.verdict import (
    FEW_QUERIES,
    Verdict,
    judge,
)


@pytest.mark.parametrize(
    ("help", "outcome"), [(0.8, "better"), (0.0, "no difference beyond chance"), (-0.8, "worse")]
)
def test_the_verdict_is_that_of_a_plain_paired_bootstrap(help, outcome):
    base, other = scorings(help=help)
    verdict = judge(base, other)
    assert verdict.outcome == outcome
    pairs = [[plain_measures(query) for query in pair] for pair in zip(base, other, strict=True)]
    for metric in ("precision", "recall", "f1", "lost"):

        def difference(drawn, metric=metric):
            sides = []
            for side in (0, 1):
                values = [pair[side][metric] for pair in drawn]
                sides.append(statistics.fmean(value for value in values if value is not None))
            return sides[1] - sides[0]

        rng = random.Random(1)
        drawn = sorted(difference(rng.choices(pairs, k=30)) for _ in range(2000))
        actual = verdict.difference[metric]
        assert actual.mean == pytest.approx(difference(pairs))
        # Two bootstraps of 2,000 samples differ by their own noise: some hundredths of the width.
        near = pytest.approx((drawn[50], drawn[1949]), abs=0.15 * (drawn[1949] - drawn[50]) + 1e-9)
        assert (actual.low, actual.high) == near


def plain_measures(query):
    kept = []
    for score, label in zip(query.scores, query.relevant, strict=True):
        if score > 0:
            kept.append(label)
    relevant = sum(query.relevant)
    return {
        "precision": sum(kept) / len(kept) if kept else None,
        "recall": sum(kept) / relevant,
        "f1": 2 * sum(kept) / (len(kept) + relevant),
        "lost": float(not any(kept)),
    }


def test_empty_lists_have_no_precision_and_unanswerable_queries_no_recall():
    queries = [
        ScoredQuery([1.0, -1.0], [True, False]),
        ScoredQuery([-1.0, -2.0], [True, False]),
        ScoredQuery([-1.0], [False]),
        ScoredQuery([], []),
    ]
    actual = means(queries)
    assert actual["precision"] == 1.0
    assert actual["recall"] == 0.5
    assert actual["lost"] == 0.5
    assert actual["f1"] == pytest.approx((1 + 0 + 1 + 0) / 4)


def test_a_measure_that_means_nothing_is_left_out():
    nothing_relevant = [ScoredQuery([1.0], [False])] * 12
    assert set(means(nothing_relevant)) == {"ndcg@5", "precision", "f1"}
    # After nothing is kept, there is no precision to compare.
    verdict = judge(nothing_relevant, [ScoredQuery([-1.0], [False])] * 12)
    assert set(verdict.before) == {"ndcg@5", "precision", "f1"}
    assert set(verdict.after) == set(verdict.difference) == {"ndcg@5", "f1"}
    assert verdict.gains == ["f1"]


def test_what_changes_for_few_queries_is_neither_a_gain_nor_a_loss():
    # Every query loses its answer, but there are only nine, and one without an answer.
    kept = [*[ScoredQuery([1.0, -1.0], [True, False])] * 9, ScoredQuery([-1.0], [False])]
    lost = [*[ScoredQuery([-1.0, -1.0], [True, False])] * 9, ScoredQuery([-1.0], [False])]
    verdict = judge(kept, lost)
    assert verdict.difference["recall"] == Estimate(mean=-1.0, low=None, high=None)
    assert "recall" not in verdict.losses
    assert "recall" in judge([*kept, kept[0]], [*lost, lost[0]]).losses


def test_more_answers_lost_are_a_loss_and_fewer_a_gain():
    labels = [True, False]
    kept = [ScoredQuery([1.0, 0.5], labels)] * 20
    lost = [ScoredQuery([-1.0, 0.5], labels)] * 10 + kept[10:]
    assert "lost" in judge(kept, lost).losses
    assert "lost" in judge(lost, kept).gains
    assert "changes by 0.500" in str(judge(kept, lost))


def test_the_rule_decides_what_is_kept():
    # Nothing scores above zero. The fallback keeps the best document.
    right = [ScoredQuery([-0.5, -1.8], [True, False])] * 20
    wrong = [ScoredQuery([-1.8, -0.5], [True, False])] * 20
    assert judge(right, wrong).losses == ["ndcg@5"]
    with_fallback = judge(right, wrong, Rule(0.0, fallback=Fallback(1.0, 2.0)))
    assert set(with_fallback.losses) == {"ndcg@5", "precision", "recall", "f1", "lost"}


def test_gains_beside_a_loss_are_called_better():
    estimates = {
        "precision": Estimate(mean=-0.04, low=-0.06, high=-0.02),
        "recall": Estimate(mean=0.7, low=0.6, high=0.8),
        "lost": Estimate(mean=-0.2, low=-0.3, high=-0.1),
        "f1": Estimate(mean=0.1, low=-0.1, high=0.2),
    }
    verdict = Verdict(queries=100, before={}, after={}, difference=estimates)
    assert str(verdict) == (
        "worse: precision changes by -0.040 (-0.060 to -0.020); better: recall changes by 0.700 "
        "(0.600 to 0.800), the share of answers lost changes by "
        "-0.200 (-0.300 to -0.100)"
    )


def test_few_queries_cannot_rule_out_a_loss_and_many_need_not():
    # Every list gains precision, and one in twenty loses its answer.
    labels = [True, False]
    kept = [ScoredQuery([1.0, 0.5], labels)] * 100
    lost = [ScoredQuery([-0.5, -1.0], labels), *[ScoredQuery([1.0, -1.0], labels)] * 19] * 5
    few = judge(kept[:20], lost[:20])
    assert (few.losses, few.gains) == ([], ["precision", "f1"])
    assert few.problem == "20 queries held out (fewer than 100) cannot rule out a loss"
    many = judge(kept, lost)
    assert many.problem.startswith(
        "the result on 100 queries held out is worse: recall changes by -0.0"
    )
    # As many as FEW_QUERIES decide by what is beyond chance.
    assert judge(kept[:FEW_QUERIES], lost[1:20] * 5 + kept[:5]).problem is None


def test_a_measure_that_too_few_queries_have_is_named_and_weights_are_not_written():
    # Of 110 queries, nine keep a document so far, so that a fall of precision has no interval.
    kept = ScoredQuery([1.0, -1.0], [True, False])
    nothing = ScoredQuery([-1.0, -2.0], [True, False])
    wide = ScoredQuery([2.0, 1.0], [True, False])
    verdict = judge([kept] * 9 + [nothing] * 101, [wide] * 110)
    assert verdict.outcome == "better"
    assert "recall" in verdict.gains
    assert verdict.difference["precision"].mean == -0.5
    message = "fewer than 10 queries cannot judge: precision changes by -0.500"
    assert message in str(verdict)
    assert message in verdict.problem


def test_a_single_query_decides_nothing():
    verdict = judge([ScoredQuery([1.0], [True])], [ScoredQuery([-1.0], [True])])
    assert verdict.outcome == "no difference beyond chance"
    assert verdict.difference["recall"].low is None
    assert "cannot rule out a loss" in verdict.problem
