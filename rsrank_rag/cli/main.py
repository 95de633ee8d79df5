"""The ``rsrank`` command. The only place of this package that prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.progress import track

from .. import __version__
from ..errors import InputError
from ..evaluation.systems.registry import forms
from ..method.template import clean
from . import bulk as cli_scale
from . import evaluation as cli_evaluation
from . import service as cli_serving
from . import training as cli_training
from .console import catch_errors, problems, screen
from .options import Device, Dtype, EightBit, FourBit, Fp8, Model, Offline, Revision, TrustRemoteCode
from .tables import evaluation_table, explanation_table, info_table, result_table

if TYPE_CHECKING:
    from ..evaluation.comparison import Measured
    from ..evaluation.datasets import LabelledQuery
    from ..evaluation.evaluate import System
    from ..evaluation.metrics import ScoredQuery
    from ..method.early import EarlyDecisions
    from ..reranker import RankedDocument, RankResult
    from ..rsrank import RSRank

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Rerank documents for a query and drop the irrelevant ones at zero.",
    epilog="Try: `rsrank rank --query 'Who painted it?' --documents passages.txt`",
)
app.add_typer(cli_evaluation.app)
app.add_typer(cli_serving.app)
app.add_typer(cli_training.app)
app.add_typer(cli_scale.app)

Query = Annotated[str, typer.Option("--query", "-q", help="The question.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _load(
    model: str,
    *,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    load_in_8bit: bool,
    load_in_4bit: bool,
    load_in_fp8: bool,
    local_files_only: bool,
    prefix_cache: bool | Path = True,
    early: str | None = None,
) -> RSRank:
    from transformers.utils import logging

    from ..rsrank import RSRank

    logging.disable_progress_bar()
    with problems.status(f"Loading {model} ..."):
        return RSRank.from_pretrained(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            prefix_cache=prefix_cache,
            early_decisions=cast("EarlyDecisions | None", early),  # RSRank refuses what is not one
        )


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


@app.command()
def rank(
    query: Query,
    documents: Annotated[str, typer.Option("--documents", "-d", help="A file, or - for standard input.")],
    model: Model = "mini",
    threshold: Annotated[float, typer.Option(help="Keep documents that score above this.")] = 0.0,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Rank only, drop nothing.")] = False,
    top_n: Annotated[int | None, typer.Option(help="Keep at most this many.")] = None,
    min_docs: Annotated[int, typer.Option(help="Keep at least the best this many.")] = 0,
    early: Annotated[
        str | None, typer.Option(help="Drop documents before the last layer: exact, or calibrated (rsrank calibrate).")
    ] = None,
    as_json: AsJson = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
) -> None:
    """Score documents for a query: what scores above zero is kept, the rest is dropped.

    Documents stand one a line, as plain text or as JSON lines with a "text".

    `rsrank rank -q "How do bees find flowers?" -d passages.txt`

    `cat passages.jsonl | rsrank rank -q "How do bees find flowers?" -d - --json`
    """
    with catch_errors():
        query, texts = clean(query), read_documents(documents)
        ranker = _load(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            prefix_cache=False,
            early=early,
        )
        result = ranker.rank(
            query,
            texts,
            threshold=None if keep_all else threshold,
            top_n=top_n,
            min_docs=min_docs,
            show_progress=problems.is_terminal and len(texts) > 100,
        )
    if as_json:
        typer.echo(json.dumps(_as_json(result), ensure_ascii=False, indent=2))
    else:
        screen.print(result_table(result))


def _as_json(result: RankResult) -> dict[str, Any]:
    def rows(documents: tuple[RankedDocument, ...]) -> list[dict[str, Any]]:
        return [
            {"index": d.index, "score": d.score, "truncated": d.truncated, "is_bound": d.is_bound, "text": d.text}
            for d in documents
        ]

    return {
        "query": result.query,
        "threshold": result.threshold,
        "kept": rows(result.kept),
        "dropped": rows(result.dropped),
    }


@app.command()
def index(
    documents: Annotated[str, typer.Option("--documents", "-d", help="A file, or - for standard input.")],
    prefixes: Annotated[Path, typer.Option("--prefixes", "-p", help="Folder to keep them in.")],
    model: Model = "mini",
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
    engine: cli_scale.Engine = cli_serving.Where.local,
    actors: cli_scale.Count = None,
    cpus_per_actor: cli_scale.Cpus = 1.0,
    gpus_per_actor: cli_scale.Gpus = 0.0,
    address: cli_serving.Address = None,
) -> None:
    """Read documents ahead of time: later calls with `prefix_cache=FOLDER` run only the query.

    The folder holds the documents in recoverable form: protect it as you protect them. An interrupted run goes on.

    `rsrank index --documents passages.txt --prefixes prefixes`
    """
    with catch_errors():
        texts = read_documents(documents)
        load = partial(
            _load,
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            prefix_cache=prefixes.absolute(),
        )
        chosen = cli_scale.chosen(engine, actors, cpus_per_actor, gpus_per_actor, address)
        if chosen is not None:
            from ..bulk.workers import index_on

            count = index_on(chosen, load, texts)
        else:
            ranker = load()
            count, size = ranker.index_size(texts)
            problems.print(f"{len(texts):,} documents, {count:,} new: {size / 1e6:,.1f} MB")
            ranker.index(texts, show_progress=problems.is_terminal)
    screen.print(f"{len(texts):,} documents, {count} new, in {prefixes}")


@app.command()
def calibrate(
    data: Annotated[list[Path], typer.Option("--data", help="Held-out labelled .jsonl or .jsonl.gz.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the calibrated artifact.")],
    model: Model = "mini",
    miss_rate: Annotated[float, typer.Option(help="Share of the kept documents that may be lost.")] = 0.05,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
) -> None:
    """Measure bounds for early decisions (`rank --early calibrated`) and write an artifact that holds them.

    `rsrank calibrate --model mini --data held-out.jsonl --output mini-early`
    """
    with catch_errors():
        from ..evaluation.datasets import read_labelled
        from ..method.early_calibration import calibrated

        queries = [query for path in data for query in read_labelled(path)]
        ranker = _load(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            prefix_cache=False,
        )
        watched = track(queries, "Scoring", console=problems, disable=not problems.is_terminal)
        made = calibrated(ranker, watched, miss_rate=miss_rate)
        made.save_pretrained(output)
        found = made.config.calibration
        assert found is not None
    screen.print(
        f"{found.kept:,} of {found.documents:,} documents of {found.queries:,} queries score above zero.\n"
        "To these, later layers add"
    )
    for layer, bound in found.bounds.items():
        screen.print(f"  at most {bound:+.3f} after layer {layer}")
    screen.print(f"Try it:   rsrank rank --model {output} --early calibrated -q ... -d FILE")


@app.command()
def explain(
    query: Query,
    document: Annotated[str, typer.Option("--document", "-d", help="The document's text.")],
    model: Model = "mini",
    as_json: AsJson = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
) -> None:
    """Show where a score comes from: its exact parts per query token and per layer (L1, L2, ...).

    `rsrank explain -q "How do bees find flowers?" -d "Bees see ultraviolet patterns on petals."`
    """
    with catch_errors():
        ranker = _load(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
        )
        explanation = ranker.explain(clean(query), clean(document))
    if as_json:
        fields = ("query", "document", "score", "truncated", "tokens", "layers", "parts")
        typer.echo(json.dumps({name: getattr(explanation, name) for name in fields}, ensure_ascii=False, indent=2))
    else:
        screen.print(explanation_table(explanation))


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Built-in name, artifact folder or Hub id.")] = "mini",
    revision: Revision = None,
    local_files_only: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Describe an artifact without loading its language model: backbone, B, template, training, licence.

    `rsrank info mini`
    """
    from ..artifact import hub

    with catch_errors():
        folder = hub.resolve(model, revision=revision, local_files_only=local_files_only)
        config = hub.read_config(folder)
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
        return
    screen.print(info_table(model, config))


