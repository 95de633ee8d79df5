"""The report of ``rsrank evaluate --report``: one HTML page that needs nothing else, the figures, and the numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, required
from ..partial_files import write_text
from ..reranker import BLANK_SCORE
from . import plots
from .comparison import METRICS, Comparison, Measured, QueryLabels, QueryResult, compare
from .datasets import LabelledQuery
from .evaluate import describe_rule, recommend
from .metrics import (
    ScoredQuery,
    apply_rule,
    auroc,
    best_first,
    best_scores,
    false_accepts,
    ranking_metrics,
    rules,
)
from .statistics import scipy_stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORST = 3  # queries shown of each set and system for each of the two reasons
TEXT_LENGTH = 400  # characters of a document that are shown
NAME_LENGTH = 32  # characters of a system's name in figures; captions have all of it


@dataclass(frozen=True)
class Picture:
    """A figure on the page."""

    section: str  # where it stands: "thresholds", "gaps" or "scores"
    name: str
    caption: str  # what it shows; also its text for those who cannot see it
    figure: Figure


def check_report(folder: str | Path) -> None:
    """Raise before the work what would keep the report from being written after it."""
    ranking_metrics([])
    scipy_stats()
    plots.load_matplotlib()
    template(__package__, "report.html")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The report's folder {folder} cannot be made: {error}") from error


def write_report(
    folder: str | Path,
    systems: Sequence[Measured],
    sets: Mapping[str, Sequence[LabelledQuery]],
    *,
    titles: bool = True,
) -> Comparison:
    """Compare systems and write ``index.html``, ``report.json`` and ``figures/*.png``.

    `folder`: made if need be. `sets`: the labelled queries that were scored. `titles`: show a document's title, if it
    has one, in front of its text, as it was scored. Gives what report.json holds; needs ir-measures, scipy, matplotlib
    and jinja2.
    """
    found, folder = compare(systems, sets), Path(folder)
    write_text(folder / "report.json", found.model_dump_json(indent=1) + "\n")
    drawn = [(x, plots.save(x.figure, folder / "figures" / x.name)) for x in figures_of(found)]
    write_text(folder / "index.html", page(found, sets, drawn, titles=titles))
    return found


def figures_of(found: Comparison) -> Iterator[Picture]:
    """All figures."""
    systems = found.systems
    short = short_names([system.name for system in systems])
    for number, system in enumerate(systems):
        results = system.sets.items()
        ranges = {name: result.score_range for name, result in results}
        best = {name: result.tau_best_normalised for name, result in results}
        title = f"{short[system.name]}: bias {system.bias:.3f}, variance {system.variance:.4f}"
        threshold, label = system.threshold_normalised, system.threshold_kind
        figure = plots.score_ranges(ranges, best, threshold, label=label, title=title)
        caption = "the range of scores of each set and the threshold with the highest mean F1, normalised."
        yield Picture("thresholds", f"score-range-{number}", f"{system.name}: {caption}", figure)
    gaps = {
        s: {short[x.name]: [q.gap for q in x.sets[s].queries] for x in systems}
        for s in found.labels
    }
    caption = "Share of queries whose F1 at the set's best threshold falls short of their own best by more than x."
    yield Picture("gaps", "f1-gap", caption, plots.f1_gap_curves(gaps))
    for number, system in enumerate(systems):
        scores = {
            s: _by_label(labels, system.sets[s].queries) for s, labels in found.labels.items()
        }
        figure = plots.score_histograms(scores, system.threshold, title=short[system.name])
        caption = f"{system.name}: scores of relevant and of irrelevant documents."
        yield Picture("scores", f"scores-{number}", caption, figure)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What figures have room for: of a long name, such as a folder's path, its end, as much as tells it from others."""
    found = {
        name: name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}" for name in names
    }
    return found if len(set(found.values())) == len(found) else dict(zip(names, names, strict=True))


def _by_label(
    labels: Sequence[QueryLabels], queries: Sequence[QueryResult]
) -> tuple[list[float], list[float]]:
    """Scores of the relevant, and of the irrelevant documents; blank ones have none that could be drawn."""
    pairs = [
        pair
        for x, y in zip(queries, labels, strict=True)
        for pair in zip(x.scores, y.relevant, strict=True)
    ]
    drawn = [(score, relevant) for score, relevant in pairs if score != BLANK_SCORE]
    return [score for score, relevant in drawn if relevant], [
        score for score, relevant in drawn if not relevant
    ]


def page(
    found: Comparison,
    sets: Mapping[str, Sequence[LabelledQuery]],
    drawn: Sequence[tuple[Picture, Path]] = (),
    *,
    titles: bool = True,
) -> str:
    """The report as one HTML page with its figures inside; every text from elsewhere is escaped (jinja2)."""
    pictures = [(picture, base64.b64encode(png.read_bytes()).decode()) for picture, png in drawn]
    about = {
        "metrics": METRICS,
        "sets": sets,
        "pictures": pictures,
        "titles": titles,
        "text_length": TEXT_LENGTH,
        "rule_tables": rule_tables(found),
    }
    functions = {"worst_queries": worst_queries, "best_first": best_first}
    return str(template(__package__, "report.html").render(about, found=found, **functions))


def rule_tables(found: Comparison) -> list[dict[str, Any]]:
    """For each system and set: what the threshold and its alternatives keep, and a sentence."""
    tables = []
    for system in found.systems:
        for name, result in system.sets.items():
            scored = []
            for query, labels in zip(result.queries, found.labels[name], strict=True):
                scored.append(ScoredQuery(query.scores, labels.relevant))
            rows = []
            for rule in rules(system.threshold).values():
                rows.append((describe_rule(rule), apply_rule(scored, rule)))
            best = best_scores(scored)
            tables.append(
                {
                    "system": system.name,
                    "set": name,
                    "rows": rows,
                    "answerable": len(best[0]),
                    "advice": recommend(scored, threshold=system.threshold),
                    "auroc": auroc(*best),
                    "false_accepts": false_accepts(*best),
                }
            )
    return tables


def worst_queries(queries: Sequence[QueryResult], count: int = WORST) -> dict[int, str]:
    """Rows of the queries with the lowest F1 at the threshold, then of those with the largest gap, and the reason.

    Queries with a perfect F1, or without a gap, are not among them. Of equal ones the first are taken.
    """
    rows = range(len(queries))
    lowest = sorted(rows, key=lambda row: queries[row].metrics["f1@tau"])[:count]
    widest = sorted(rows, key=lambda row: -queries[row].gap)[:count]
    chosen = {
        row: "lowest F1 at the threshold" for row in lowest if queries[row].metrics["f1@tau"] < 1
    }
    for row in (row for row in widest if queries[row].gap > 1e-9):
        chosen[row] = f"{chosen[row]}, largest gap" if row in chosen else "largest gap"
    return chosen


def template(package: str | None, name: str) -> Any:
    """A page of a package's ``templates/``; what is put into HTML is escaped."""
    jinja2 = required("jinja2", "The report needs jinja2.", "eval,plots")
    loader, lines = (
        jinja2.PackageLoader(package, "templates"),
        {"trim_blocks": True, "lstrip_blocks": True},
    )
    made = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        **lines,
    )
    return made.get_template(name)
