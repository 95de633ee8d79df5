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
    comparison: Comparison | None,
    failures: Mapping[str, str] | None = None,
) -> str:
    """All tables that can be filled, and what failed.

    Args:
        name: Name of the configuration.
        sets: Names of the sets.
        measured: All systems. A system that lacks a set has no average.
        comparison: Compares the systems that have all sets.
        failures: Name of a set or system -> its error.
    """
    tables: dict[str, dict[str, list[Any]]] = {title: {} for title in TITLES.values()}
    for system in measured:
        summaries = {}
        for label, queries in system.scored.items():
            summaries[label] = _flat(summarise(queries, system.rule))
        for metric, title in TITLES.items():
            values: list[Any] = []
            for label in sets:
                values.append(summaries[label][metric] if label in summaries else None)
            average = None if None in values else fmean(values)
            tables[title][system.name] = [*values, average]
    own_means = {}
    set_means = {}
    if comparison is not None:
        for result in comparison.systems:
            own_f1 = []
            set_f1 = []
            for label, in_set in result.sets.items():
                queries = comparison.scored(label, in_set)
                own_f1.append(fmean(own_best(queries)))
                set_f1.append(fmean(set_best(queries)))
            own_means[result.name] = fmean(own_f1)
            set_means[result.name] = fmean(set_f1)
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
        "comparison": comparison,
        "failures": failures,
    }
    template = TEMPLATES.get_template("tables.md")
    return template.render(about, name=name, sets=list(sets))


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary that also has the measures of the rule in use."""
    return {**summary, **summary["rules"]["in_use"]}
