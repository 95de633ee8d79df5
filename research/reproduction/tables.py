"""The paper's tables and the ablations with their differences, as Markdown (``templates/``)."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import jinja2
import numpy as np

from rsrank_rag.evaluation.evaluate import summarise
from rsrank_rag.evaluation.statistics import Estimate, Record, estimate_mean

from ..comparison import Comparison, Measured
from .ablations import BASE, AblationOnSet, AblationRow
from .thresholds import own_best, paired_t_test, set_best, threshold_of, threshold_stability

TITLES = {"ndcg@5": "nDCG@5", "recall@5": "Recall@5", "f1": "F1@τ"}
METRICS = {
    "recall@5": "R@5",
    "ndcg@5": "nDCG@5",
    "p@5": "P@5",
    "f1@5": "F1@5",
    "f1@0": "F1@0",
    "f1@best": "F1@best",
}
COMPARED = ("ndcg@5", "f1@0")
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
    ablations: str = "",
    failures: Mapping[str, str] | None = None,
) -> str:
    """All tables of systems that can be filled, those of ablations, and what failed.

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
    return template.render(about, name=name, sets=list(sets), ablations=ablations)


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary with the measures of the rule in use beside the others."""
    return {**summary, **summary["rules"]["in_use"]}


class AblationFigures(AblationOnSet):
    """One with all its seeds."""

    setup: str  # what B was trained on, in words
    queries: int
    seeds: int
    metrics: dict[
        str, Estimate
    ]  # mean over queries of the mean over seeds, with its interval over queries
    spread: dict[str, float]  # standard deviation of the seeds' means; 0 for one seed
    differences: dict[
        str, Estimate
    ]  # paired, from the unchanged recipe; empty where there is none, or it is that
    tau_best: float

    @property
    def has_zero(self) -> bool:
        """Whether a score of zero means anything: not for a yardstick that is no B."""
        return self.group != "yardstick" or bool(self.parameters)


class FigureFile(Record):
    """``ablations.json``: what tables are made from."""

    figures: tuple[AblationFigures, ...]


def figures_of(rows: Sequence[AblationRow], setup: str = "") -> list[AblationFigures]:
    """Rows of one recipe with their seeds joined, set by set in the order they came in."""
    groups: dict[tuple[str, str], list[AblationRow]] = {}
    sets = list(dict.fromkeys(row.dataset for row in rows))
    for row in sorted(rows, key=lambda row: sets.index(row.dataset)):
        groups.setdefault((row.dataset, row.name), []).append(row)
    means: dict[tuple[str, str], dict[str, list[float]]] = {
        key: {
            metric: np.mean([row.metrics[metric] for row in found], axis=0).tolist()
            for metric in METRICS
        }
        for key, found in groups.items()
    }
    made = []
    for (dataset, name), found in groups.items():
        base = means.get((dataset, BASE)) if name != BASE else None
        values = means[dataset, name]
        by_seed = {metric: [fmean(row.metrics[metric]) for row in found] for metric in METRICS}
        differences = {m: np.subtract(values[m], base[m]) for m in COMPARED} if base else {}
        made.append(
            AblationFigures(
                **found[0].model_dump(include=set(AblationOnSet.model_fields)),
                setup=setup,
                queries=len(values["f1@0"]),
                seeds=len(found),
                metrics={metric: estimate_mean(numbers) for metric, numbers in values.items()},
                spread={
                    metric: float(np.std(seeds, ddof=len(found) > 1))
                    for metric, seeds in by_seed.items()
                },
                differences={
                    metric: estimate_mean(numbers) for metric, numbers in differences.items()
                },
                tau_best=fmean(row.tau_best for row in found),
            )
        )
    return made


def ablation_tables(figures: Sequence[AblationFigures]) -> str:
    """One table a set and recipe: each change beside the unchanged recipe, with paired differences.

    ± is the standard deviation over seeds; yardsticks that no zero belongs to have no F1 there.
    """
    tables = list(dict.fromkeys((row.dataset, row.setup) for row in figures))
    about = {"tables": tables, "figures": figures, "metrics": METRICS, "compared": COMPARED}
    return TEMPLATES.get_template("ablations.md").render(about)
