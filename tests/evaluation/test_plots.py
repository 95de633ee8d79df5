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


def test_the_same_figure_is_saved_as_the_same_bytes(tmp_path):
    def write(name):
        figure = plots.score_histograms({"a": ([1.0], [0.0])}, 0.4, title="x")
        return plots.save(figure, tmp_path / name / "figure").read_bytes()

    png = write("one")
    assert png.startswith(b"\x89PNG")
    assert write("two") == png
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["figure.png"]


def test_a_name_with_a_dot_keeps_it(tmp_path):
    png = plots.save(
        plots.score_histograms({"a": ([1.0], [0.0])}, 0.4), tmp_path / "2wiki.sentence"
    )
    assert png.name == "2wiki.sentence.png"


def test_drawing_changes_no_global_settings():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.score_histograms({"a": ([1.0], [0.0])}, 0.4)
    assert dict(matplotlib.rcParams) == before


def test_missing_matplotlib_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[plots\]"):
        plots.score_histograms({"a": ([1.0], [0.0])}, 0.4)
