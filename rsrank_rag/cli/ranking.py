"""The ``rsrank`` commands for one model: rank, index, explain, info, score."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click import echo, option

from ..adapters.kinds import load as load_reranker
from ..adapters.kinds import parse
from ..errors import InputError
from ..ranking.explanation import Explanation
from ..ranking.rule import Rule
from ..reading.parts import Extract
from ..texts import encodable
from .arguments import (
    PATH,
    ModelOptions,
    RuleOptions,
    command,
    documents_option,
    json_option,
    model_option,
    on_terminal,
    print_json,
    printable,
    progress,
    query_option,
    show_waiting,
)

if TYPE_CHECKING:
    from ..rsrank import RSRank


def _load(name: str, options: ModelOptions) -> RSRank:
    from ..rsrank import RSRank

    show_waiting(f"Loading {name} ...")
    return RSRank.from_pretrained(**options.source(name).model_dump())


def read_documents(source: str) -> list[Any]:
    """Documents of a file, or of standard input (``-``), one a line, as `Reranker.rank` takes them.

    Lines are plain text, or all of them are JSON objects with a "text", and perhaps with an "id", a
    "title" and other metadata.

    Raises:
        InputError: The file cannot be read, is empty, or a line has no "text".
    """
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--documents {source} could not be read: {error}. "
            "Give a text file in UTF-8 with one document a line, or - ."
        ) from error
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    # A pipe may be empty, as a retriever's result can be.
    if not lines and source != "-":
        raise InputError(f"--documents {source} holds no documents. Write one a line.")
    if not all(line.lstrip().startswith("{") for line in lines):
        return lines
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            documents.append({**row, "text": encodable(row["text"])})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f'--documents {source}, document {number}: expected JSON with a "text", '
                f"got {line[:60]!r}."
            ) from None
    return documents


@command()
@query_option
@documents_option
@model_option
@option("--top-n", type=int, help="Keep at most this many.")
@option(
    "--extract",
    type=click.Choice(get_args(Extract)),
    help="Keep only sentences that reach the rule's bar.",
)
@json_option
def rank(
    query: str,
    documents: str,
    model: str,
    options: ModelOptions,
    rule_options: RuleOptions,
    top_n: int | None,
    extract: Extract | None,
    as_json: bool,
) -> None:
    """Score documents for a query, keep the relevant ones, and drop the others.

    A line holds one document. If each line begins with {, the lines are read as JSON objects with
    a "text", and perhaps a "title" and an "id". The title is read on a line before the text, unless
    the text begins with it.

    `rsrank rank -q "How do bees tell each other where flowers are?" -d passages.txt`

    `cat passages.jsonl | rsrank rank -q "How do bees fly?" -d - --json`
    """
    texts = read_documents(documents)
    show_waiting(f"Loading {model} ...")
    ranker = load_reranker(options.source(model))
    limits = dict(rule_options)
    result = ranker.rank(encodable(query), texts, **limits, top_n=top_n, extract=extract)
    if as_json:
        print_json(result.to_dict())
    else:
        echo(printable(str(result)))


@command(resumes=True)
@documents_option
@model_option
def index(documents: str, model: str, options: ModelOptions) -> None:
    """Run documents ahead of time: later calls with this `--cache-folder` run only the query.

    The folder holds the documents in recoverable form: protect the folder like the documents. After
    an interruption, repeat the command.

    `rsrank index --documents passages.txt --cache-folder prefixes`
    """
    if options.cache_folder is None:
        raise InputError("Give --cache-folder: the folder for the prefixes.")
    ranker = _load(model, options)
    texts = read_documents(documents)
    parts = ranker.parts(texts)
    count = ranker.index(parts, show_progress=on_terminal())
    folder = Path(options.cache_folder).absolute()
    echo(f"{len(texts):,} documents: {len(parts):,} different parts, {count:,} run for {folder}")


@command()
@query_option
@option("--document", "-d", required=True, help="The document's text.")
@model_option
@json_option
def explain(query: str, document: str, model: str, options: ModelOptions, as_json: bool) -> None:
    """Show where a score comes from: its exact parts per query token and per layer (L1, L2, ...).

    In a model with a fusion layer, "match" is a token's MaxSim term, and "whole" is the cosine term
    plus the bias.

    `rsrank explain -q "How do bees find flowers?" --document "Bees find them by their colour."`
    """
    ranker = _load(model, options)
    explanation = ranker.explain(encodable(query), encodable(document))
    if as_json:
        fields = asdict(explanation)
        del fields["head_parts"]
        print_json(fields)
    else:
        echo(explanation_text(explanation, ranker.native_rule))


def explanation_text(explanation: Explanation, rule: Rule) -> str:
    """An explanation after its query and document, and whether a rule keeps the document alone."""
    document = " ".join(explanation.document.split())[:200]
    scores = [explanation.score]
    verdict = "dropped"
    if rule.select(scores):
        verdict = "kept"
        if rule.bar(scores).weak:
            verdict = "kept (weak) if no document of its list scores above the threshold"
    if rule.threshold:
        verdict += f": the threshold is {rule.threshold:g}"
    if explanation.truncated:
        verdict += " (by its beginning alone; rank reads long documents in windows)"
    return printable(f"{explanation.query}\n{document}\n{explanation}\n{verdict}")


@command()
@click.argument("model", default="mini")
@option("--revision", help="Commit, tag or branch on the Hub.")
@json_option
def info(model: str, revision: str | None, as_json: bool) -> None:
    """Print an artifact's model card and its limits; loads no language model.

    MODEL is a built-in name, an artifact folder or a Hub id. Default: mini.

    `rsrank info mini`
    """
    from ..artifact import hub
    from ..artifact.card import model_card

    folder = hub.resolve(model, revision)
    config = hub.read_config(folder)
    if as_json:
        echo(config.model_dump_json(indent=2))
        return
    echo(printable(model_card(config)))
    limits = folder / hub.LIMITS
    if limits.is_file():
        echo(printable(f"Limits: {limits.read_text(encoding='utf-8').strip()}"))


@command()
@option("--input", "-i", "source", type=PATH, required=True, help="A .jsonl or .jsonl.gz file.")
@option("--output", "-o", type=PATH, required=True, help="The .jsonl or .jsonl.gz file to write.")
@model_option
def score(
    source: Path,
    output: Path,
    model: str,
    options: ModelOptions,
) -> None:
    """Score the pairs of a file of JSON lines.

    A row has a "query" and a "document"; other columns are copied. Added are score,
    above_threshold, truncated, and error: why a row has no score, else null.

    `rsrank score --input pairs.jsonl --output scored.jsonl`
    """
    from ..bulk import score_file

    parse(model)
    load_model = partial(load_reranker, options.source(model))
    numbers = score_file(source, output, load_model, partial(progress, description="Scoring"))
    errors = f"{numbers['errors']:,} without a score (column error)"
    echo(f"{output}: {numbers['rows']:,} rows, {errors}")


COMMANDS = (rank, index, explain, info, score)
