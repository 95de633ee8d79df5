"""The paper's tables as Markdown (``templates/``), from numbers that were measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.comparison import Comparison, Measured
from ..evaluation.evaluate import summarise
from ..evaluation.metrics import mean
from ..evaluation.report import template
from ..evaluation.statistics import Estimate

TIE = 0.01  # values so close to the best of their column are bold too, as in the paper

METRICS = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1@tau": "F1@τ"}


def page(
    name: str,
    sets: Sequence[str],
    measured: Sequence[Measured],
    found: Comparison | None,
    ablations: str = "",
    failures: Mapping[str, str] | None = None,
) -> str:
    """All tables of systems that can be filled, those of ablations, and what failed.

    `measured`: systems, also those that lack a set: they have no average. `found`: of the systems that have all sets.
    """
    records = {
        system.name: {label: summarise(rows, threshold=system.threshold) for label, rows in system.scored.items()}
        for system in measured
    }
    ranked = {}
    rows: dict[str, list[Any]]
    for metric, title in METRICS.items():
        rows = {name: [by_set.get(label, {}).get(metric) for label in sets] for name, by_set in records.items()}
        ranked[title] = _bold({name: [*row, None if None in row else mean(row)] for name, row in rows.items()})
    about = {"measured": measured, "ranked": ranked, "metrics": METRICS, "found": found, "failures": failures}
    return render("tables.md", name=name, sets=list(sets), ablations=ablations, **about)


def render(name: str, /, **about: Any) -> str:
    """A page of ``templates/``, where names stand in tables and numbers become words."""
    return str(template(__package__, name, cell=cell, points=points, interval=interval, sure=sure).render(about))


def cell(name: str) -> str:
    """A name in a table."""
    return name.replace("|", r"\|")


def sure(estimate: Estimate) -> str:
    """A difference; bold where its interval leaves zero out."""
    text = interval(estimate, "+.1f")
    return f"**{text}**" if (estimate.low or 0) > 0 or (estimate.high or 0) < 0 else text


def interval(estimate: Estimate, form: str = ".1f") -> str:
    """A mean and, in brackets, its interval, in points of 100."""
    mean, low, high = (f"{100 * (value or 0):{form}}" for value in (estimate.mean, estimate.low, estimate.high))
    return mean if estimate.low is None else f"{mean} [{low}, {high}]"


def points(value: float) -> str:
    """A share of 1 in points of 100."""
    return f"{100 * value:.1f}"


def _bold(rows: Mapping[str, Sequence[float | None]]) -> dict[str, list[str]]:
    """A row a name; the best of a column and its ties are bold."""
    columns = zip(*rows.values(), strict=True)
    best = [max((value for value in column if value is not None), default=0.0) for column in columns]

    def shown(value: float | None, top: float) -> str:
        if value is None:
            return "–"
        return f"**{points(value)}**" if value >= top - TIE - 1e-9 else points(value)

    return {name: list(map(shown, values, best)) for name, values in rows.items()}
