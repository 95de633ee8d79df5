"""The ``rsrank`` commands around one model: rank, index, explain, info, score."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm
from typer import Option

from .. import __version__
from ..adapters.systems import load as load_reranker
from ..artifact.config import RSRankConfig
from ..bulk.on_ray import Actors
from ..errors import InputError
from ..language_model.options import FLAGS, LoadOptions, ModelSource
from ..method.template import clean
from ..passages.explanation import Explanation
from ..reranker import RankResult
from .options import (
    AsJson,
    Documents,
    Instruction,
    Model,
    Query,
    Revision,
    System,
    command,
    problems,
    screen,
)

if TYPE_CHECKING:
    from ..bulk.files import Plan
    from ..rsrank import RSRank

LongDocuments = Annotated[
    Literal["windows", "cut"] | None,
    Option(
        help="windows: read all that is too long; the best window counts (RSRank's default). cut: the beginning."
    ),
]

app = typer.Typer()

Prefixes = Annotated[
    Path | None, Option("--prefixes", "-p", help="Folder that rsrank index has made.")
]


def _kept(prefixes: Path | None) -> str | bool:
    """Nothing is kept between calls unless asked for: a score must not depend on what was done before."""
    return False if prefixes is None else str(prefixes.absolute())


def _load(source: ModelSource) -> RSRank:
    from ..rsrank import RSRank

    with problems.status(f"Loading {source.name} ..."):
        return RSRank.from_source(source)


def read_documents(source: str) -> list[str]:
    """Documents of a file or of standard input (``-``): one a line, as text or as JSON with a "text"."""
    try:
        raw = (sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()).decode(
            "utf-8-sig"
        )
    except UnicodeDecodeError:
        raise InputError(
            f"--documents {source} is no text in UTF-8. Save it as such, one document a line."
        ) from None
    except OSError as error:
        raise InputError(
            f"--documents {source} could not be read: {error.strerror}. Give a file, or - ."
        ) from error
    lines = [line for line in clean(raw.removeprefix("\ufeff")).split("\n") if line.strip()]
    if not lines and source != "-":  # a pipe may well be empty, as a retriever's answer
        raise InputError(f"--documents {source} holds no documents. Write one a line.")
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


def result_text(result: RankResult) -> Text:
    """As a result prints itself: kept documents in green, then dropped ones in grey."""
    styles = {"+": "green", "-": "dim"}
    return Text("\n").join(
        Text(line, styles.get(line[0], "bold")) for line in str(result).splitlines()
    )


@command(app)
def rank(
    query: Query,
    documents: Documents,
    load: LoadOptions,
    model: System = "mini",
    revision: Revision = None,
    threshold: Annotated[
        float | None, Option(help="Keep what scores above. Default: the model's own.")
    ] = None,
    keep_all: Annotated[bool, Option("--keep-all", help="Rank only, drop nothing.")] = False,
    top_n: Annotated[int | None, Option(help="Keep at most this many.")] = None,
    min_docs: Annotated[int, Option(help="Keep at least the best this many.")] = 0,
    instruction: Instruction = None,
    extract: Annotated[
        str | None, Option(help="sentences: keep of each document those that score above.")
    ] = None,
    context: Annotated[int, Option(help="With --extract: so many sentences around each, too.")] = 0,
    heading: Annotated[
        bool, Option("--heading", help="With --extract: keep the first line, too.")
    ] = False,
    long_documents: LongDocuments = None,
    prefixes: Prefixes = None,
    as_json: AsJson = False,
) -> None:
    """Score documents for a query: what scores above zero is kept, the rest is dropped.

    Documents stand one a line, as plain text or as JSON lines with a "text".

    `rsrank rank -q "How do bees find flowers?" -d passages.txt`

    `cat passages.jsonl | rsrank rank -q "How do bees find flowers?" -d - --json`
    """
    query, texts = clean(query), read_documents(documents)
    with problems.status(f"Loading {model} ..."):
        ranker = load_reranker(ModelSource(model, revision, load, prefix_cache=_kept(prefixes)))
        ranker = ranker if instruction is None else ranker.with_instruction(clean(instruction))
    given: Any = {
        "extract": extract,
        "context": context,
        "heading": heading,
        "long_documents": long_documents,
    }
    given |= {
        "top_n": top_n,
        "min_docs": min_docs,
        "show_progress": problems.is_terminal and len(texts) > 100,
    }
    tau: Any = None if keep_all else "native" if threshold is None else threshold
    result = ranker.rank(query, texts, threshold=tau, **given)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False, indent=2))
    else:
        screen.print(result_text(result), soft_wrap=True)


@command(app, resumes=True)
def index(
    documents: Documents,
    prefixes: Annotated[Path, Option("--prefixes", "-p", help="Folder to keep them in.")],
    load: LoadOptions,
    model: Model = "mini",
    revision: Revision = None,
    long_documents: LongDocuments = None,
) -> None:
    """Read documents ahead of time: later calls with `prefix_cache=FOLDER` run only the query.

    The folder holds the documents in recoverable form: protect it as you protect them. An interrupted run goes on.

    `rsrank index --documents passages.txt --prefixes prefixes`
    """
    ranker = _load(ModelSource(model, revision, load, prefix_cache=str(prefixes.absolute())))
    texts = ranker.parts(read_documents(documents), long_documents=long_documents)
    count, size = ranker.index_size(texts)
    problems.print(f"{len(texts):,} documents, {count:,} new: {size / 1e6:,.1f} MB")
    count = ranker.index(texts, show_progress=problems.is_terminal)
    screen.print(f"{len(texts):,} documents, {count} new, in {prefixes}")


@command(app)
def explain(
    query: Query,
    load: LoadOptions,
    document: Annotated[str | None, Option("--document", help="One document's text.")] = None,
    documents: Annotated[
        str | None, Option("--documents", "-d", help="Or a file of them, or - .")
    ] = None,
    model: Model = "mini",
    revision: Revision = None,
    instruction: Instruction = None,
    as_json: AsJson = False,
) -> None:
    """Show where a score comes from: its exact parts per query token and per layer (L1, L2, ...).

    `rsrank explain -q "How do bees find flowers?" --document "Bees find flowers by their colour and their scent."`

    `rsrank explain -q "How do bees find flowers?" -d passages.txt`
    """
    if document is not None and documents is None:
        texts = [clean(document)]
    elif document is None and documents is not None:
        texts = read_documents(documents)
    else:
        raise InputError(
            "Give one document's text (--document TEXT) or a file of them (--documents FILE)."
        )
    ranker = _load(ModelSource(model, revision, load))
    ranker = ranker if instruction is None else ranker.with_instruction(clean(instruction))
    explanations = [ranker.explain(clean(query), text) for text in texts]
    if as_json:
        fields = (
            "query",
            "document",
            "score",
            "truncated",
            "tokens",
            "layers",
            "parts",
            "agreement",
            "matches",
        )
        shown = [
            {name: getattr(explanation, name) for name in fields} for explanation in explanations
        ]
        typer.echo(
            json.dumps(shown if document is None else shown[0], ensure_ascii=False, indent=2)
        )
    else:
        screen.print(*map(explanation_text, explanations), sep="\n\n", soft_wrap=True)


def explanation_text(explanation: Explanation) -> Text:
    """As an explanation prints itself, below what was asked and read."""
    document, verdict = (
        " ".join(explanation.document.split())[:200],
        "kept" if explanation.score > 0 else "dropped",
    )
    return Text.assemble(
        (explanation.query, "bold"), "\n", (document, "dim"), f"\n{explanation}\n{verdict}"
    )


WHY = {
    "bfloat16": "the hardware multiplies it",
    "int8": "documents; the hardware multiplies nothing faster, and this was measured to be good enough",
    "float32": "the hardware multiplies no bfloat16",
}


@command(app)
def info(
    model: Annotated[
        str, typer.Argument(help="Built-in name, artifact folder or Hub id.")
    ] = "mini",
    revision: Revision = None,
    local_files_only: Annotated[
        bool, Option("--local-files-only", help="Never ask the Hub.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe an artifact without loading its language model: backbone, B, template, training, licence.

    `rsrank info mini`
    """
    from ..artifact import hub

    folder = hub.resolve(model, revision, LoadOptions(local_files_only=local_files_only))
    config, limits = hub.read_config(folder), folder / hub.LIMITS
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
    else:
        said = limits.read_text(encoding="utf-8").strip() if limits.is_file() else "not stated"
        screen.print(info_table(model, config, said, LoadOptions().settled_dtype(int8=config.int8)))


