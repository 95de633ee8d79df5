"""The figures of an evaluation, in one style: plain numbers in, a matplotlib figure out.

Every figure can be read without colour, because shapes, line styles and labels differ, too. The
colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import required
from .statistics import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
VERMILION = "#D55E00"
BLACK = "#000000"

# Panels in a row of a figure.
COLUMNS = 3

# Bins of a histogram.
BINS = 30

# Settings that every figure is drawn and written with.
STYLE = Path(__file__).with_suffix(".mplstyle")


def style() -> AbstractContextManager[None]:
    """A context manager in which matplotlib has the settings of the package's figures.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    matplotlib = required("matplotlib", "Figures need matplotlib.", "plots")
    context: AbstractContextManager[None] = matplotlib.rc_context(fname=STYLE)
    return context


def png(figure: Figure) -> bytes:
    """A figure as a PNG file. Equal figures give equal bytes."""
    file = BytesIO()
    with style():
        figure.savefig(file)
    return file.getvalue()


def score_histograms(panels: Mapping[str, tuple[Array, Array]], threshold: float | None) -> Figure:
    """Scores of relevant and of irrelevant documents; each class adds up to 1.

    Args:
        panels: By the name of the set: scores of its R relevant documents, (R,), and scores of its
            I irrelevant documents, (I,).
        threshold: The threshold in use; None for none.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    scores = [scores for pair in panels.values() for scores in pair]
    if threshold is not None:
        scores.append(np.array([threshold]))
    edges = np.histogram_bin_edges(np.concatenate(scores), BINS).tolist()
    with style():
        figure, grid = panel_grid(panels, 2.2)
        for axes, (name, (relevant, irrelevant)) in zip(grid, panels.items(), strict=True):
            for label, values, color, linestyle in (
                ("irrelevant", irrelevant, BLUE, "-"),
                ("relevant", relevant, VERMILION, "--"),
            ):
                axes.hist(
                    values,
                    edges,
                    weights=np.full(len(values), 1 / max(len(values), 1)),
                    histtype="stepfilled",
                    facecolor=(color, 0.3),
                    edgecolor=color,
                    linestyle=linestyle,
                    label=label,
                )
            if threshold is not None:
                axes.axvline(threshold, color=BLACK, linestyle=":", label="threshold")
            axes.set_title(name, parse_math=False)
        name_axes(figure, "score", "share of the class")
    return figure


def panel_grid(names: Collection[str], height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a small panel for each name, in rows of this height (inches).

    The figure belongs to no window and no global state.
    """
    from matplotlib.figure import Figure

    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2 + 2.5 * columns, height * rows + 0.9), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, n + 1) for n in range(len(names))]


def name_axes(figure: Figure, x_label: str, y_label: str) -> None:
    """Name the axes, and put one legend below all panels, which show the same things."""
    figure.supxlabel(x_label, size="medium")
    figure.supylabel(y_label, size="medium")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
