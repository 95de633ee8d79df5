"""The paper's tables as Markdown (``templates/``)."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import jinja2

from rsrank_rag.evaluation.evaluate import summarise

from ..comparison import Comparison, Measured
from .thresholds import own_best, paired_t_test, set_best, threshold_of, threshold_stability

TITLES = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1": "F1@τ"}
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("research.reproduction", "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(
    name: str,
    sets: Sequence[str],
    measured: Sequence[Measured],
    found: Comparison | None,
    failures: Mapping[str, str] | None = None,
) -> str:
    """All tables that can be filled, and what failed.

    `measured`: systems, also those that lack a set: they have no average. `found`: of the systems
    that have all sets.
    """
    records = {
        system.name: {
            label: _flat(summarise(rows, system.rule)) for label, rows in system.scored.items()
        }
        for system in measured
    }
    tables = {}
    rows: dict[str, list[Any]]
    for metric, title in TITLES.items():
        rows = {
            name: [by_set.get(label, {}).get(metric) for label in sets]
            for name, by_set in records.items()
        }
        tables[title] = {
            name: [*row, None if None in row else fmean(row)] for name, row in rows.items()
        }
    own_means = {}
    set_means = {}
    if found is not None:
        for result in found.systems:
            by_set = [fmean(own_best(found, label, row)) for label, row in result.sets.items()]
            own_means[result.name] = fmean(by_set)
            by_set = [fmean(set_best(found, label, row)) for label, row in result.sets.items()]
            set_means[result.name] = fmean(by_set)
    stabilities = {}
    for system in measured:
        if set(system.scored) == set(sets):
            stabilities[system.name] = threshold_stability(system.scored, threshold_of(system))
    about = {
        "measured": measured,
        "stabilities": stabilities,
        "t_test": paired_t_test,
        "own_best": own_best,
        "set_best": set_best,
        "threshold_of": threshold_of,
        "mean": fmean,
        "own_means": own_means,
        "set_means": set_means,
        "tables": tables,
        "metrics": TITLES,
        "found": found,
        "failures": failures,
    }
    template = TEMPLATES.get_template("tables.md")
    return template.render(about, name=name, sets=list(sets))


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary with the measures of the rule in use beside the others."""
    return {**summary, **summary["rules"]["in_use"]}
