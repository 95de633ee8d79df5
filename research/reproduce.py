"""Make the paper's tables and figures for an artifact: python -m research.reproduce --help."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from typer import Option

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from rsrank_rag.adapters.systems import forms
from rsrank_rag.cli.options import command, problems, screen
from rsrank_rag.language_model.options import LoadOptions

app = typer.Typer()

Negatives = Annotated[
    str | None, Option(help="New irrelevant documents: bm25, dense, dense:ENCODER or random.")
]

# Iterates over queries and shows a progress bar until all are scored.
watched = partial(track, console=problems, transient=True)


@command(app, resumes=True)
def reproduce(
    load: LoadOptions,
    config: Annotated[
        str, Option("--config", "-c", help="paper, local, or a TOML file.")
    ] = "local",
    data: Annotated[
        list[Path] | None, Option("--data", help="Labelled files or folders instead of the sets.")
    ] = None,
    model: Annotated[
        str | None, Option("--model", "-m", help="The RSRank artifact to measure.")
    ] = None,
    system: Annotated[
        list[str] | None, Option(help=f"One more system: {forms()}. May be given again.")
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", help="Folder for scores, tables and figures.")
    ] = Path("runs/reproduction"),
    negatives: Negatives = None,
    queries: Annotated[int | None, Option(min=1, help="At most so many of each set.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Make the paper's tables and figures for an artifact, into OUTPUT/tables.md and OUTPUT/report.

    `python -m research.reproduce --config paper --model me/my-artifact --dry-run`

    `python -m research.reproduce --config local --data dev --model mini`

    A run that was interrupted goes on where it stopped. What cannot be loaded is named, and the
    others still run.
    """
    from .reproduction.config import Reproduction, plan
    from .reproduction.run import reproduce as run

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

    outcome = run(
        chosen,
        output,
        options=load,
        say=lambda text: problems.print(text),
        watch=watched,
    )
    screen.print(f"{outcome.tables}\n{output / 'report' / 'index.html'}", soft_wrap=True)
    if outcome.failures:
        problems.print(
            f"{len(outcome.failures)} part(s) failed; they are named in {outcome.tables}.",
            soft_wrap=True,
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
