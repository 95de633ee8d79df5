"""The report of ``rsrank evaluate --report``: an HTML page with its figures, and the numbers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import required
from ..partial_files import write_text
from ..ranking.rule import BLANK_SCORE, best_first
from . import plots
from .comparison import METRICS, Comparison, Measured, QueryResult, compare
from .datasets import LabelledSets
from .evaluate import recommend, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORST = 5  # queries shown of each set and system
TEXT_LENGTH = 400  # characters of a document that are shown


def check_report(folder: Path) -> None:
    """Make the report's folder, and check before the work that a report can be written.

    Raises:
        OSError: The folder cannot be made.
        MissingDependencyError: A library that the report needs is not installed.
    """
    plots.style()
    template(__package__, "report.html")
    folder.mkdir(parents=True, exist_ok=True)


def write_report(folder: Path, systems: Sequence[Measured], sets: LabelledSets) -> Comparison:
    """Compare systems and write ``index.html`` and ``report.json``.

    Args:
        folder: Where to write; it is made if it is not there.
        systems: The systems' scores.
        sets: The labelled queries that were scored.

    Returns:
        What report.json holds.

    Raises:
        MissingDependencyError: ir-measures, matplotlib or jinja2 is not installed.
    """
    comparison = compare(systems, sets)
    write_text(folder / "report.json", comparison.model_dump_json(indent=1) + "\n")
    write_text(folder / "index.html", page(comparison, systems, sets))
    return comparison


def figure_of(system: Measured) -> Figure:
    """The scores of relevant and of irrelevant documents, without blank ones, by set."""
    panels = {}
    for name, queries in system.scored.items():
        scores = np.concatenate([query.scores for query in queries])
        relevant = np.concatenate([query.relevant for query in queries]).astype(bool)
        shown = scores != BLANK_SCORE
        panels[name] = scores[shown & relevant], scores[shown & ~relevant]
    return plots.score_histograms(panels, system.rule.threshold)


def page(comparison: Comparison, systems: Sequence[Measured], sets: LabelledSets) -> str:
    """The report as one HTML page that contains its figures. jinja2 escapes every text."""
    figures = {}
    for system in systems:
        png = plots.png(figure_of(system))
        caption = f"{system.name}: scores of relevant and of irrelevant documents."
        figures[caption] = base64.b64encode(png).decode()
    text: str = template(__package__, "report.html").render(
        comparison=comparison,
        systems=systems,
        metrics=METRICS,
        sets=sets,
        figures=figures,
        text_length=TEXT_LENGTH,
        best_first=best_first,
        recommend=recommend,
        summarise=summarise,
        worst_queries=worst_queries,
    )
    return text


def worst_queries(queries: Sequence[QueryResult]) -> list[int]:
    """Numbers of the queries with the lowest F1 by the rule in use, if that is below 1.

    Of equal queries the first are taken.
    """
    rows = sorted(range(len(queries)), key=lambda row: queries[row].metrics["f1"])
    return [row for row in rows[:WORST] if queries[row].metrics["f1"] < 1]


def template(package: str | None, name: str) -> Any:
    """A page of a package's ``templates/``; what is put into HTML is escaped."""
    jinja2 = required("jinja2", "The report needs jinja2.", "eval,plots")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
