"""The ``rsrank`` commands that measure: evaluate, report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click import echo, option

from ..adapters.systems import forms, parse
from ..adapters.systems import load as load_reranker
from ..errors import InputError
from ..evaluation.comparison import Measured
from ..evaluation.datasets import LabelledSets, read_sets, warn_of_reuse
from ..evaluation.evaluate import recommend, score_dataset, shared_threshold, summarise
from ..evaluation.metrics import ScoredQuery, apply_rule, ranking_measures, rules
from ..evaluation.report import check_report, write_report
from ..language_model.options import LoadOptions, ModelSource
from ..passages import shadow
from ..passages.rule import Rule, plain
from .options import (
    PATH,
    command,
    json_option,
    print_json,
    print_table,
    printable,
    progress,
    revision_option,
    show_waiting,
)

# Rows of a file's table, by the metric's name.
ROWS = {
    "threshold": "threshold in use",
    "queries": "queries",
    "precision@tau": "precision above threshold",
    "recall@tau": "recall above threshold",
    "f1@tau": "F1 above threshold",
    "kept_per_query": "kept per query",
    "empty": "share of empty lists",
    "answerable": "queries with an answer",
    "left_with_nothing": "answers lost",
    "false_keeps": "kept without an answer",
    "auroc": "AUROC of the best score",
    "false_accepts@90": "false accepts at 90%",
    "ndcg@5": "nDCG@5 of all queries",
    "recall@5": "Recall@5 of all queries",
    "f1@best": "best F1 of the file",
    "tau_best": "at about this threshold",
}


@command()
@click.argument("log", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option("--calls", "list_calls", is_flag=True, help="List the calls first, one a line.")
def report(log: Path, list_calls: bool) -> None:
    """Say how much shadow mode would have dropped: calls, documents and tokens of a log.

    LOG is a log of calls or requests in shadow mode. The line of a call has its request id, its
    query, and the documents that would have been dropped: id or [position], and score.
    """
    with log.open(encoding="utf-8", errors="replace") as lines:
        calls = shadow.read(lines)
    if list_calls:
        for call in calls:
            echo(printable(str(call)))
    totals = shadow.report(calls)
    if not totals["calls"]:
        raise InputError(f"{log} holds no line of shadow mode. Log rsrank_rag.shadow at INFO.")
    echo(
        f"{totals['calls']:,} calls, {totals['with_threshold']:,} with a threshold\n"
        f"{totals['documents']:,} documents, {totals['dropped']:.1%} would have been dropped\n"
        f"about {totals['tokens_saved']:,} tokens would have been saved"
    )
    if totals["with_threshold"]:
        echo(f"{totals['none_relevant']:,} calls with nothing above the threshold")


@command()
@option(
    "--data", type=PATH, multiple=True, required=True, help="Labelled .jsonl(.gz). May be repeated."
)
@option(
    "--model",
    "-m",
    multiple=True,
    default=["mini"],
    help=f"Artifact, file of tune, or {forms()}. May be repeated.",
)
@revision_option
@json_option
@option("--report", type=PATH, help="Folder for a page with tables, figures and worst queries.")
@option("--threshold", type=float, help="Instead of the system's own.")
def evaluate(
    data: Sequence[Path],
    load: LoadOptions,
    model: Sequence[str],
    revision: str | None,
    as_json: bool,
    report: Path | None,
    threshold: float | None,
) -> None:
    """Measure on labelled passages what a threshold keeps and how a model ranks.

    A line holds one query: `{"id", "query", "documents": [{"id", "text", "relevant", "title"?}]}`.
    A system without a threshold of its own gets the one with the best F1 over all files, each
    counted the same.

    Empty lists: queries that keep no document. Answers lost: queries that have a relevant document,
    but keep no relevant one. Kept without an answer: documents kept by a query without a relevant
    one. AUROC: how well the best score separates lists with a relevant document from lists without
    one (also lists whose relevant documents were removed). False accepts: share of the lists
    without a relevant document whose best score reaches the score that at least 90% of the other
    lists reach. In nDCG@5 and Recall@5, a query without a relevant document counts 0. The last
    table: other rules, such as the three best, or the first three of the file.

    `rsrank evaluate --data examples/labelled.jsonl --json > metrics.json`

    `rsrank evaluate --data dev.jsonl.gz -m mini -m bm25 --report report`
    """
    # What is missing is an error before the work.
    ranking_measures([])
    if threshold is not None and not math.isfinite(threshold):
        raise InputError(f"--threshold {threshold} is no finite number.")
    if report is not None:
        check_report(report)
    model = list(dict.fromkeys(model))
    for name in model:
        parse(name)
    sets = read_sets(data)
    measured = [_measure(ModelSource(name, revision, load), sets, threshold) for name in model]
    records: list[dict[str, Any]] = []
    for one in measured:
        for title, queries in one.scored.items():
            record = {
                "model": one.name,
                "dataset": title,
                "threshold": one.threshold,
                **summarise(queries, threshold=one.threshold),
                "recommendation": recommend(queries, threshold=one.threshold),
            }
            records.append(record)
    if as_json:
        print_json(records)
    else:
        for title in sets:
            print_file(title, [one for one in records if one["dataset"] == title])
        for one in measured:
            pooled = [query for queries in one.scored.values() for query in queries]
            print_rules(one.name, pooled, one.threshold)
            echo(recommend(pooled, threshold=one.threshold))
    # Last, so that a full disk does not lose the figures.
    if report is not None:
        write_report(report, measured, sets)
        echo(f"Report: {report / 'index.html'}", err=True)


def _measure(source: ModelSource, sets: LabelledSets, threshold: float | None) -> Measured:
    """A system's scores, and the threshold: as given, its own, or the best over all files."""
    name = source.name
    show_waiting(f"Loading {name} ...")
    system = load_reranker(source)
    reused = warn_of_reuse(name, system.labelled_data, sets)
    scored = {}
    for title, queries in sets.items():
        scored[title] = score_dataset(system, progress(queries, f"{name}, {title}"))
    origin = "given"
    if threshold is None:
        threshold = system.threshold
        origin = "its own"
    if threshold is None:
        threshold = shared_threshold(list(scored.values()))
        origin = "the best over all files, counted alike; this system has no native threshold"
        echo(f"{name}: threshold {plain(threshold)} (rounded): {origin}.", err=True)
    return Measured(name, threshold, origin, scored, reused)


def print_rules(name: str, scored: Sequence[ScoredQuery], threshold: float) -> None:
    """Print what the threshold and its alternatives keep, over all queries of all sets."""
    rows = []
    answerable = sum(any(query.relevant) for query in scored)
    for rule in rules(Rule(threshold)).values():
        result = apply_rule(scored, rule)
        lost = f"{result.left_with_nothing} of {answerable}"
        rows.append((str(rule), plain(result.f1), lost, plain(result.kept_per_query)))
    title = f"{name}: the threshold and what could stand instead, over all queries"
    print_table(title, ("rule", "F1", "answers lost", "kept per query"), rows)


def print_file(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each metric of a file, and a column for each record of `summarise`."""
    names = [record["model"] for record in records]
    rows = [(name, *[plain(record[key]) for record in records]) for key, name in ROWS.items()]
    print_table(title, ("", *names), rows)


COMMANDS = (report, evaluate)
