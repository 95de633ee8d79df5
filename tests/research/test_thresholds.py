"""Threshold stability, F1 gaps and the t-test: by hand and against slow references."""

import math

import numpy as np
import pytest
from figures import draw_everything, legend, titles
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import f1_at

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")


from research.best_threshold import best_threshold
from research.comparison import Measured, compare
from research.reproduction.thresholds import (
    f1_gap_curves,
    f1_gaps,
    paired_t_test,
    score_ranges,
    threshold_stability,
    write_figures,
)
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.reranker import BLANK_SCORE

SETS = ["first", "second", "third", "fourth"]

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
    stability = threshold_stability(sets, threshold=3.5)
    assert stability.ranges == {"a": (0.0, pytest.approx(0.6)), "b": (pytest.approx(0.6), 1.0)}
    assert stability.natural == pytest.approx(0.55)
    assert stability.best == {"a": pytest.approx(0.5), "b": pytest.approx(0.7)}
    # One is too high, one too low: they do not cancel.
    assert stability.bias == pytest.approx((0.05 + 0.15) / 2)
    assert stability.variance == pytest.approx(0.1**2)


def test_a_blank_document_does_not_stretch_the_range_of_the_scores():
    queries = [ScoredQuery([-2.0, 2.0, 4.0], [False, False, True])]
    with_blank = [*queries, ScoredQuery([4.0, BLANK_SCORE], [True, False])]
    assert threshold_stability({"a": with_blank}, 3.5) == threshold_stability({"a": queries}, 3.5)


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
    # Equal scores have no scale.
    if all(len({score for one in queries for score in one.scores}) > 1 for queries in sets):
        assert (after.bias, after.variance) == (
            pytest.approx(before.bias),
            pytest.approx(before.variance),
        )
        assert after.best == pytest.approx(before.best)
        # A threshold that keeps everything is below the range by a thousandth of it.
        assert all(-0.001 - 1e-12 <= value <= 1 + 1e-12 for value in before.best.values())


def test_sets_with_one_score_for_everything_have_finite_stability():
    stability = threshold_stability({"a": [ScoredQuery([2.0, 2.0], [True, False])]}, threshold=2.0)
    assert (stability.bias, stability.variance) == (pytest.approx(0.0, abs=0.0011), 0.0)


def comparison_of(queries):
    labelled = []
    for query in queries:
        documents = tuple(
            LabelledDocument(id=str(i), text="x", relevant=label)
            for i, label in enumerate(query.relevant)
        )
        labelled.append(LabelledQuery(id=str(len(labelled)), query="?", documents=documents))
    system = Measured("x", Rule(0.0), "given", {"s": queries})
    return system, compare([system], {"s": labelled})


@settings(max_examples=100, deadline=None)
@given(query_lists)
def test_f1_gaps_equal_an_exhaustive_search(queries):
    threshold, _ = best_threshold(queries)
    for query, gap in zip(queries, f1_gaps(queries), strict=True):
        tries = [min(query.scores) - 1, *query.scores]
        assert gap == pytest.approx(max(f1_at(query, t) for t in tries) - f1_at(query, threshold))
        assert gap >= 0


def test_the_paired_t_test_equals_the_textbook_formula():
    first, second = [0.9, 0.8, 0.7, 1.0], [0.5, 0.7, 0.7, 0.6]
    differences = np.subtract(first, second)
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(4))
    result = paired_t_test(first, second)
    assert result.difference == pytest.approx(differences.mean())
    assert result.t == pytest.approx(t)
    # Student's t with 3 degrees of freedom has a closed form.
    x = t / math.sqrt(3)
    assert result.p == pytest.approx(2 * (0.5 - (x / (1 + x * x) + math.atan(x)) / math.pi))


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
    result = paired_t_test(first, second)
    assert (result.t, result.p) == (t, p)


def test_score_ranges_show_each_sets_range_and_best_threshold():
    ranges = {name: (0.1 * i, 0.5 + 0.1 * i) for i, name in enumerate(SETS)}
    best = {name: 0.3 + 0.1 * i for i, name in enumerate(SETS)}
    figure = draw_everything(score_ranges(ranges, best, 0.4, title="mini"))
    (axes,) = figure.axes
    ends = [end for bar in axes.patches for end in (bar.get_x(), bar.get_x() + bar.get_width())]
    assert ends == pytest.approx([end for pair in ranges.values() for end in pair])
    line, dots = axes.lines
    assert list(line.get_xdata()) == [0.4, 0.4]
    assert list(dots.get_xdata()) == list(best.values())
    assert [label.get_text() for label in axes.get_yticklabels()] == SETS
    assert (axes.get_xlabel(), titles(figure)) == ("score, normalised over all sets", ["mini"])
    assert legend(figure) == {"scores", "threshold in use", "best threshold"}
    named = score_ranges(ranges, best, 0.4, label="tuned threshold")
    assert legend(named) == {"scores", "tuned threshold", "best threshold"}


def test_f1_gap_curves_give_the_share_of_queries_above_each_gap():
    gaps = {"mini": [0.0, 0.2, 0.2, 0.5], "bm25": [0.1] * 4}
    figure = draw_everything(f1_gap_curves(dict.fromkeys(SETS, gaps)))
    assert titles(figure) == SETS
    line = figure.axes[0].lines[0]
    # Of equal x the last one counts: steps "post".
    shares = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert shares == {0.0: 0.75, 0.2: 0.25, 0.5: 0.0, 1.0: 0.0}
    assert legend(figure) == {"mini", "bm25"}
    assert figure.get_supxlabel() == "F1 below the query's best by more"
    assert figure.get_supylabel() == "share of queries"


def test_the_figures_are_written(tmp_path):
    system, comparison = comparison_of([FIRST, SECOND])
    files = write_figures(tmp_path, [system], comparison)
    assert [path.name for path in files] == ["score-range-0.png", "f1-gap.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
