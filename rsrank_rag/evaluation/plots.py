"""The figures of an evaluation, in one style: plain numbers in, a matplotlib figure out.

Every figure can be read without colour (shapes, line styles and labels differ too), and the colours are those of Okabe
and Ito, which colour-blind readers tell apart.
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

BLUE, VERMILION, SKY, BLACK = "#0072B2", "#D55E00", "#56B4E9", "#000000"
COLOURS = (BLUE, VERMILION, "#009E73", "#E69F00", SKY, "#CC79A7", BLACK)
LINES = ("-", "--", "-.", ":")

STYLE = Path(__file__).with_suffix(
    ".mplstyle"
)  # settings that every figure is drawn and written with


def load_matplotlib() -> Any:
    """The library; MissingDependencyError where it is not installed."""
    return required("matplotlib", "Figures need matplotlib.", "plots")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as ``PATH.png``; the folder is made if need be. The same figure gives the same bytes."""
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
    """Each set's range of scores with its best threshold, on the axis of all scores together (paper, Fig. 1).

    `ranges`: set -> lowest and highest score. `best`: set -> threshold with the highest mean F1. `threshold`: the one
    that the system is used with, of the kind `label`. All are normalised.
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
        ends = min(-0.02, threshold - 0.02), max(1.02, threshold + 0.02)
        axes.set(xlabel="score, normalised over all sets", xlim=ends)
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=3)
        return figure


def f1_gap_curves(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Share of queries that lose more F1 than x because all queries share one threshold (paper, Fig. 2)."""
    with _panels(panels, 2.5) as (figure, grid):
        for axes, (name, systems) in zip(grid, panels.items(), strict=True):
            for number, (system, gaps) in enumerate(systems.items()):
                points = np.sort(np.asarray(gaps, dtype=float))
                above = 1 - np.arange(1, len(points) + 1) / max(len(points), 1)
                (line,) = axes.step(
                    [0.0, *points, 1.0], [1.0, *above, 0.0], where="post", label=system
                )
                line.set(color=COLOURS[number % len(COLOURS)], linestyle=LINES[number % len(LINES)])
            axes.set_title(name)
            axes.set(xlim=(0, 1), ylim=(0, 1.02))
        return _labelled(figure, "F1 below the query's best by more", "share of queries")


def score_histograms(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    threshold: float,
    *,
    title: str = "",
    bins: int = 30,
) -> Figure:
    """Scores of relevant and of irrelevant documents; each class adds up to 1, so that few beside many can be seen.

    `panels`: set -> scores of the relevant, scores of the irrelevant documents.
    """
    everything = [score for pair in panels.values() for scores in pair for score in scores]
    edges = np.histogram_bin_edges([*everything, threshold], bins)
    with _panels(panels, 2.2) as (figure, grid):
        for axes, (name, pair) in zip(grid, panels.items(), strict=True):
            kinds = (("irrelevant", BLUE, "-"), ("relevant", VERMILION, "--"))
            for (label, colour, line), scores in zip(kinds, pair[::-1], strict=True):
                shares = np.histogram(scores, edges)[0] / max(len(scores), 1)
                axes.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
                axes.stairs(shares, edges, color=colour, linestyle=line, linewidth=1.4, label=label)
            axes.axvline(threshold, color=BLACK, linestyle=":", linewidth=1.4, label="threshold")
            axes.set_title(name)
            axes.set_ylim(bottom=0)
        figure.suptitle(title, x=0.01, ha="left")
        return _labelled(figure, "score", "share of the class")


@contextmanager
def _panels(
    names: Collection[str], height: float, columns: int = 3
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of small panels in rows, one a name; what is left of the last row stays empty."""
    wide = max(min(len(names), columns), 1)
    rows = math.ceil(len(names) / wide)
    with _canvas(5.5 if wide == 1 else 9.0, height * rows + 0.9) as figure:
        grid = list(figure.subplots(rows, wide, squeeze=False).flat)
        for axes in grid[len(names) :]:
            axes.remove()
        yield figure, grid[: len(names)]


def _labelled(figure: Figure, across: str, up: str) -> Figure:
    """With names of the axes and one legend below all panels, each label once."""
    figure.supxlabel(across, size="medium")
    figure.supylabel(up, size="medium")
    panels = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {label: handle for panel in panels for handle, label in zip(*panel, strict=True)}
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4)
    )
    return figure


@contextmanager
def _canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure (inches) in our style. It belongs to no window and no global state."""
    with load_matplotlib().rc_context(fname=STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")
