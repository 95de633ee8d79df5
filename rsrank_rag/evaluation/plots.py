"""The figures of an evaluation, in one style: plain numbers in, a matplotlib figure out.

Every figure can be read without colour, because shapes, line styles and labels differ, too. The
colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import required

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
VERMILION = "#D55E00"
BLACK = "#000000"

# Panels in a row of a figure.
COLUMNS = 3

# Settings that every figure is drawn and written with.
STYLE = Path(__file__).with_suffix(".mplstyle")


def load_matplotlib() -> Any:
    """The library; MissingDependencyError if it is not installed."""
    return required("matplotlib", "Figures need matplotlib.", "plots")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as ``PATH.png``, and make its folder. Equal figures give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_name(f"{path.name}.png")
    with load_matplotlib().rc_context(fname=STYLE):
        figure.savefig(png)
    return png


def score_histograms(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    threshold: float,
    *,
    title: str = "",
    bins: int = 30,
) -> Figure:
    """Scores of relevant and of irrelevant documents; each class adds up to 1.

    Args:
        panels: Set -> scores of the relevant documents, scores of the irrelevant documents.
        threshold: The threshold in use.
        title: Title of the figure.
        bins: Number of bins.
    """
    scores = [score for pair in panels.values() for scores in pair for score in scores]
    edges = np.histogram_bin_edges([*scores, threshold], bins)
    with panel_grid(panels, 2.2) as (figure, grid):
        for axes, (name, (relevant, irrelevant)) in zip(grid, panels.items(), strict=True):
            _draw_histogram(axes, irrelevant, edges, label="irrelevant", color=BLUE, linestyle="-")
            _draw_histogram(
                axes, relevant, edges, label="relevant", color=VERMILION, linestyle="--"
            )
            axes.axvline(threshold, color=BLACK, linestyle=":", linewidth=1.4, label="threshold")
            axes.set_title(name)
            axes.set_ylim(bottom=0)
        figure.suptitle(title, x=0.01, ha="left")
        return labelled(figure, "score", "share of the class")


def _draw_histogram(axes: Axes, scores: Sequence[float], edges: Any, **line: Any) -> None:
    shares = np.histogram(scores, edges)[0] / max(len(scores), 1)
    axes.stairs(shares, edges, fill=True, color=line["color"], alpha=0.3)
    axes.stairs(shares, edges, linewidth=1.4, **line)


@contextmanager
def panel_grid(names: Collection[str], height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of small panels in rows, one for each name."""
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    with canvas(5.5 if columns == 1 else 9.0, height * rows + 0.9) as figure:
        yield figure, [figure.add_subplot(rows, columns, n + 1) for n in range(len(names))]


def labelled(figure: Figure, x_label: str, y_label: str) -> Figure:
    """Name the axes, and put one legend with each label once below all panels."""
    figure.supxlabel(x_label, size="medium")
    figure.supylabel(y_label, size="medium")
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    columns = min(len(handles), 4)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return figure


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure (inches) in our style. It belongs to no window and no global state."""
    with load_matplotlib().rc_context(fname=STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")
