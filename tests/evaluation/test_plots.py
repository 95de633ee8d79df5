"""Every figure is drawn from plain numbers, and what it shows are those numbers."""

import sys

import numpy as np
import pytest

from rsrank_rag.errors import MissingDependencyError

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from rsrank_rag.evaluation import plots

SETS = ["first", "second", "third", "fourth"]


def legend(figure):
    return {text.get_text() for found in figure.legends for text in found.get_texts()}


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def draw_everything(figure):
    figure.canvas.draw()  # layout and fonts may fail only here
    return figure


def test_score_ranges_show_each_sets_range_and_best_threshold():
    ranges = {name: (0.1 * i, 0.5 + 0.1 * i) for i, name in enumerate(SETS)}
    best = {name: 0.3 + 0.1 * i for i, name in enumerate(SETS)}
    figure = draw_everything(plots.score_ranges(ranges, best, 0.4, title="mini"))
    (axes,) = figure.axes
    ends = [end for bar in axes.patches for end in (bar.get_x(), bar.get_x() + bar.get_width())]
    assert ends == pytest.approx([end for pair in ranges.values() for end in pair])
    line, dots = axes.lines
    assert list(line.get_xdata()) == [0.4, 0.4]
    assert list(dots.get_xdata()) == list(best.values())
    assert [label.get_text() for label in axes.get_yticklabels()] == SETS
    assert (axes.get_xlabel(), titles(figure)) == ("score, normalised over all sets", ["mini"])
    assert legend(figure) == {"scores", "threshold in use", "best threshold"}
    named = plots.score_ranges(ranges, best, 0.4, label="tuned threshold")
    assert legend(named) == {"scores", "tuned threshold", "best threshold"}


def test_a_threshold_outside_of_all_scores_is_still_on_the_figure():
    (axes,) = plots.score_ranges({"a": (0.0, 1.0)}, {"a": 0.5}, 1.4).axes
    assert axes.get_xlim()[1] > 1.4


def test_f1_gap_curves_give_the_share_of_queries_above_each_gap():
    gaps = {"mini": [0.0, 0.2, 0.2, 0.5], "bm25": [0.1] * 4}
    figure = draw_everything(plots.f1_gap_curves(dict.fromkeys(SETS, gaps)))
    assert titles(figure) == SETS
    line = figure.axes[0].lines[0]
    shares = dict(
        zip(line.get_xdata(), line.get_ydata(), strict=True)
    )  # of equal x the last one counts: steps "post"
    assert shares == {0.0: 0.75, 0.2: 0.25, 0.5: 0.0, 1.0: 0.0}
    assert legend(figure) == {"mini", "bm25"}
    assert figure.get_supxlabel() == "F1 below the query's best by more"
    assert figure.get_supylabel() == "share of queries"


def test_score_histograms_count_every_document_of_its_class():
    rng = np.random.default_rng(0)
    pair = (list(rng.normal(3, 1, 20)), list(rng.normal(-3, 1, 300)))
    figure = draw_everything(
        plots.score_histograms({"a": pair, "none": ([], [0.5])}, 0.0, title="mini", bins=10)
    )
    areas, lines = figure.axes[0].patches[::2], figure.axes[0].patches[1::2]
    assert len(areas) == len(lines) == 2
    for patch, scores in zip(lines, pair[::-1], strict=True):
        values, edges, _ = patch.get_data()
        assert values.sum() == pytest.approx(1.0)
        assert list(values) == pytest.approx(list(np.histogram(scores, edges)[0] / len(scores)))
    assert legend(figure) == {"relevant", "irrelevant", "threshold"}
    assert figure.get_suptitle() == "mini"


def test_colours_and_shapes_both_differ_so_that_neither_is_needed():
    lines = plots.f1_gap_curves({"a": {str(i): [0.1] for i in range(5)}}).axes[0].lines
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in lines}) == 5
    assert len({line.get_color() for line in lines}) == 5


def test_the_same_figure_is_saved_as_the_same_bytes(tmp_path):
    def write(name):
        figure = plots.score_ranges({"a": (0.0, 1.0)}, {"a": 0.5}, 0.4, title="x")
        return plots.save(figure, tmp_path / name / "figure").read_bytes()

    png = write("one")
    assert png.startswith(b"\x89PNG")
    assert write("two") == png
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["figure.png"]


def test_a_name_with_a_dot_keeps_it(tmp_path):
    png = plots.save(plots.f1_gap_curves({"a": {"b": [0.5]}}), tmp_path / "2wiki.sentence")
    assert png.name == "2wiki.sentence.png"


def test_drawing_changes_no_global_settings():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.f1_gap_curves({"a": {"b": [0.5]}})
    assert dict(matplotlib.rcParams) == before


def test_missing_matplotlib_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[plots\]"):
        plots.f1_gap_curves({"a": {"b": [0.5]}})
