"""The figures of an evaluation, in one style: plain numbers in, a matplotlib figure out.

Every figure can be read without colour (shapes, line styles and labels differ too), and the colours are those of Okabe
and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#000000",
)
RELEVANT, IRRELEVANT, NEUTRAL = VERMILION, BLUE, "#767676"
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
    "svg.fonttype": "path",
    "svg.hashsalt": "rsrank",
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


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG. The same figure gives the same bytes: no date, no random ids.

    Args:
        figure: Any figure.
        path: Without a suffix, or with one of the two; the folder is made if need be.

    Returns:
        The PNG's and the SVG's path.
    """
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    base.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (base.with_name(f"{base.name}.{kind}") for kind in ("png", "svg"))
    with _matplotlib().rc_context(STYLE):
        figure.savefig(png)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


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
    """Share of queries that lose more F1 than x because all queries share one threshold (paper, Fig. 2).

    Args:
        panels: Set -> system -> F1 gap of each query.
    """
    with _canvas(*_size(len(panels), 2.5)) as figure:
        for axes, (name, systems) in zip(_grid(figure, len(panels), share="both"), panels.items(), strict=True):
            for number, (system, gaps) in enumerate(systems.items()):
                points = np.sort(np.asarray(gaps, dtype=float))
                above = 1 - np.arange(1, len(points) + 1) / max(len(points), 1)
                axes.step(
                    [0.0, *points, 1.0], [1.0, *above, 0.0], where="post", label=system, **_line(number, marker=False)
                )
            axes.set_title(name)
            axes.set(xlim=(0, 1), ylim=(0, 1.02))
        _label_outer(figure, "F1 below the query's best by more", "share of queries")
        _legend_once(figure)
        return figure


def headroom_bars(panels: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> Figure:
    """F1 at the set's best threshold, and what each query's own best threshold would add (paper, Fig. 5).

    Args:
        panels: System -> set -> mean F1 at the threshold in use, at the set's best and at each query's best one.
    """
    with _canvas(*_size(len(panels), 3.0, columns=2)) as figure:
        grid = _grid(figure, len(panels), columns=2, share="y")
        for axes, (system, sets) in zip(grid, panels.items(), strict=True):
            places = np.arange(len(sets))
            used, best, query_best = (np.array(column) for column in zip(*sets.values(), strict=True))
            axes.bar(places, best, 0.64, color=BLUE, label="best threshold of the set")
            axes.bar(
                places,
                query_best - best,
                0.64,
                bottom=best,
                color=SKY,
                edgecolor="white",
                hatch="///",
                linewidth=0,
                label="headroom to each query's best",
            )
            axes.plot(places, used, "D", color=ORANGE, markeredgecolor=BLACK, label=IN_USE)
            for place, low, high in zip(places, best, query_best, strict=True):
                axes.annotate(f"+{100 * (high - low):.0f}", (place, high), (0, 2), **_ABOVE)
            axes.set_xticks(places, list(sets), rotation=35, ha="right", rotation_mode="anchor")
            axes.grid(axis="x", visible=False)
            axes.set_title(system)
            axes.set_ylim(0, 1.08)
        _label_outer(figure, "", "mean F1")
        _legend_once(figure)
        return figure


def score_histograms(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], threshold: float, *, title: str = "", bins: int = 30
) -> Figure:
    """Scores of relevant and of irrelevant documents; each class adds up to 1, so that few beside many can be seen.

    Args:
        panels: Set -> scores of the relevant, scores of the irrelevant documents.
        threshold: The threshold the system is used with.
        title: Such as the system's name.
        bins: Number of bins over all sets.
    """
    everything = [score for pair in panels.values() for scores in pair for score in scores]
    edges = np.histogram_bin_edges([*everything, threshold], bins)
    with _canvas(*_size(len(panels), 2.2)) as figure:
        for axes, (name, pair) in zip(_grid(figure, len(panels), share="x"), panels.items(), strict=True):
            kinds = (("irrelevant", IRRELEVANT, "-"), ("relevant", RELEVANT, "--"))
            for (label, colour, line), scores in zip(kinds, pair[::-1], strict=True):
                shares = np.histogram(scores, edges)[0] / max(len(scores), 1)
                axes.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
                axes.stairs(shares, edges, color=colour, linestyle=line, linewidth=1.4, label=label)
            axes.axvline(threshold, color=BLACK, linestyle=":", linewidth=1.4, label="threshold")
            axes.set_title(name)
            axes.set_ylim(bottom=0)
        _label_outer(figure, "score", "share of the class")
        figure.suptitle(title, x=0.01, ha="left")
        _legend_once(figure)
        return figure


