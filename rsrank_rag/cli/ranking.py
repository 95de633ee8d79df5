"""The ``rsrank`` commands for one model: rank, index, explain, info, score."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import track
from rich.text import Text
from typer import Option

from ..adapters.systems import load as load_reranker
from ..adapters.systems import parse
from ..errors import InputError
from ..language_model.options import LoadOptions, ModelSource
from ..method.template import clean
from ..partial_files import digest_of
from ..passages.explanation import Explanation
from ..passages.ranked import passes
from ..passages.titles import lines_before
from ..reranker import RankResult, Threshold
from .options import (
    AsJson,
    Documents,
    Model,
    Query,
    Revision,
    System,
    command,
    print_json,
    printable,
    problems,
    screen,
)

if TYPE_CHECKING:
    from ..rsrank import RSRank

app = typer.Typer()

Prefixes = Annotated[
    Path | None,
    Option("--prefixes", "-p", resolve_path=True, help="Folder that rsrank index has made."),
]


def _load(source: ModelSource) -> RSRank:
    from ..rsrank import RSRank

    with problems.status(Text(f"Loading {source.name} ...")):
        return RSRank.from_source(source)


def read_documents(source: str) -> list[str]:
    """Documents of a file, or of standard input (``-``), one a line.

    Lines are plain text, or all of them are JSON objects with a "text" and perhaps a "title". The
    title is read as it is in labelled files.

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
            documents.append(clean(lines_before(row["text"], row, ("title",)) + row["text"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f'--documents {source}, document {number}: expected JSON with a "text", '
                f"got {line[:60]!r}."
            ) from None
    return documents


def result_text(result: RankResult) -> Text:
    """A result with kept documents in green and dropped ones in grey."""
    text = Text(printable(str(result)), "bold")
    text.highlight_regex(r"(?m)^\+.*", "not bold green")
    text.highlight_regex(r"(?m)^-.*", "not bold dim")
    return text


@command(app)
def rank(
    query: Query,
    documents: Documents,
    load: LoadOptions,
    model: System = "mini",
    revision: Revision = None,
    threshold: Annotated[
        float | None, Option(help="Keep documents above this. Default: the model's own.")
    ] = None,
    keep_all: Annotated[bool, Option("--keep-all", help="Rank without a threshold.")] = False,
    top_n: Annotated[int | None, Option(help="Keep at most this many.")] = None,
    min_docs: Annotated[int, Option(help="Keep at least this many.")] = 0,
    extract: Annotated[
        Literal["sentences"] | None,
        Option(help="Keep only sentences that score above the threshold."),
    ] = None,
    prefixes: Prefixes = None,
    as_json: AsJson = False,
) -> None:
    """Score documents for a query, keep those above the threshold, and drop the others.

    A line holds one document. If each line begins with {, the lines are read as JSON objects with
    a "text", and perhaps a "title". The title is read on a line before the text, unless the text
    begins with it.

    `rsrank rank -q "How do bees find flowers?" -d passages.txt`

    `cat passages.jsonl | rsrank rank -q "How do bees find flowers?" -d - --json`
    """
    if keep_all and threshold is not None:
        raise InputError("--keep-all ranks without a threshold: leave out --threshold.")
    texts = read_documents(documents)
    # Without a folder, prefixes are not cached: each document is scored once.
    source = ModelSource(model, revision, load, prefix_cache=prefixes or False)
    with problems.status(Text(f"Loading {model} ...")):
        ranker = load_reranker(source)
    limit: Threshold = "native"
    if keep_all:
        limit = None
    elif threshold is not None:
        limit = threshold
    result = ranker.rank(
        clean(query), texts, threshold=limit, top_n=top_n, min_docs=min_docs, extract=extract
    )
    if as_json:
        print_json(result.to_dict())
    else:
        screen.print(result_text(result), soft_wrap=True)


@command(app, resumes=True)
def index(
    documents: Documents,
    prefixes: Annotated[
        Path, Option("--prefixes", "-p", resolve_path=True, help="Folder for the prefixes.")
    ],
    load: LoadOptions,
    model: Model = "mini",
    revision: Revision = None,
) -> None:
    """Run documents ahead of time: later calls with `prefix_cache=FOLDER` run only the query.

    The folder holds the documents in recoverable form: protect the folder like the documents. After
    an interruption, repeat the command.

    `rsrank index --documents passages.txt --prefixes prefixes`
    """
    ranker = _load(ModelSource(model, revision, load, prefix_cache=prefixes))
    texts = read_documents(documents)
    parts = ranker.parts(texts)
    count = ranker.index(parts, show_progress=problems.is_terminal)
    screen.print(
        f"{len(texts):,} documents: {len(parts):,} different parts, {count:,} run for {prefixes}"
    )


@command(app)
def explain(
    query: Query,
    document: Annotated[str, Option("--document", "-d", help="The document's text.")],
    load: LoadOptions,
    model: Model = "mini",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show where a score comes from: its exact parts per query token and per layer (L1, L2, ...).

    In a model with a fusion layer, "match" is a token's MaxSim term, and "whole" is the cosine term
    plus the bias.

    `rsrank explain -q "How do bees find flowers?" --document "Bees find them by their colour."`
    """
    ranker = _load(ModelSource(model, revision, load))
    explanation = ranker.explain(clean(query), clean(document))
    if as_json:
        fields = asdict(explanation)
        del fields["head_parts"]
        print_json(fields)
    else:
        screen.print(explanation_text(explanation, ranker.config.threshold), soft_wrap=True)


def explanation_text(explanation: Explanation, threshold: float) -> Text:
    """An explanation after its query and document, and whether the document is kept."""
    document = " ".join(explanation.document.split())[:200]
    verdict = "dropped"
    if passes(explanation.score, threshold):
        verdict = "kept"
    if threshold:
        verdict = f"{verdict}: the threshold is {threshold:g}"
    if explanation.truncated:
        verdict += " (by its beginning alone; rank reads long documents in windows)"
    return Text.assemble(
        (printable(explanation.query), "bold"),
        "\n",
        (printable(document), "dim"),
        f"\n{printable(str(explanation))}\n{verdict}",
    )


@command(app)
def info(
    model: Annotated[
        str, typer.Argument(help="Built-in name, artifact folder or Hub id.")
    ] = "mini",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Print an artifact's model card and its limits; loads no language model.

    `rsrank info mini`
    """
    from ..artifact import hub
    from ..artifact.card import model_card

    folder = hub.resolve(model, revision)
    config = hub.read_config(folder)
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
        return
    typer.echo(printable(model_card(config)))
    limits = folder / hub.LIMITS
    if limits.is_file():
        typer.echo(printable(f"Limits: {limits.read_text(encoding='utf-8').strip()}"))


@command(app, resumes=True)
def score(
    source: Annotated[
        str,
        Option("--input", "-i", help="A .jsonl or .jsonl.gz file, or a folder of them."),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the scored files.")],
    load: LoadOptions,
    model: System = "mini",
    revision: Revision = None,
    prefixes: Prefixes = None,
) -> None:
    """Score many pairs: files of JSON lines in, a file of the same name out for each.

    After an interruption, repeat the command: complete files that are not older than their input
    are skipped.

    A row has a "query" and a "document"; other columns are copied. Added are score, kept (above
    the model's threshold), truncated, and error: why a row has no score, else null.

    `rsrank score --input pairs.jsonl --output scored`
    """
    from ..artifact import hub
    from ..bulk.run import score_files

    model_source = ModelSource(model, revision, load, prefix_cache=prefixes or False)
    settings = {
        "model": model,
        "revision": revision,
        "prefixes": prefixes is not None,
        **load.model_dump(
            mode="json", exclude={"device", "local_files_only", "token", "cache_dir"}
        ),
    }
    kind, name = parse(model)
    file = Path(name) if kind else hub.resolve(model, revision, load) / hub.PROJECTION
    # A Hub id has no file.
    if file.is_file():
        settings["sha256"] = digest_of(file)
    numbers = score_files(
        source,
        output,
        partial(load_reranker, model_source),
        settings=settings,
        progress=partial(track, description="Scoring", console=problems, transient=True),
    )
    screen.print(
        f"{numbers['rows']:,} new rows, {numbers['errors']:,} without a score (column error); "
        f"files in {output}: {numbers['files']:,} written, {numbers['skipped']:,} skipped",
        soft_wrap=True,
    )
