"""The ``rsrank`` command for many pairs: score."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..adapters.systems import load as load_reranker
from ..bulk.on_ray import Actors
from ..language_model.options import LoadOptions, ModelSource
from .console import problems, screen
from .options import Revision, System, command

if TYPE_CHECKING:
    from ..bulk.files import Plan

app = typer.Typer()


@command(app)
def score(
    source: Annotated[
        str, typer.Option("--input", "-i", help="A .jsonl(.gz) or .parquet file, a folder or a pattern.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the Parquet files.")],
    load: LoadOptions,
    actors: Actors | None,
    model: System = "mini",
    revision: Revision = None,
    rows_per_part: Annotated[
        int, typer.Option(help="Rows of an output file: what a killed process loses at most.")
    ] = 10_000,
    prefixes: Annotated[
        Path | None, typer.Option("--prefixes", "-p", help="Folder with documents read ahead of time (rsrank index).")
    ] = None,
) -> None:
    """Score many pairs: JSON lines or Parquet in, Parquet out. The same command goes on after an interruption.

    A row has a "query" and either a "document" or "documents" (a list); anything else is carried along. Added are
    score, kept (above the model's threshold), truncated, and error: why a pair has no score, else null.

    `rsrank score --input pairs.jsonl --output scored`

    `rsrank score --input pairs/ --output scored --engine ray --gpus-per-actor 1 --address auto`
    """
    from ..bulk.run import model_identity, score_files

    # Nothing is kept between parts unless asked for: a part's scores must not depend on what was done before.
    kept = False if prefixes is None else str(prefixes.absolute())
    settings = {
        "dtype": load.dtype,
        "load_in_8bit": load.weights == "int8",
        "load_in_4bit": load.weights == "nf4",
        **({"load_in_fp8": True} if load.weights == "fp8" else {}),  # outputs begun before there was fp8 can go on
        "prefixes": prefixes is not None,
    }
    found = score_files(
        source,
        output,
        partial(load_reranker, ModelSource(model, revision, load, prefix_cache=kept)),
        model=model_identity(model, revision=revision, local_files_only=load.local_files_only),
        settings=settings,
        rows_per_part=rows_per_part,
        actors=actors,
        progress=_progress,
    )
    errors = f", {found.errors:,} of them without a score (column error)" if found.errors else ""
    earlier = f" ({found.found:,} were there)" if found.found else ""
    screen.print(f"{found.rows:,} rows, {found.pairs:,} pairs{errors}, in {found.parts:,} files{earlier} of {output}")


def _progress(plan: Plan, done: Iterable[int]) -> Iterable[int]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(part.rows for part in plan.parts)
    columns = (TextColumn("Scoring"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=problems, disable=not problems.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for rows in done:
            bar.advance(task, rows)
            yield rows
