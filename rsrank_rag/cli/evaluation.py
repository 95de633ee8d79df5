"""The ``rsrank`` command that makes the paper's tables and figures anew: reproduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from ..evaluation.systems.registry import forms
from .console import catch_errors, problems, screen
from .options import Device, Dtype, EightBit, FourBit, Fp8, Offline

if TYPE_CHECKING:
    from ..evaluation.datasets import LabelledQuery

app = typer.Typer()

NEGATIVES = "Irrelevant documents of each query anew: bm25, dense, dense:ENCODER or random."


@app.command()
def reproduce(
    config: Annotated[str, typer.Option("--config", "-c", help="paper, local, or a TOML file.")] = "local",
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Labelled files, or folders of them, instead of the configuration's sets."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The RSRank artifact to measure.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"One more system: {forms()}. May be given again.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for scores, tables and figures.")] = Path(
        "runs/reproduction"
    ),
    negatives: Annotated[str | None, typer.Option(help=NEGATIVES)] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="At most so many of each set.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    load_in_8bit: EightBit = False,
    load_in_4bit: FourBit = False,
    load_in_fp8: Fp8 = False,
    local_files_only: Offline = False,
) -> None:
    """Make the paper's tables and figures for an artifact, into OUTPUT/tables.md and OUTPUT/report.

    `rsrank reproduce --config paper --model me/my-artifact --dry-run`

    `rsrank reproduce --config local --data dev --model mini`

    A run that was interrupted goes on where it stopped. What cannot be loaded is named, and the others still run.
    """
    from transformers.utils import logging

    from ..language_model.loading import LoadOptions
    from ..reproduction.run import Reproduction, plan
    from ..reproduction.run import reproduce as run

    logging.disable_progress_bar()
    with catch_errors():
        chosen = Reproduction.load(
            config,
            data=data or (),
            artifact=model,
            systems=system or (),
            negatives=negatives,
            queries=queries,
        )
        if dry_run:
            screen.print(plan(chosen), soft_wrap=True)
            return

        def watch(found: Sequence[LabelledQuery], what: str) -> Iterable[LabelledQuery]:
            return track(found, description=what, console=problems, transient=True)

        options = LoadOptions(
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
        )
        outcome = run(chosen, output, options=options, say=lambda text: problems.print(text, markup=False), watch=watch)
    screen.print(f"{outcome.tables}\n{output / 'report' / 'index.html'}", soft_wrap=True)
    if outcome.failures:
        problems.print(f"{len(outcome.failures)} part(s) failed; they are named in {outcome.tables}.", soft_wrap=True)
        raise typer.Exit(1)