def selection_curves(
    panels: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float], tuple[float, float]]],
    *,
    label: str = IN_USE,
    title: str = "",
) -> Figure:
    """F1 against documents kept: top-k, one threshold for all queries with the same budget, the threshold in use.

    Args:
        panels: Set -> mean documents kept, F1 of top-k, F1 of the threshold that keeps as many, and (documents kept,
            F1) at the threshold in use.
        label: What kind of threshold that is.
        title: Such as the system's name.
    """
    with _canvas(*_size(len(panels), 2.4)) as figure:
        grid = _grid(figure, len(panels), share="y")
        for axes, (name, (budgets, top, threshold, used)) in zip(grid, panels.items(), strict=True):
            axes.plot(budgets, threshold, label="one threshold, same budget", **_line(0))
            axes.plot(budgets, top, label="top-k", **_line(1))
            axes.plot(*used, "*", color=ORANGE, markeredgecolor=BLACK, markersize=14, label=label)
            axes.set_title(name)
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1)
        _label_outer(figure, "documents kept of a query (mean)", "mean F1")
        figure.suptitle(title, x=0.01, ha="left")
        _legend_once(figure)
        return figure


def quality_against_latency(
    points: Mapping[str, tuple[float, float, tuple[float, float] | None]], *, quality: str = "mean F1"
) -> Figure:
    """One point a system: seconds a query against quality, with the confidence interval of the quality.

    Args:
        points: System -> seconds, quality, and the quality's interval (None where there is none).
        quality: What the quality is.
    """
    with _canvas(6.4, 4.0) as figure:
        axes = figure.subplots()
        for number, (system, (seconds, value, interval)) in enumerate(points.items()):
            low, high = interval or (value, value)
            axes.errorbar(
                1000 * seconds,
                value,
                yerr=[[value - low], [high - value]],
                capsize=3,
                markersize=8,
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle="none",
                label=system,
            )
        axes.set_xscale("log")
        times = [1000 * seconds for seconds, _, _ in points.values() if seconds > 0] or [1.0]
        axes.set_xlim(min(times) / 2, max(times) * 2)
        axes.xaxis.set_major_formatter(_plain_number)
        axes.set(xlabel="milliseconds a query (median, log scale)", ylabel=quality)
        axes.margins(y=0.3)
        figure.legend(loc="outside lower center", ncols=2)
        return figure


def learning_curves(
    epochs: Sequence[int], terms: Mapping[str, Sequence[float]], validation_f1: Sequence[float], best: int
) -> Figure:
    """Loss terms and validation F1 over the epochs.

    Args:
        epochs: Their numbers.
        terms: Name -> mean over each epoch; the first one is drawn bold.
        validation_f1: After each epoch.
        best: The epoch that was chosen.
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

    Args:
        before: (N, 2), from `shift_map.umap_plane`.
        after: (N, 2).
        relevant: N labels.
        title: Such as the set's name.
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


_ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}


def _line(number: int, *, marker: bool = True) -> dict[str, Any]:
    """Colour, line and marker of the n-th of several lines."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}
    return {**style, "marker": MARKERS[number % len(MARKERS)], "markersize": 5} if marker else style


def _size(panels: int, height: float, columns: int = 3) -> tuple[float, float]:
    """Width and height of a figure of small panels; few panels get a narrower one."""
    wide = min(panels, columns)
    return (5.5 if wide == 1 else 9.0), height * math.ceil(panels / columns) + 0.9


def _grid(figure: Figure, count: int, *, share: str, columns: int = 3) -> list[Axes]:
    """``count`` panels in rows; what is left of the last row stays empty."""
    wide = max(min(count, columns), 1)
    x, y = share in ("x", "both"), share in ("y", "both")
    every = list(figure.subplots(math.ceil(count / wide), wide, squeeze=False, sharex=x, sharey=y).flat)
    for number, axes in enumerate(every):
        if number >= count:
            axes.remove()
        elif number + wide >= count:
            axes.tick_params(labelbottom=True)  # the lowest panel of its column
    return every[:count]


def _label_outer(figure: Figure, xlabel: str, ylabel: str) -> None:
    """Axis labels at the lowest panel of each column and the first of each row."""
    places = [axes.get_subplotspec() for axes in figure.axes]
    lowest = {place.colspan.start: axes for axes, place in zip(figure.axes, places, strict=True) if place}
    for axes, place in zip(figure.axes, places, strict=True):
        if place and place.is_first_col():
            axes.set_ylabel(ylabel)
        if axes in lowest.values():
            axes.set_xlabel(xlabel)


def _legend_once(figure: Figure) -> None:
    """One legend below all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4))


def _plain_number(value: float, _: object) -> str:
    return f"{value:g}"


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
        raise MissingDependencyError("Figures need matplotlib. Install with: pip install 'rsrank-rag[plots]'") from None
    return matplotlib