def _tau(threshold: str, system: System, scored: list[list[ScoredQuery]]) -> tuple[float, str]:
    """The threshold for f1@tau, and where it comes from."""
    from ..evaluation.evaluate import shared_threshold

    if threshold == "native" and system.threshold is not None:
        return system.threshold, "native"
    if threshold in ("native", "shared"):
        why = "" if threshold == "shared" else "; this system has no native threshold"
        return shared_threshold(scored), f"the best over all files{why}"
    return _number(threshold), "given"


@app.command()
def evaluate(
    data: Annotated[
        list[str],
        typer.Option(
            "--data", help="Labelled .jsonl or .jsonl.gz, or a set on the Hub: hotpotqa, beir:NAME. May be given again."
        ),
    ],
    model: Annotated[
        list[str],
        typer.Option(
            "--model", "-m", help=f"Built-in name, artifact folder or Hub id; or {forms()}. May be given again."
        ),
    ] = ["mini"],  # noqa: B006 - typer copies it
    output: Annotated[
        Path | None, typer.Option("--json", help="Write the metrics here, an object a model and file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a page with tables, figures and the worst queries here.")
    ] = None,
    umap: Annotated[
        bool, typer.Option("--umap", help="In the report, draw RSRank's shifts before and after B.")
    ] = False,
    threshold: Annotated[
        str,
        typer.Option(
            help="For f1@tau: a number, 'native' for the system's own (0 for RSRank), or 'shared' for the best single "
            "one over all files, which is also what a system without a native one gets."
        ),
    ] = "native",
    titles: Annotated[bool, typer.Option(help="Put a document's title in front of its text.")] = True,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first queries of each file; so many at random from the Hub.")
    ] = None,
    negatives: Annotated[str | None, typer.Option(help=cli_evaluation.NEGATIVES)] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure ranking (nDCG@5, Recall@5) and selection (F1 at the threshold) on labelled passages.

    A line holds one query: `{"id", "query", "documents": [{"id", "text", "relevant", "title"?}]}`.
    f1@best is the F1 at the best single threshold of the file, f1@query_best at each query's own.

    `rsrank evaluate --data dev.jsonl.gz --json metrics.json`

    `rsrank evaluate --data dev.jsonl.gz --model qwen3-reranker:0.6b`

    `rsrank evaluate --data dev.jsonl.gz --model mini --model bm25 --report report`

    `rsrank evaluate --data dev.jsonl.gz --model mini --negatives bm25`
    """
    from transformers.utils import logging

    from ..evaluation.comparison import Measured
    from ..evaluation.hub_datasets import load_sets
    from ..evaluation.negatives import Negatives
    from ..evaluation.report import write_report
    from ..evaluation.systems.registry import load_system, parse
    from ..language_model.loading import LoadOptions

    measured, pictures = [], []
    with catch_errors():
        _check_outputs(output, report, umap)
        if threshold not in ("native", "shared"):
            _number(threshold)
        for name in model:
            parse(name)  # a wrong name is said before the data are read
        hard = None if negatives is None else Negatives.parse(negatives)
        logging.disable_progress_bar()
        options = LoadOptions(
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
        )
        sets = load_sets(data, limit=limit, negatives=hard, titles=titles, options=options)
        for name in dict.fromkeys(model):
            with problems.status(f"Loading {name} ..."):
                system = load_system(name, revision=revision, options=options)
            scored = _scored(name, system, sets, titles)
            measured.append(Measured(name, *_tau(threshold, system, list(scored.values())), scored))
            if umap:
                from ..reproduction.shift_map import shift_pictures

                pictures += shift_pictures(name, system, sets, titles=titles)
        records = [_records(found) for found in measured]
        if output is not None:
            _write(output, json.dumps([row for rows in records for row in rows], indent=2) + "\n")
        if report is not None:
            with problems.status("Writing the report ..."):
                write_report(report, measured, sets, titles=titles, pictures=pictures)
            problems.print(f"Report: {report / 'index.html'}", soft_wrap=True)
    for found, rows in zip(measured, records, strict=True):
        screen.print(evaluation_table(f"{found.name}, tau = {found.threshold:.4g} ({found.origin})", rows))


def _check_outputs(output: Path | None, report: Path | None, umap: bool) -> None:
    """Fail now and not after the work, where something is missing or cannot be written."""
    from ..evaluation.metrics import ranking_metrics
    from ..evaluation.report import check_report

    ranking_metrics([])
    if report is not None:
        check_report(report)
        if umap:
            from ..reproduction.shift_map import load_umap

            load_umap()
    elif umap:
        raise InputError("--umap draws into a report. Give --report DIR too.")
    if output is not None:
        _write(output, "")


def _scored(
    name: str, system: System, sets: Mapping[str, Sequence[LabelledQuery]], titles: bool
) -> dict[str, list[ScoredQuery]]:
    from ..evaluation.evaluate import score_dataset

    return {
        label: score_dataset(
            system, track(queries, description=f"{name}, {label}", console=problems, transient=True), titles=titles
        )
        for label, queries in sets.items()
    }


def _records(system: Measured) -> list[dict[str, str | int | float]]:
    """Metrics of each set."""
    from ..evaluation.evaluate import summarise

    return [
        {"model": system.name, **summarise(label, queries, threshold=system.threshold).as_dict()}
        for label, queries in system.scored.items()
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--threshold must be a number, 'native' or 'shared', got {text!r}.") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path} could not be written: {error}") from error


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Rerank documents for a query and drop the irrelevant ones at zero."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


if __name__ == "__main__":
    app()