def info_table(name: str, config: RSRankConfig, limits: str, dtype: str) -> Table:
    """What an artifact says of itself, and the dtype that it is computed in here."""
    layers, heads, dim, head_dim = config.shape
    seen = f"queries see documents from layer {config.fusion_layer} on"
    rows = {
        "rsrank_rag": __version__,
        "artifact": name,
        "backbone": f"{config.backbone.name} at {config.backbone.revision or 'no pinned revision'} "
        f"({config.backbone.model_type}, {config.depth})",
        **(
            {"fusion": seen + ", where those end" * config.documents_stay}
            if config.fusion_layer
            else {}
        ),
        "B": f"layers {'-'.join(map(str, config.layers[:: max(1, layers - 1)]))} ({layers}) x {heads} heads x P {dim} "
        f"x D {head_dim} = {layers * heads * dim * head_dim:,} numbers",
        "template": f"{config.template.instruction!r} document {config.template.separator!r} query "
        f"{config.template.suffix!r}, scored: {config.template.positions}",
        "training data": ", ".join(config.training.data) or "not recorded",
        "computed here in": f"{dtype}: {WHY[dtype]}",
        "limits": limits,
        "notes": config.training.notes or "-",
        "licence": config.license or "not recorded",
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


@command(app, resumes=True)
def score(
    source: Annotated[
        str,
        Option("--input", "-i", help="A .jsonl(.gz), .csv or .parquet file, folder or pattern."),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the scored files.")],
    load: LoadOptions,
    actors: Actors | None,
    model: System = "mini",
    revision: Revision = None,
    rows_per_part: Annotated[
        int, Option(help="Rows of an output file: what a killed process loses at most.")
    ] = 10_000,
    prefixes: Prefixes = None,
    jsonl: Annotated[
        bool, Option("--jsonl", help="Write JSON lines, too, beside each Parquet file.")
    ] = False,
) -> None:
    """Score many pairs: JSON lines, CSV or Parquet in, Parquet or JSON lines out. Run again, it goes on.

    A row has a "query" and either a "document" or "documents" (a list of texts, or of objects with "text" and "title"
    as `rsrank evaluate` reads them); anything else is carried along. Added are score, kept (above the model's
    threshold), truncated, and error: why a pair has no score, else null.

    `rsrank score --input pairs.jsonl --output scored`

    `rsrank score --input pairs.csv --output scored --jsonl`

    `rsrank score --input pairs/ --output scored --engine ray --gpus-per-actor 1 --address auto`
    """
    from ..bulk.files import write_lines
    from ..bulk.run import model_identity, score_files, settled_dtype

    load = replace(load, dtype=load.dtype or settled_dtype(load, actors, model, revision))
    settings = {
        "dtype": load.dtype,
        **{flag: load.weights == kind for flag, kind in FLAGS.items()},
        "prefixes": prefixes is not None,
    }
    found = score_files(
        source,
        output,
        partial(load_reranker, ModelSource(model, revision, load, prefix_cache=_kept(prefixes))),
        model=model_identity(model, revision=revision, local_files_only=load.local_files_only),
        settings=settings,
        rows_per_part=rows_per_part,
        actors=actors,
        progress=_progress,
    )
    if jsonl:
        write_lines(output)
    errors = f", {found.errors:,} of them without a score (column error)" if found.errors else ""
    earlier = f" ({found.found:,} were there)" if found.found else ""
    screen.print(
        f"{found.rows:,} rows, {found.pairs:,} pairs{errors}, in {found.parts:,} files{earlier} of {output}"
    )


def _progress(plan: Plan, done: Iterable[int]) -> Iterable[int]:
    total = sum(part.rows for part in plan.parts)
    with tqdm(total=total, desc="Scoring", unit="row", disable=not problems.is_terminal) as bar:
        for rows in done:
            bar.update(rows)
            yield rows
