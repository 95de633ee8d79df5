"""The report of ``rsrank evaluate --report``: one HTML page that needs nothing else, the figures, and the numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MissingDependencyError
from . import plots
from .comparison import METRICS, Comparison, Measured, QueryLabels, QueryResult, SystemResult, compare
from .datasets import LabelledQuery
from .metrics import ranking_metrics
from .statistics import scipy_stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORST = 3
"""Queries shown of each set and system for each of the two reasons."""

TEXT_LENGTH = 400
"""Characters of a document that are shown."""

NAME_LENGTH = 32
"""Characters of a system's name in figures; captions have all of it."""

TITLES = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@tau": "F1 at the threshold",
    "f1@best": "F1 at the set's best threshold",
    "f1@query_best": "F1 at each query's best threshold",
}


@dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Attributes:
        section: Where it stands: "thresholds", "gaps", "scores" or "shifts".
        caption: What it shows; also its text for those who cannot see it.
    """

    section: str
    name: str
    caption: str
    figure: Figure


def check_report(folder: str | Path) -> None:
    """Say before the work that the report could not be written after it.

    Raises:
        InputError: The folder cannot be made.
        MissingDependencyError: ir-measures, scipy, matplotlib or jinja2 is not installed.
    """
    ranking_metrics([])
    scipy_stats()
    plots.check()
    _template()
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
    pictures: Sequence[Picture] = (),
    seed: int = 0,
) -> Comparison:
    """Compare systems and write ``index.html``, ``report.json`` and ``figures/*.png``.

    Args:
        folder: Where to; made if need be.
        systems: Their scores.
        sets: The labelled queries that were scored.
        titles: Show a document's title, if it has one, in front of its text: as it was scored.
        pictures: More figures, such as shifts before and after B.
        seed: Of the confidence intervals.

    Returns:
        What report.json holds.

    Raises:
        InputError: The folder cannot be written.
        MissingDependencyError: ir-measures, scipy, matplotlib or jinja2 is not installed.
    """
    found = compare(systems, sets, seed=seed)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        drawn = [
            (picture, plots.save(picture.figure, folder / "figures" / picture.name))
            for picture in [*figures_of(found), *pictures]
        ]
        (folder / "index.html").write_text(page(found, sets, drawn, titles=titles), encoding="utf-8")
    except OSError as error:
        raise InputError(f"The report could not be written to {folder}: {error}") from error
    return found


def figures_of(found: Comparison) -> Iterator[Picture]:
    """All figures that need nothing but scores and labels."""
    systems = found.systems
    sets = list(found.labels)
    short = short_names([system.name for system in systems])
    for number, system in enumerate(systems):
        yield Picture(
            "thresholds",
            f"score-range-{number}",
            f"{system.name}: the range of scores of each set and the threshold with the highest mean F1, normalised "
            "over all sets.",
            plots.score_ranges(
                {name: result.score_range for name, result in system.sets.items()},
                {name: result.tau_best_normalised for name, result in system.sets.items()},
                system.threshold_normalised,
                label=system.threshold_kind,
                title=f"{short[system.name]}: bias {system.bias:.3f}, variance {system.variance:.4f}",
            ),
        )
    yield Picture(
        "gaps",
        "f1-gap",
        "Share of queries whose F1 at the set's best threshold falls short of their own best by more than x.",
        plots.f1_gap_curves(
            {s: {short[system.name]: [q.gap for q in system.sets[s].queries] for system in systems} for s in sets}
        ),
    )
    for number, system in enumerate(systems):
        yield Picture(
            "scores",
            f"scores-{number}",
            f"{system.name}: scores of relevant and of irrelevant documents.",
            plots.score_histograms(
                {s: _by_label(found.labels[s], system.sets[s].queries) for s in sets},
                system.threshold,
                title=short[system.name],
            ),
        )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """What figures have room for: of a long name, such as a folder's path, its end, as much as tells it from others."""
    found = {name: name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}" for name in names}
    return found if len(set(found.values())) == len(found) else dict(zip(names, names, strict=True))


def _by_label(labels: Sequence[QueryLabels], queries: Sequence[QueryResult]) -> tuple[list[float], list[float]]:
    """Scores of the relevant, and of the irrelevant documents."""
    pairs = [
        pair
        for label, query in zip(labels, queries, strict=True)
        for pair in zip(query.scores, label.relevant, strict=True)
    ]
    return [score for score, relevant in pairs if relevant], [score for score, relevant in pairs if not relevant]


def page(
    found: Comparison,
    sets: Mapping[str, Sequence[LabelledQuery]],
    drawn: Sequence[tuple[Picture, Path]] = (),
    *,
    titles: bool = True,
) -> str:
    """The report as one HTML page with its figures inside; every text from elsewhere is escaped (jinja2).

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    pictures: dict[str, list[dict[str, str]]] = {}
    for picture, svg in drawn:
        data = base64.b64encode(svg.read_bytes()).decode()
        pictures.setdefault(picture.section, []).append({"caption": picture.caption, "data": data})
    text: str = _template().render(
        found=found,
        metrics=METRICS,
        names=TITLES,
        sets=sets,
        pictures=pictures,
        worst=[
            (system, name, [_shown(sets[name][row], system, name, row, why, titles) for row, why in chosen.items()])
            for system in found.systems
            for name, chosen in ((name, worst_queries(system.sets[name].queries)) for name in sets)
        ],
    )
    return text


def worst_queries(queries: Sequence[QueryResult], count: int = WORST) -> dict[int, str]:
    """Rows of the queries with the lowest F1 at the threshold, then of those with the largest gap, and the reason.

    Queries with a perfect F1, or without a gap, are not among them. Of equal ones the first are taken.
    """
    rows = range(len(queries))
    lowest = sorted(rows, key=lambda row: queries[row].metrics["f1@tau"])[:count]
    widest = sorted(rows, key=lambda row: -queries[row].gap)[:count]
    chosen = {row: "lowest F1 at the threshold" for row in lowest if queries[row].metrics["f1@tau"] < 1}
    for row in widest:
        if queries[row].gap > 1e-9:
            chosen[row] = f"{chosen[row]}, largest gap" if row in chosen else "largest gap"
    return chosen


def _shown(
    query: LabelledQuery, system: SystemResult, name: str, row: int, reason: str, titles: bool
) -> dict[str, Any]:
    """A query with its documents, best first, as the page shows it."""
    result = system.sets[name].queries[row]
    order = sorted(range(len(result.scores)), key=lambda i: -result.scores[i])
    documents = [
        {
            "rank": rank,
            "id": query.documents[i].id,
            "text": _cut(query.documents[i].content(titles=titles)),
            "relevant": query.documents[i].relevant,
            "score": result.scores[i],
            "kept": result.scores[i] > system.threshold,
        }
        for rank, i in enumerate(order, start=1)
    ]
    kept = [document for document in documents if document["kept"]]
    return {"query": query, "reason": reason, "result": result, "kept": kept, "dropped": documents[len(kept) :]}


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 1]}…"


def _template() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingDependencyError("The report needs jinja2.", "eval,plots") from None
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
