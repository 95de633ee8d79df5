"""The ``rsrank`` commands around one model: rank, index, explain, info."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..adapters.systems import load as load_reranker
from ..bulk.on_ray import Actors
from ..errors import InputError
from ..language_model.options import LoadOptions, ModelSource
from ..method.template import clean
from .console import problems, screen
from .options import AsJson, Documents, Model, Query, Revision, System, command
from .tables import explanation_table, info_table, result_table

if TYPE_CHECKING:
    from ..rsrank import RSRank

app = typer.Typer()


def _load(source: ModelSource) -> RSRank:
    from ..rsrank import RSRank

    with problems.status(f"Loading {source.name} ..."):
        return RSRank.from_source(source)


def read_documents(source: str) -> list[str]:
    """Documents of a file or of standard input (``-``): one a line, as text or as JSON with a "text".

    Raises:
        InputError: The file cannot be read, or a JSON line has no "text".
    """
    try:
        raw = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--documents {source} could not be read: {error}") from error
    lines = [line for line in clean(raw.removeprefix("\ufeff")).split("\n") if line.strip()]
    if not lines or not all(line.lstrip().startswith("{") for line in lines):
        return [line.rstrip("\r") for line in lines]
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            documents.append(clean(json.loads(line)["text"]))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise InputError(
                f'--documents {source}, line {number}: expected JSON with a "text", got {line[:60]!r}.'
            ) from None
    return documents


@command(app)
def rank(
    query: Query,
    documents: Documents,
    load: LoadOptions,
    model: System = "mini",
    revision: Revision = None,
    threshold: Annotated[
        float | None, typer.Option(help="Keep documents that score above this. Default: the model's own, 0 for RSRank.")
    ] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Rank only, drop nothing.")] = False,
    top_n: Annotated[int | None, typer.Option(help="Keep at most this many.")] = None,
    min_docs: Annotated[int, typer.Option(help="Keep at least the best this many.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Score documents for a query: what scores above zero is kept, the rest is dropped.

    Documents stand one a line, as plain text or as JSON lines with a "text".

    `rsrank rank -q "How do bees find flowers?" -d passages.txt`

    `cat passages.jsonl | rsrank rank -q "How do bees find flowers?" -d - --json`
    """
    query, texts = clean(query), read_documents(documents)
    with problems.status(f"Loading {model} ..."):
        ranker = load_reranker(ModelSource(model, revision, load, prefix_cache=False))
    result = ranker.rank(
        query,
        texts,
        threshold=None if keep_all else "native" if threshold is None else threshold,
        top_n=top_n,
        min_docs=min_docs,
        show_progress=problems.is_terminal and len(texts) > 100,
    )
    if as_json:
        typer.echo(json.dumps(asdict(result), ensure_ascii=False, indent=2))
    else:
        screen.print(result_table(result))


@command(app)
def index(
    documents: Documents,
    prefixes: Annotated[Path, typer.Option("--prefixes", "-p", help="Folder to keep them in.")],
    load: LoadOptions,
    actors: Actors | None,
    model: Model = "mini",
    revision: Revision = None,
) -> None:
    """Read documents ahead of time: later calls with `prefix_cache=FOLDER` run only the query.

    The folder holds the documents in recoverable form: protect it as you protect them. An interrupted run goes on.

    `rsrank index --documents passages.txt --prefixes prefixes`
    """
    texts = read_documents(documents)
    make = partial(_load, ModelSource(model, revision, load, prefix_cache=str(prefixes.absolute())))
    if actors is not None:
        from ..bulk.workers import index_on

        count = index_on(actors, make, texts)
    else:
        ranker = make()
        count, size = ranker.index_size(texts)
        problems.print(f"{len(texts):,} documents, {count:,} new: {size / 1e6:,.1f} MB")
        ranker.index(texts, show_progress=problems.is_terminal)
    screen.print(f"{len(texts):,} documents, {count} new, in {prefixes}")


@command(app)
def explain(
    query: Query,
    document: Annotated[str, typer.Option("--document", "-d", help="The document's text.")],
    load: LoadOptions,
    model: Model = "mini",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show where a score comes from: its exact parts per query token and per layer (L1, L2, ...).

    `rsrank explain -q "How do bees find flowers?" -d "Bees see ultraviolet patterns on petals."`
    """
    explanation = _load(ModelSource(model, revision, load)).explain(clean(query), clean(document))
    if as_json:
        fields = ("query", "document", "score", "truncated", "tokens", "layers", "parts")
        typer.echo(json.dumps({name: getattr(explanation, name) for name in fields}, ensure_ascii=False, indent=2))
    else:
        screen.print(explanation_table(explanation))


@command(app)
def info(
    model: Annotated[str, typer.Argument(help="Built-in name, artifact folder or Hub id.")] = "mini",
    revision: Revision = None,
    local_files_only: Annotated[bool, typer.Option("--local-files-only", help="Never ask the Hub.")] = False,
    as_json: AsJson = False,
) -> None:
    """Describe an artifact without loading its language model: backbone, B, template, training, licence.

    `rsrank info mini`
    """
    from ..artifact import hub

    config = hub.read_config(hub.resolve(model, revision=revision, local_files_only=local_files_only))
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
    else:
        screen.print(info_table(model, config))
