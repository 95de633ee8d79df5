"""The ``rsrank`` commands that measure: evaluate, report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text
from typer import Option

from ..adapters.systems import forms, parse
from ..adapters.systems import load as load_reranker
from ..errors import InputError
from ..language_model.options import LoadOptions, ModelSource
from .options import AsJson, Revision, command, problems, screen

if TYPE_CHECKING:
    from ..evaluation.comparison import Measured
    from ..evaluation.metrics import ScoredQuery
    from ..reranker import Reranker

app = typer.Typer()

Systems = Annotated[
    list[str],
    Option(
        "--model",
        "-m",
        help=f"Built-in name, artifact folder or Hub id; or {forms()}. May be repeated.",
    ),
]
# Columns of the tables by the metric's name. Each table fits into 80 columns.
KEPT = {
    "queries": "queries",
    "precision@tau": "precision",
    "recall@tau": "recall",
    "f1@tau": "F1",
    "kept_per_query": "kept a\nquery",
    "left_with_nothing": "answers\nlost",
}

EMPTY = {
    "empty": "empty\nlists",
    "unanswered": "without\nan answer",
    "false_keeps": "false\nkeeps",
    "auroc": "AUROC",
    "false_accepts@90": "false\naccepts",
}

RANKED = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@best": "best F1\nof the set",
    "tau_best": "at the\nthreshold",
    "f1@query_best": "best F1 of\neach query",
}


@command(app)
def report(
    log: Annotated[Path, typer.Argument(help="Log of calls or requests in shadow mode.")],
) -> None:
    """Say what dropping would have done, from a log of shadow mode."""
    from ..passages.shadow import NEAR
    from ..passages.shadow import report as add_up

    with log.open(encoding="utf-8", errors="replace") as lines:
        totals = add_up(lines)
    if not totals["calls"]:
        raise InputError(f"{log} holds no line of shadow mode. Log rsrank_rag.shadow at INFO.")
    screen.print(
        f"{totals['calls']:,} calls, {totals['none_relevant']:,} with nothing relevant\n"
        f"{totals['documents']:,} documents, {totals['dropped']:.1%} would have been dropped\n"
        f"about {totals['tokens_saved']:,} tokens would have been saved\n"
        f"{totals['near']:.1%} of the scores are within {NEAR:g} of the threshold"
    )


@command(app)
def evaluate(
    data: Annotated[list[Path], Option("--data", help="Labelled .jsonl(.gz). May be repeated.")],
    load: LoadOptions,
    model: Systems = ["mini"],  # noqa: B006 - typer copies it
    revision: Revision = None,
    as_json: AsJson = False,
    report: Annotated[
        Path | None, Option(help="Folder for a page with tables, figures and worst queries.")
    ] = None,
    threshold: Annotated[
        str, Option(help="For f1@tau: a number, native or shared (see above).")
    ] = "native",
    titles: Annotated[bool, Option(help="Put a document's title in front of its text.")] = True,
    limit: Annotated[int | None, Option(min=1, help="Only the first queries of each file.")] = None,
) -> None:
    """Measure on labelled passages what a threshold keeps and how a model ranks.

    A line holds one query: `{"id", "query", "documents": [{"id", "text", "relevant", "title"?}]}`.
    The `--threshold` is a number, 'native' for the system's own (0 for RSRank), or 'shared' for the
    best single one over all files. A system without a native one gets the shared one.

    Answers lost: queries with a relevant document of which no relevant one is kept. Empty lists:
    queries of which nothing is kept. False keeps: documents kept of a query without a relevant one.
    AUROC: of the best score, lists with against lists without a relevant passage (also lists whose
    relevant ones were taken out). False accepts: share of the latter at 90% recall of the former.
    Instead: what other rules would keep, such as the three best, or the first three of the file.

    `rsrank evaluate --data examples/labelled.jsonl --json > metrics.json`

    `rsrank evaluate --data dev.jsonl.gz --model mini --model bm25 --report report`
    """
    from ..evaluation.comparison import Measured
    from ..evaluation.datasets import read_sets
    from ..evaluation.evaluate import score_dataset
    from ..evaluation.metrics import ranking_metrics
    from ..evaluation.report import check_report, write_report

    # What is missing is an error before the work.
    ranking_metrics([])
    if report is not None:
        check_report(report)
    model = list(dict.fromkeys(model))
    if threshold not in ("native", "shared"):
        _number(threshold)
    for name in model:
        parse(name)
    sets = {name: queries[:limit] for name, queries in read_sets(data).items()}
    measured = []
    for name in model:
        with problems.status(f"Loading {name} ..."):
            system = load_reranker(ModelSource(name, revision, load))
        scored = {}
        for title, queries in sets.items():
            shown = track(queries, f"{name}, {title}", console=problems, transient=True)
            scored[title] = score_dataset(system, shown, titles=titles)
        tau, origin = _threshold(threshold, system, list(scored.values()))
        measured.append(Measured(name, tau, origin, scored))
    records = [record for one in measured for record in _records(one)]
    if report is not None:
        with problems.status("Writing the report ..."):
            write_report(report, measured, sets, titles=titles)
        problems.print(f"Report: {report / 'index.html'}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(records, ensure_ascii=False, indent=2))
        return
    for one in measured:
        _print_tables(one, [record for record in records if record["model"] == one.name])


def _records(system: Measured) -> Iterator[dict[str, Any]]:
    from ..evaluation.evaluate import summarise

    for title, queries in system.scored.items():
        summary = summarise(queries, threshold=system.threshold)
        yield {"model": system.name, "dataset": title, **summary}


def _threshold(
    choice: str, system: Reranker, sets: Sequence[Sequence[ScoredQuery]]
) -> tuple[float, str]:
    """The threshold in use, and where it comes from."""
    from ..evaluation.evaluate import shared_threshold

    if choice not in ("native", "shared"):
        return _number(choice), "given"
    if choice == "shared":
        return shared_threshold(sets), "the best over all files"
    if system.threshold is not None:
        return system.threshold, "native"
    origin = "the best over all files; this system has no native threshold"
    return shared_threshold(sets), origin


def _print_tables(system: Measured, records: Sequence[Mapping[str, Any]]) -> None:
    from ..evaluation.evaluate import recommend

    rule = f"kept above {cell('tau_best', system.threshold)} ({system.origin})"
    screen.print(*evaluation_tables(system.name, rule, records), sep="\n")
    pooled = [query for queries in system.scored.values() for query in queries]
    screen.print(rules_table(system.name, pooled, system.threshold))
    screen.print(recommend(pooled, threshold=system.threshold))


def rules_table(name: str, scored: Sequence[ScoredQuery], threshold: float) -> Table:
    """What the threshold and its alternatives keep, over all queries of all sets."""
    from ..evaluation.evaluate import describe_rule
    from ..evaluation.metrics import apply_rule, rules

    title = Text(f"{name}: the threshold and what could stand instead, over all queries")
    table = Table("rule", title=title, title_justify="left")
    for heading in ("F1", "answers lost", "kept a query"):
        table.add_column(heading, justify="right")
    answerable = sum(any(query.relevant) for query in scored)
    for rule in rules(threshold).values():
        result = apply_rule(scored, rule)
        table.add_row(
            describe_rule(rule),
            f"{result.f1:.3f}",
            f"{result.left_with_nothing} of {answerable}",
            f"{result.kept_per_query:.1f}",
        )
    return table


def evaluation_tables(
    name: str, rule: str, records: Sequence[Mapping[str, Any]]
) -> Iterator[Table]:
    """A model's three tables, which have a row for each dataset.

    The first shows what the model keeps, the second compares lists with and without an answer, and
    the third shows how the model ranks.

    Args:
        name: The model's name, for the titles.
        rule: What is kept, in words; the title of the first table.
        records: A summary of each dataset, see `evaluation.evaluate.summarise`.
    """
    ranking = "ranking"
    unanswered = sum(record["unanswered"] for record in records)
    if unanswered:
        ranking += f" ({unanswered} queries without a relevant document count 0)"
    columns_by_title = {
        rule: KEPT,
        "lists with and without an answer": EMPTY,
        f"{ranking}, and thresholds chosen on these very labels": RANKED,
    }
    for title, columns in columns_by_title.items():
        title_text = Text(f"{name}: {title}", overflow="fold")
        table = Table(title=title_text, title_justify="left", padding=(0, 0, 0, 1))
        # A path may be longer than all else; the numbers stay whole.
        table.add_column("dataset", overflow="fold")
        for heading in columns.values():
            table.add_column(heading, justify="right", overflow="fold")
        for record in records:
            cells = [cell(key, record[key]) for key in columns]
            table.add_row(Text(record["dataset"]), *cells)
        yield table


def cell(key: str, value: float | None) -> str:
    """A number as people write it.

    >>> cell("tau_best", -5e-324), cell("queries", 4.0), cell("empty", 0.125), cell("f1@0", 0.5)
    ('0', '4', '12%', '0.500')
    """
    if value is None:
        return "-"
    if key in ("queries", "unanswered", "tau_best", "left_with_nothing"):
        return f"{round(value, 3) + 0.0:g}"
    if key in ("empty", "false_accepts@90"):
        return f"{value:.0%}"
    if key in ("kept_per_query", "false_keeps"):
        return f"{value:.1f}"
    return f"{value:.3f}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--threshold must be a number, 'native' or 'shared', got {text!r}."
        ) from None
