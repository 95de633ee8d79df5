"""The paper's tables as Markdown, from numbers that were measured."""

from collections.abc import Mapping, Sequence

from ..evaluation.comparison import Comparison, Measured
from ..evaluation.evaluate import summarise
from ..evaluation.statistics import Estimate

TIE = 0.01  # values so close to the best of their column are bold too, as in the paper

_METRICS = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1@tau": "F1@τ"}


def page(name: str, sets: Sequence[str], measured: Sequence[Measured], found: Comparison | None) -> str:
    """All tables of systems that can be filled.

    `measured`: systems, also those that lack a set. `found`: of the systems that have all sets.
    """
    parts = [f"# Measured: {name}", "Points of 100. Only what was computed in this run; figures: `report/`."]
    if measured:
        parts.append(main_table(sets, measured))
    if found is not None:
        parts += [make(found) for make in (difference_tables, threshold_table, gap_tables, headroom_table)]
    return "\n\n".join(parts) + "\n"


def main_table(sets: Sequence[str], measured: Sequence[Measured]) -> str:
    """The paper's results table: nDCG@5, Recall@5 and F1 at the threshold by set, and their average.

    A system that lacks a set has no average. The best of a column and what is within a point of it are bold.
    """
    records = {
        system.name: {label: summarise(rows, threshold=system.threshold) for label, rows in system.scored.items()}
        for system in measured
    }
    text = [
        "## Ranking and selection",
        "Threshold τ: " + "; ".join(f"{s.name} {round(s.threshold, 3) + 0.0:g} ({s.origin})" for s in measured) + ".",
    ]
    for metric, title in _METRICS.items():
        rows = {}
        for name, by_set in records.items():
            values = [by_set[label][metric] if label in by_set else None for label in sets]
            known = [value for value in values if value is not None]
            rows[name] = [*values, sum(known) / len(known) if len(known) == len(sets) else None]
        text.append(f"**{title}**\n\n" + grid(["system", *sets, "Avg"], _bold(rows)))
    return "\n\n".join(text)


def difference_tables(found: Comparison) -> str:
    """Means over sets with their intervals, and what the systems differ by, query by query."""
    rows = [[s.name, *(_interval(s.metrics[metric]) for metric in _METRICS)] for s in found.systems]
    parts = [
        "## Intervals and differences\n\nIn brackets: 95% bootstrap interval over queries; a difference whose interval "
        "leaves zero out is bold.\n\n**Means over the sets**\n\n" + grid(["system", *_METRICS.values()], rows)
    ]
    for pair in found.differences:
        by_set = {**pair.sets, "mean": pair.mean}
        rows = [[label, *(sure(values[metric]) for metric in _METRICS)] for label, values in by_set.items()]
        parts.append(f"**{pair.first} minus {pair.second}**\n\n" + grid(["set", *_METRICS.values()], rows))
    return "\n\n".join(parts)


def threshold_table(found: Comparison) -> str:
    """Bias and variance of the sets' best thresholds (paper, Sections 2.1 and 6.3), and where they lie."""
    sets = list(found.labels)
    rows = [
        [s.name, f"{s.threshold_normalised:.3f}", f"{s.bias:.4f}", f"{s.variance:.5f}"]
        + [f"{s.sets[label].tau_best_normalised:.3f}" for label in sets]
        for s in found.systems
    ]
    return (
        "## Thresholds across sets\n\nScores of all sets together are mapped to 0..1; each set's best threshold.\n\n"
        + grid(["system", "threshold", "bias", "variance", *sets], rows)
    )


def gap_tables(found: Comparison) -> str:
    """F1 at each query's own best threshold against the set's best, with the paired t-test (paper, Table 1)."""
    parts = ["## F1 gap of one threshold for all queries"]
    for system in found.systems:
        rows = []
        for label, result in system.sets.items():
            own, best, test = result.metrics["f1@query_best"].mean, result.metrics["f1@best"].mean, result.t_test
            cells = [label, str(len(result.queries)), points(own), points(best), points(own - best)]
            rows.append([*cells, "" if test.t is None else f"{test.t:.2f}", "" if test.p is None else f"{test.p:.1e}"])
        parts.append(f"**{system.name}**\n\n" + grid(["set", "N", "Q-Opt", "D-Opt", "Gap", "t", "p"], rows))
    return "\n\n".join(parts)


def headroom_table(found: Comparison) -> str:
    """F1 at the sets' best thresholds and what each query's own would add (paper, Section 7.3), means over sets."""
    rows = []
    for s in found.systems:
        tau, best, own = (s.metrics[name].mean for name in ("f1@tau", "f1@best", "f1@query_best"))
        rows.append([s.name, points(tau), points(best), points(own), f"+{points(own - best)}"])
    return "## Headroom\n\n" + grid(["system", "F1@τ", "set's best", "query's best", "headroom"], rows)


def sure(estimate: Estimate) -> str:
    """A difference; bold where its interval leaves zero out."""
    text = _interval(estimate, "+.1f")
    return f"**{text}**" if (estimate.low or 0) > 0 or (estimate.high or 0) < 0 else text


def _interval(estimate: Estimate, form: str = ".1f") -> str:
    mean, low, high = (f"{100 * (value or 0):{form}}" for value in (estimate.mean, estimate.low, estimate.high))
    return mean if estimate.low is None else f"{mean} [{low}, {high}]"


def points(value: float) -> str:
    """A share of 1 in points of 100."""
    return f"{100 * value:.1f}"


def _bold(rows: Mapping[str, Sequence[float | None]]) -> list[list[str]]:
    """A row a name; the best of a column and its ties are bold."""
    columns = zip(*rows.values(), strict=True)
    best = [max((value for value in column if value is not None), default=0.0) for column in columns]

    def cell(value: float | None, top: float) -> str:
        if value is None:
            return "–"
        return f"**{points(value)}**" if value >= top - TIE - 1e-9 else points(value)

    return [[name, *map(cell, values, best)] for name, values in rows.items()]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
