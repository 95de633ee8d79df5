"""Whether one threshold is good for all sets and all queries (paper, Section 2)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from rsrank_rag.evaluation.metrics import ScoredQuery, selection_measures
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.reranker import BLANK_SCORE

from .. import plots
from ..best_threshold import best_threshold
from ..comparison import Comparison, Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME_LENGTH = 32
"""Last characters of a system's name in figures."""


class PairedTest(NamedTuple):
    """A paired t-test.

    Attributes:
        difference: Mean of the first minus the second.
        t: The statistic. None where the test is not defined: with fewer than two pairs, and if all
            pairs differ by the same amount.
        p: The two-sided p-value, or None like ``t``.
    """

    difference: float
    t: float | None
    p: float | None


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """The paired t-test of the paper's Table 1.

    There it compares each query's best F1 with its F1 at the set's best threshold.
    """
    differences = np.subtract(first, second)
    if not len(differences):
        return PairedTest(difference=0.0, t=None, p=None)
    mean = statistics.fmean(differences)
    if np.ptp(differences) < 1e-12:
        return PairedTest(difference=mean, t=None, p=None)
    result = stats.ttest_rel(first, second)
    return PairedTest(difference=mean, t=float(result.statistic), p=float(result.pvalue))


def threshold_of(system: Measured) -> float:
    """The threshold of a system that is measured at one."""
    threshold = system.rule.threshold
    assert threshold is not None
    return threshold


def own_best(queries: Sequence[ScoredQuery]) -> list[float]:
    """F1 of a set's queries, each at its own best threshold."""
    return [best_threshold([query])[1] for query in queries]


def set_best(queries: Sequence[ScoredQuery]) -> list[float]:
    """F1 of a set's queries, all at the set's best threshold."""
    rule = Rule(best_threshold(queries)[0])
    values: list[float] = selection_measures(queries, rule)["f1"].tolist()
    return values


def f1_gaps(queries: Sequence[ScoredQuery]) -> list[float]:
    """F1 that each query loses because all queries share the set's best threshold; at least 0.

    Source: paper, Section 2.2.
    """
    lost = np.subtract(own_best(queries), set_best(queries))
    gaps: list[float] = np.maximum(lost, 0.0).tolist()
    return gaps


@dataclass(frozen=True, slots=True)
class Stability:
    """How well one threshold suits several sets (paper, Section 2.1).

    All thresholds are normalised: 0 and 1 are the lowest and the highest score of all sets.

    Attributes:
        ranges: Each set's lowest and highest score.
        natural: The threshold in use; outside [0, 1] if no score lies beyond it.
        best: Each set's threshold with the highest mean F1.
        bias: Mean over sets of the absolute offset between the best and the natural threshold.
        variance: Mean squared distance of the sets' best thresholds from their mean.
    """

    ranges: dict[str, tuple[float, float]]
    natural: float
    best: dict[str, float]
    bias: float
    variance: float


def threshold_stability(sets: Mapping[str, Sequence[ScoredQuery]], threshold: float) -> Stability:
    """Bias and variance of the best thresholds after one min-max normalisation over all sets.

    The paper gives one bias for six sets and does not say how it joins them. Here it is the mean of
    the sets' absolute offsets. Offsets of different signs do not cancel.

    Args:
        sets: One system's scored queries, by set; at least one set.
        threshold: The threshold in use, in the system's own units.

    >>> queries = [ScoredQuery([0.0, 2.0, 4.0], [False, True, True])]
    >>> stability = threshold_stability({"a": queries}, threshold=2.0)
    >>> stability.best, stability.natural, stability.bias, stability.variance
    ({'a': 0.25}, 0.5, 0.25, 0.0)
    """
    extremes = {}
    for name, queries in sets.items():
        scores = set().union(*(query.scores for query in queries)) - {BLANK_SCORE}
        extremes[name] = (min(scores, default=0.0), max(scores, default=0.0))
    lows, highs = zip(*extremes.values(), strict=True)
    low = min(lows)
    span = max(highs) - low or 1.0
    natural = (threshold - low) / span
    ranges = {}
    best = {}
    for name, (lowest, highest) in extremes.items():
        ranges[name] = ((lowest - low) / span, (highest - low) / span)
        best[name] = (best_threshold(sets[name])[0] - low) / span
    bias = statistics.fmean(abs(value - natural) for value in best.values())
    return Stability(ranges, natural, best, bias, statistics.pvariance(best.values()))


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
    from matplotlib.figure import Figure

    with plots.style():
        figure = Figure(figsize=(7.0, 1.5 + 0.36 * len(ranges)), layout="constrained")
        axes = figure.subplots()
        rows = range(len(ranges))
        lows, highs = np.transpose(list(ranges.values()))
        axes.barh(
            rows, highs - lows, left=lows, height=0.5, color=plots.SKY, alpha=0.6, label="scores"
        )
        axes.axvline(
            threshold, color=plots.BLACK, linestyle="--", linewidth=1.2, label=label, zorder=2
        )
        dots = [best[name] for name in ranges]
        axes.plot(
            dots, rows, "o", color=plots.VERMILION, markersize=8, label="best threshold", zorder=3
        )
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
    with plots.style():
        figure, grid = plots.panel_grid(panels, 2.5)
        for axes, (name, systems) in zip(grid, panels.items(), strict=True):
            for system, gaps in systems.items():
                above = np.linspace(1, 0, len(gaps) + 1)
                axes.step([0, *sorted(gaps), 1], [*above, 0], where="post", label=system)
            axes.set(title=name, xlim=(0, 1), ylim=(0, 1.02))
        plots.name_axes(figure, "F1 below the query's best by more", "share of queries")
        return figure


def write_figures(folder: Path, systems: Sequence[Measured], comparison: Comparison) -> list[Path]:
    """Write the paper's Figures 1 and 2 as PNG: ``score-range-NUMBER.png`` and ``f1-gap.png``."""
    paths = []
    for name, figure in _figures(systems, comparison):
        paths.append(folder / f"{name}.png")
        folder.mkdir(parents=True, exist_ok=True)
        paths[-1].write_bytes(plots.png(figure))
    return paths


def _figures(systems: Sequence[Measured], comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    for number, system in enumerate(systems):
        stability = threshold_stability(system.scored, threshold_of(system))
        name = system.name[-NAME_LENGTH:]
        title = f"{name}: bias {stability.bias:.3f}, variance {stability.variance:.4f}"
        figure = score_ranges(stability.ranges, stability.best, stability.natural, title=title)
        yield f"score-range-{number}", figure
    gaps: dict[str, dict[str, list[float]]] = {}
    for result in comparison.systems:
        for name, in_set in result.sets.items():
            queries = comparison.scored(name, in_set)
            gaps.setdefault(name, {})[result.name] = f1_gaps(queries)
    yield "f1-gap", f1_gap_curves(gaps)
