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

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, SKY, BLACK = "#0072B2", "#D55E00", "#56B4E9", "#000000"
COLOURS = (BLUE, VERMILION, "#009E73", "#E69F00", SKY, "#CC79A7", BLACK)
RELEVANT, IRRELEVANT = VERMILION, BLUE
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

IN_USE = "threshold in use"
"""What a threshold is called where nothing better is known of it: not every system has a native one."""

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#4d4d4d",
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
    "figure.titlesize": 12,
    "font.size": 10,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
"""Settings that every figure is drawn and written with."""


def check() -> None:
    """Say early that figures could not be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    _matplotlib()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as ``PATH.png``; the folder is made if need be. The same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_name(f"{path.name}.png")
    with _matplotlib().rc_context(STYLE):
        figure.savefig(png)
    return png


def score_ranges(
    ranges: Mapping[str, tuple[float, float]],
    best: Mapping[str, float],
    threshold: float,
    *,
    label: str = IN_USE,
    title: str = "",
) -> Figure:
    """Each set's range of scores with its best threshold, on the axis of all scores together (paper, Fig. 1).

    Args:
        ranges: Set -> lowest and highest normalised score.
        best: Set -> normalised threshold with the highest mean F1.
        threshold: The normalised one that the system is used with.
        label: What kind of threshold that is.
        title: Such as the system's name.
    """
    with _canvas(7.0, 1.5 + 0.36 * len(ranges)) as figure:
        axes = figure.subplots()
        rows = range(len(ranges))
        lows = [low for low, _ in ranges.values()]
        widths = [high - low for low, high in ranges.values()]
        axes.barh(rows, widths, left=lows, height=0.5, color=SKY, alpha=0.6, label="scores")
        axes.axvline(threshold, color=BLACK, linestyle="--", linewidth=1.2, label=label, zorder=2)
        axes.plot(
            [best[name] for name in ranges], rows, "o", color=VERMILION, markersize=8, label="best threshold", zorder=3
        )
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
                axes.step(
                    [0.0, *points, 1.0], [1.0, *above, 0.0], where="post", label=system, **_line(number, marker=False)
                )
            axes.set_title(name)
            axes.set(xlim=(0, 1), ylim=(0, 1.02))
        figure.supxlabel("F1 below the query's best by more", size="medium")
        figure.supylabel("share of queries", size="medium")
        _legend_once(figure)
        return figure


def score_histograms(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], threshold: float, *, title: str = "", bins: int = 30
) -> Figure:
    """Scores of relevant and of irrelevant documents; each class adds up to 1, so that few beside many can be seen.

    `panels`: set -> scores of the relevant, scores of the irrelevant documents.
    """
    everything = [score for pair in panels.values() for scores in pair for score in scores]
    edges = np.histogram_bin_edges([*everything, threshold], bins)
    with _panels(panels, 2.2) as (figure, grid):
        for axes, (name, pair) in zip(grid, panels.items(), strict=True):
            kinds = (("irrelevant", IRRELEVANT, "-"), ("relevant", RELEVANT, "--"))
            for (label, colour, line), scores in zip(kinds, pair[::-1], strict=True):
                shares = np.histogram(scores, edges)[0] / max(len(scores), 1)
                axes.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
                axes.stairs(shares, edges, color=colour, linestyle=line, linewidth=1.4, label=label)
            axes.axvline(threshold, color=BLACK, linestyle=":", linewidth=1.4, label="threshold")
            axes.set_title(name)
            axes.set_ylim(bottom=0)
        figure.supxlabel("score", size="medium")
        figure.supylabel("share of the class", size="medium")
        figure.suptitle(title, x=0.01, ha="left")
        _legend_once(figure)
        return figure


def learning_curves(
    epochs: Sequence[int], terms: Mapping[str, Sequence[float]], validation_f1: Sequence[float], best: int
) -> Figure:
    """Loss terms and validation F1 over the epochs.

    `terms`: name -> mean over each epoch; the first one is drawn bold.
    """
    with _canvas(8.0, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        for number, (name, values) in enumerate(terms.items()):
            width = 2.6 if number == 0 else 1.4
            left.plot(epochs, values, label=name, **{**_line(number, marker=False), "linewidth": width})
        left.set_title("training loss and its terms (unweighted)")
        left.set(xlabel="epoch", ylabel="loss")
        left.legend()
        right.plot(epochs, validation_f1, color=BLUE)
        chosen = validation_f1[list(epochs).index(best)]
        right.plot([best], [chosen], "o", color=VERMILION, markersize=8)
        right.set_title(f"validation F1 at zero (best: {chosen:.3f}, epoch {best})")
        right.set(xlabel="epoch", ylabel="F1")
        return figure


def sample_efficiency(
    samples: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    *,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    label: str = "on the validation queries",
) -> Figure:
    """Quality by number of training queries (paper, Section 7.2).

    Args:
        samples: Numbers of queries; 0 stands for an untrained B.
        curves: Name of the metric -> one value a number.
        intervals: Name of the metric -> the confidence interval of each value, drawn as bars.
        label: Of the vertical axis: what the values were measured on.
    """
    with _canvas(6.0, 3.6) as figure:
        axes = figure.subplots()
        for number, (name, values) in enumerate(curves.items()):
            (line,) = axes.plot(samples, values, label=name, **_line(number))
            if intervals is not None:
                low, high = zip(*intervals[name], strict=True)
                axes.vlines(samples, low, high, colors=line.get_color(), linewidth=1.0)
        # Doubling steps, and still a place for 0.
        axes.set_xscale("symlog", linthresh=min((size for size in samples if size), default=1), linscale=0.6)
        axes.set_xticks(samples, [f"{size:,}" for size in samples])
        axes.minorticks_off()
        axes.set(xlabel="training queries", ylabel=label, ylim=(0, 1))
        axes.legend(loc="lower right")
        return figure


def shift_map(
    before: np.ndarray, after: np.ndarray, relevant: Sequence[bool] | np.ndarray, *, title: str = ""
) -> Figure:
    """Documents as points on a plane, by their shifts before and after B (paper, Fig. 4).

    `before`: (N, 2), from `shift_map.umap_plane`.
    """
    labels = np.asarray(relevant, dtype=bool)
    with _canvas(8.0, 4.1) as figure:
        for axes, points, name in zip(figure.subplots(1, 2), (before, after), ("before B", "after B"), strict=True):
            for chosen, kind, colour, marker, size in (
                (~labels, "irrelevant", IRRELEVANT, "o", 9),
                (labels, "relevant", RELEVANT, "^", 22),
            ):
                axes.scatter(
                    *points[chosen].T,
                    s=size,
                    color=colour,
                    marker=marker,
                    alpha=0.6,
                    linewidths=0,
                    label=f"{kind} ({chosen.sum():,})",
                )
            axes.set_title(name)
            axes.set(xticks=[], yticks=[])  # only nearness means anything here
        figure.suptitle(title, x=0.01, ha="left")
        _legend_once(figure)
        return figure


def _line(number: int, *, marker: bool = True) -> dict[str, Any]:
    """Colour, line and marker of the n-th of several lines."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}
    return {**style, "marker": MARKERS[number % len(MARKERS)], "markersize": 5} if marker else style


@contextmanager
def _panels(names: Collection[str], height: float, columns: int = 3) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of small panels in rows, one a name; what is left of the last row stays empty."""
    wide = max(min(len(names), columns), 1)
    rows = math.ceil(len(names) / wide)
    with _canvas(5.5 if wide == 1 else 9.0, height * rows + 0.9) as figure:
        grid = list(figure.subplots(rows, wide, squeeze=False).flat)
        for axes in grid[len(names) :]:
            axes.remove()
        yield figure, grid[: len(names)]


def _legend_once(figure: Figure) -> None:
    """One legend below all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4))


@contextmanager
def _canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure (inches) in our style. It belongs to no window and no global state."""
    with _matplotlib().rc_context(STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingDependencyError("Figures need matplotlib.", "plots") from None
    return matplotlib
