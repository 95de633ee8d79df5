"""The ``rsrank`` commands that measure: evaluate, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click import echo, option

from ..adapters.kinds import load as load_reranker
from ..adapters.kinds import parse
from ..backends.options import ModelSource
from ..errors import InputError
from ..evaluation.datasets import LabelledSets, read_sets, warn_of_reuse
from ..evaluation.evaluate import (
    lost_answers,
    score_dataset,
    shared_rule,
    summarise,
)
from ..evaluation.metrics import ScoredQuery, ranking_measures
from ..ranking import shadow
from ..ranking.rule import Limits, Rule, plain
from .arguments import (
    MODELS,
    PATH,
    ModelOptions,
    RuleOptions,
    command,
    json_option,
    print_json,
    print_table,
    printable,
    progress,
    show_waiting,
)

# Rows of a file's table: measures of `summarise`, and of the rule in use.
ROWS = {
    "queries": "queries",
    "answerable": "queries with an answer",
    "lost": "answers lost",
    "kept": "kept per query",
    "recall": "recall",
    "precision": "precision",
    "f1": "F1",
    "called_relevant": "called relevant without an answer",
    "kept_unanswerable": "kept without an answer",
    "ndcg@5": "nDCG@5 of all queries",
    "recall@5": "Recall@5 of all queries",
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
    help=f"{MODELS} May be repeated.",
)
@json_option
def evaluate(
    data: Sequence[Path],
    model: Sequence[str],
    options: ModelOptions,
    as_json: bool,
    rule_options: RuleOptions,
) -> None:
    """Measure on labelled passages what a rule keeps and how a model ranks.

    A line holds one query: `{"id", "query", "documents": [{"id", "text", "relevant", "title"?}]}`.
    The rule is the model's own. A system without a threshold of its own gets the best rule over all
    files, each counted the same.

    Answers lost: queries that have a relevant document, but keep no relevant one. Called relevant
    without an answer: queries without a relevant document of which a document scores above the
    threshold. In nDCG@5 and Recall@5, a query without a relevant document counts 0. The last table:
    other rules, such as the threshold alone, or the first five of the file.

    `rsrank evaluate --data examples/labelled.jsonl --json > metrics.json`

    `rsrank evaluate --data dev.jsonl.gz -m mini -m bm25`
    """
    # What is missing or wrong is an error before the work.
    ranking_measures([])
    limits: Any = dict(rule_options)
    Rule(0.0).with_limits(limits)
    model = list(dict.fromkeys(model))
    for name in model:
        parse(name)
    sets = read_sets(data)
    records: list[dict[str, Any]] = []
    pooled: dict[str, tuple[Rule, list[ScoredQuery]]] = {}
    for name in model:
        rule, scored = _measure(options.source(name), sets, limits)
        for title, queries in scored.items():
            record = {
                "model": name,
                "dataset": title,
                "rule": asdict(rule),
                **summarise(queries, rule),
                "lost_answers": lost_answers(sets[title], queries, rule),
            }
            records.append(record)
        pooled[name] = rule, [query for queries in scored.values() for query in queries]
    if as_json:
        print_json(records)
        return
    for title in sets:
        print_file(title, [one for one in records if one["dataset"] == title])
    for name, (rule, queries) in pooled.items():
        print_rules(name, queries, rule)


def _measure(
    source: ModelSource, sets: LabelledSets, limits: Limits
) -> tuple[Rule, dict[str, list[ScoredQuery]]]:
    """A system's rule, which is its own with the limits or the best over all files, and scores."""
    name = source.name
    show_waiting(f"Loading {name} ...")
    system = load_reranker(source)
    warn_of_reuse(name, system.labelled_data, sets)
    scored = {}
    for title, queries in sets.items():
        scored[title] = score_dataset(system, progress(queries, f"{name}, {title}"))
    rule = system.native_rule.with_limits(limits)
    origin = "its own"
    if rule != system.native_rule or limits["threshold"] is None:
        origin = "given"
    elif rule.threshold is None:
        rule = shared_rule(list(scored.values()))
        origin = "the best over all files, counted alike; this system has no native threshold"
    echo(f"{name}: {rule}: {origin}.", err=True)
    return rule, scored


def print_rules(name: str, scored: Sequence[ScoredQuery], rule: Rule) -> None:
    """Print what the rule in use and its alternatives keep of all queries."""
    summary = summarise(scored, rule)
    answerable = summary["answerable"]
    unanswerable = summary["queries"] - answerable
    rows = []
    for result in summary["rules"].values():
        cells = [plain(result[key]) for key in ("kept", "recall", "f1")]
        called_relevant = f"{result['called_relevant']} of {unanswerable}"
        lost = f"{result['lost']} of {answerable}"
        rows.append((result["rule"], lost, *cells, called_relevant))
    title = f"{name}: the rule in use and what could stand instead, over all queries"
    heading = (
        "rule",
        "answers lost",
        "kept per query",
        "recall",
        "F1",
        "called relevant w/o answer",
    )
    print_table(title, heading, rows)


def print_file(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each metric of a file, a column for each record, and lost answers' ids."""
    names = [record["model"] for record in records]
    columns = [{**record, **record["rules"]["in_use"]} for record in records]
    rows = [(name, *[plain(column[key]) for column in columns]) for key, name in ROWS.items()]
    print_table(title, ("", *names), rows)
    for record in records:
        if record["lost_answers"]:
            ids = ", ".join(record["lost_answers"])
            echo(printable(f"{record['model']} loses the answers of: {ids}"))


COMMANDS = (report, evaluate)
