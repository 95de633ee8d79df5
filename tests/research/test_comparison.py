"""Several systems on several sets, by hand and against the plain evaluation."""

import random

import pytest

from research.comparison import METRICS, Comparison, Measured, compare, estimate_mean
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.evaluate import summarise
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import bootstrap, estimate
from rsrank_rag.ranking.rule import Rule


def labelled(name, relevant):
    documents = tuple(
        LabelledDocument(id=f"d{place}", text="x", relevant=label)
        for place, label in enumerate(relevant)
    )
    return LabelledQuery(id=name, query="?", documents=documents)


def made_up(count, seed):
    generator = random.Random(seed)
    queries = []
    for number in range(count):
        labels = [generator.random() < 0.3 for _ in range(generator.randint(3, 8))]
        queries.append(labelled(f"{seed}-{number}", labels))
    return queries


SETS = {"first.set": made_up(8, 0), "second": made_up(6, 1)}


def measured(name, seed, skill, threshold=0.0):
    """A system whose scores rise with the labels, and less so with noise."""
    generator = random.Random(seed)
    scored = {}
    for title, queries in SETS.items():
        scored[title] = []
        for query in queries:
            labels = [document.relevant for document in query.documents]
            scores = [generator.gauss(skill if label else -skill, 1.0) for label in labels]
            scored[title].append(ScoredQuery(scores, labels))
    return Measured(name, Rule(threshold, max_gap=2.0), "native", scored)


SYSTEMS = [measured("good", 2, 1.0), measured("bad", 3, 0.1, threshold=0.5)]


@pytest.fixture(scope="module")
def comparison():
    return compare(SYSTEMS, SETS)


def test_means_equal_those_of_the_plain_evaluation(comparison):
    for system, result in zip(SYSTEMS, comparison.systems, strict=True):
        for name, queries in system.scored.items():
            summary = summarise(queries, system.rule)
            expected = {**summary, **summary["rules"]["in_use"]}
            expected["lost"] /= summary["answerable"]
            for metric in METRICS:
                assert result.sets[name].metrics[metric].mean == pytest.approx(expected[metric])
        for metric in METRICS:
            means = [result.sets[name].metrics[metric].mean for name in SETS]
            assert result.metrics[metric].mean == pytest.approx(sum(means) / 2)


def test_a_metric_that_means_nothing_is_left_out():
    queries = [ScoredQuery([-1.0], [False])] * 2
    systems = [Measured(name, Rule(0.0), "native", {"s": queries}) for name in "xy"]
    result = compare(systems, {"s": [labelled("0", [False]), labelled("1", [False])]})
    assert set(METRICS) - set(result.systems[0].metrics) == {"lost", "recall"}
    assert set(METRICS) - set(result.differences[0].mean) == {"lost", "recall"}


def test_differences_are_paired_and_over_sets_each_counts_the_same(comparison):
    first, second = comparison.systems
    (pair,) = comparison.differences
    assert (pair.first, pair.second) == ("good", "bad")
    for metric in METRICS:
        by_set = {}
        for name in SETS:
            means = [system.sets[name].metrics[metric].mean for system in (first, second)]
            by_set[name] = means[0] - means[1]
            assert pair.sets[name][metric].mean == pytest.approx(by_set[name])
        assert pair.mean[metric].mean == pytest.approx(sum(by_set.values()) / 2)
    assert pair.mean["ndcg@5"].mean > 0.2


def test_a_comparison_by_hand():
    scored = [
        ScoredQuery([4.0, -1.0, -2.0], [True, False, True]),
        ScoredQuery([-4.0, 1.0, 0.0], [True, False, True]),
    ]
    queries = [labelled("a", [True, False, True])] * 2
    (system,) = compare([Measured("x", Rule(0.5), "given", {"s": scored})], {"s": queries}).systems
    result = system.sets["s"]
    assert [row.metrics["f1"] for row in result.queries] == pytest.approx([2 / 3, 0.0])
    assert [row.metrics["kept"] for row in result.queries] == [1, 1]
    assert result.metrics["lost"].mean == 0.5


def test_a_comparison_reads_back_as_what_was_measured(comparison):
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison
    assert comparison.labels["second"][0].relevant == tuple(
        document.relevant for document in SETS["second"][0].documents
    )


def test_a_set_of_one_query_has_numbers_without_intervals():
    scored = {"one": [ScoredQuery([1.0, -1.0], [True, False])]}
    sets = {"one": [labelled("a", [True, False])]}
    comparison = compare([Measured("x", Rule(0.0), "native", scored)], sets)
    assert comparison.systems[0].metrics["ndcg@5"].low is None


def test_every_set_counts_the_same_in_a_mean_over_sets_whatever_its_size():
    actual = estimate_mean([1.0] * 90, [0.0, 0.5] * 5)
    assert actual.mean == pytest.approx((1 + 0.25) / 2)
    # Only the small set varies.
    alone = estimate(bootstrap([0.0, 0.5] * 5, seed=1))
    assert actual.low == pytest.approx((1 + alone.low) / 2)
    assert actual.high == pytest.approx((1 + alone.high) / 2)
    assert estimate_mean([1.0] * 90, [0.1, 0.2]).low is None
