"""The ``rsrank`` command for many pairs, score, and the options of all commands that work on Ray."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import catch_errors, problems, screen
from .options import Device, Dtype, EightBit, FourBit, Fp8, Offline, Revision, System
from .service import Address, Loader, Where

if TYPE_CHECKING:
    from ..bulk.files import Plan
    from ..bulk.on_ray import Actors

app = typer.Typer()


Engine = Annotated[Where, typer.Option("--engine", help="local: in this process. ray: by actors on a Ray cluster.")]
Count = Annotated[int | None, typer.Option("--actors", help="With ray: how many. Default: as many as have room.")]
Cpus = Annotated[float, typer.Option("--cpus-per-actor", help="With ray: CPU cores, and threads on a CPU, of each.")]
Gpus = Annotated[float, typer.Option("--gpus-per-actor", help="With ray: GPUs of each, such as 1 or 0.5.")]


def chosen(engine: Where, count: int | None, cpus: float, gpus: float, address: str | None) -> Actors | None:
    """The actors that were asked for; None to work in this process."""
    from ..bulk.on_ray import Actors

    return Actors(count, cpus, gpus, address) if engine is Where.ray else None


@app.command()
def score(
    source: Annotated[
        str, typer.Option("--input", "-i", help="A .jsonl(.gz) or .parquet file, a folder or a pattern.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the Parquet files.")],
    model: System = "mini",
    engine: Engine = Where.local,
    actors: Count = None,
    cpus_per_actor: Cpus = 1.0,
    gpus_per_actor: Gpus = 0.0,
    address: Address = None,
    rows_per_part: Annotated[
        int, typer.Option(help="Rows of an output file: what a killed process loses at most.")
    ] = 10_000,
    prefixes: Annotated[
        Path | None, typer.Option("--prefixes", "-p", help="Folder with documents read ahead of time (rsrank index).")
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
) -> None:
    """Score many pairs: JSON lines or Parquet in, Parquet out. The same command goes on after an interruption.

    A row has a "query" and either a "document" or "documents" (a list); anything else is carried along. Added are
    score, kept (above the model's threshold), truncated, and error: why a pair has no score, else null.

    `rsrank score --input pairs.jsonl --output scored`

    `rsrank score --input pairs/ --output scored --engine ray --gpus-per-actor 1 --address auto`
    """
    with catch_errors():
        from ..bulk.run import model_identity, score_files

        loader = Loader(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            # Nothing is kept between parts unless asked for: a part's scores must not depend on what was done before.
            prefix_cache=False if prefixes is None else str(prefixes.absolute()),
        )
        settings = {
            "dtype": dtype,
            "load_in_8bit": load_in_8bit,
            "load_in_4bit": load_in_4bit,
            **({"load_in_fp8": True} if load_in_fp8 else {}),  # outputs begun before there was fp8 can be gone on with
            "prefixes": prefixes is not None,
        }
        found = score_files(
            source,
            output,
            loader,
            model=model_identity(model, revision=revision, local_files_only=local_files_only),
            settings=settings,
            rows_per_part=rows_per_part,
            actors=chosen(engine, actors, cpus_per_actor, gpus_per_actor, address),
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
