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
SKY = "#56B4E9"
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


def score_ranges(
    ranges: Mapping[str, tuple[float, float]],
    best: Mapping[str, float],
    threshold: float,
    *,
    label: str = "threshold in use",
    title: str = "",
) -> Figure:
    """Each set's range of scores with its best threshold, on one axis (paper, Fig. 1).

    Args:
        ranges: Set -> lowest and highest score, normalised over all sets.
        best: Set -> threshold with the highest mean F1, normalised.
        threshold: The threshold in use, normalised.
        label: The threshold's name in the legend.
        title: Title of the figure.
    """
    with _canvas(7.0, 1.5 + 0.36 * len(ranges)) as figure:
        axes = figure.subplots()
        rows = range(len(ranges))
        lows, highs = np.transpose(list(ranges.values()))
        axes.barh(rows, highs - lows, left=lows, height=0.5, color=SKY, alpha=0.6, label="scores")
        axes.axvline(threshold, color=BLACK, linestyle="--", linewidth=1.2, label=label, zorder=2)
        dots = [best[name] for name in ranges]
        axes.plot(dots, rows, "o", color=VERMILION, markersize=8, label="best threshold", zorder=3)
        axes.set_yticks(rows, list(ranges))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        ends = (min(0, threshold) - 0.02, max(1, threshold) + 0.02)
        axes.set(xlabel="score, normalised over all sets", xlim=ends, title=title)
        figure.legend(loc="outside lower center", ncols=3)
        return figure


def f1_gap_curves(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Share of queries that lose more F1 than x because all queries share one threshold.

    Args:
        panels: Set -> system -> F1 gap of each query (paper, Fig. 2).
    """
    with _panels(panels, 2.5) as (figure, grid):
        for axes, (name, systems) in zip(grid, panels.items(), strict=True):
            for system, gaps in systems.items():
                above = np.linspace(1, 0, len(gaps) + 1)
                axes.step([0, *sorted(gaps), 1], [*above, 0], where="post", label=system)
            axes.set(title=name, xlim=(0, 1), ylim=(0, 1.02))
        return _labelled(figure, "F1 below the query's best by more", "share of queries")


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
    with _panels(panels, 2.2) as (figure, grid):
        for axes, (name, (relevant, irrelevant)) in zip(grid, panels.items(), strict=True):
            _draw_histogram(axes, irrelevant, edges, label="irrelevant", color=BLUE, linestyle="-")
            _draw_histogram(
                axes, relevant, edges, label="relevant", color=VERMILION, linestyle="--"
            )
            axes.axvline(threshold, color=BLACK, linestyle=":", linewidth=1.4, label="threshold")
            axes.set_title(name)
            axes.set_ylim(bottom=0)
        figure.suptitle(title, x=0.01, ha="left")
        return _labelled(figure, "score", "share of the class")


def _draw_histogram(axes: Axes, scores: Sequence[float], edges: Any, **line: Any) -> None:
    shares = np.histogram(scores, edges)[0] / max(len(scores), 1)
    axes.stairs(shares, edges, fill=True, color=line["color"], alpha=0.3)
    axes.stairs(shares, edges, linewidth=1.4, **line)


@contextmanager
def _panels(names: Collection[str], height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of small panels in rows, one for each name."""
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    with _canvas(5.5 if columns == 1 else 9.0, height * rows + 0.9) as figure:
        yield figure, [figure.add_subplot(rows, columns, n + 1) for n in range(len(names))]


def _labelled(figure: Figure, x_label: str, y_label: str) -> Figure:
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
def _canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure (inches) in our style. It belongs to no window and no global state."""
    with load_matplotlib().rc_context(fname=STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")
