"""Every figure is drawn from plain numbers, and what it shows are those numbers."""

import sys

import numpy as np
import pytest
from figures import draw_everything, legend

from rsrank_rag.errors import MissingDependencyError

pytest.importorskip("matplotlib")

from rsrank_rag.evaluation import plots


def test_score_histograms_count_every_document_of_its_class():
    rng = np.random.default_rng(0)
    pair = (list(rng.normal(3, 1, 20)), list(rng.normal(-3, 1, 300)))
    figure = draw_everything(plots.score_histograms({"a": pair, "none": ([], [0.5])}, 0.0))
    lines = figure.axes[0].patches
    assert len(lines) == 2
    edges = np.histogram_bin_edges([*pair[0], *pair[1], 0.5, 0.0], plots.BINS)
    for patch, scores in zip(lines, pair[::-1], strict=True):
        # The outline rises and falls once for each bin; then it goes back along the axis.
        shares = np.histogram(scores, edges)[0] / len(scores)
        heights = patch.get_xy()[1 : 2 * plots.BINS : 2, 1]
        assert list(heights) == pytest.approx(list(shares))
    assert legend(figure) == {"relevant", "irrelevant", "threshold"}


def test_a_set_s_name_is_no_formula():
    name = "p$q^^{x$"
    figure = draw_everything(plots.score_histograms({name: ([1.0], [0.0])}, 0.4))
    assert figure.axes[0].get_title("left") == name


def test_the_same_figure_gives_the_same_bytes():
    pngs = [plots.png(plots.score_histograms({"a": ([1.0], [0.0])}, 0.4)) for _ in range(2)]
    assert pngs[0].startswith(b"\x89PNG")
    assert pngs[0] == pngs[1]


def test_drawing_changes_no_global_settings():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.score_histograms({"a": ([1.0], [0.0])}, 0.4)
    assert dict(matplotlib.rcParams) == before


def test_missing_matplotlib_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[plots\]"):
        plots.score_histograms({"a": ([1.0], [0.0])}, 0.4)
