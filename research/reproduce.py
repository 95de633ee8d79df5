"""Make the paper's tables and figures for an artifact: python -m research.reproduce --help."""

from collections.abc import Sequence
from pathlib import Path

import click
from click import option

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from rsrank_rag.adapters.kinds import forms
from rsrank_rag.backends.options import LoadSettings
from rsrank_rag.cli.arguments import PATH, command, progress


@command(resumes=True)
@option("--config", "-c", default="local", help="paper, local, or a TOML file.")
@option("--data", type=PATH, multiple=True, help="Labelled files or folders instead of the sets.")
@option("--model", "-m", help="The RSRank artifact to measure.")
@option("--system", multiple=True, help=f"One more system: {forms()}. May be given again.")
@option(
    "--output",
    "-o",
    type=PATH,
    default="runs/reproduction",
    help="Folder for scores, tables and figures.",
)
@option("--negatives", help="New irrelevant documents: bm25, dense, dense:ENCODER or random.")
@option("--queries", type=click.IntRange(1), help="At most so many of each set.")
@option("--dry-run", is_flag=True, help="Print the plan and stop.")
def reproduce(
    load: LoadSettings,
    config: str,
    data: Sequence[Path],
    model: str | None,
    system: Sequence[str],
    output: Path,
    negatives: str | None,
    queries: int | None,
    dry_run: bool,
) -> None:
    """Make the paper's tables and figures for an artifact, into OUTPUT/tables.md.

    `python -m research.reproduce --config paper --model me/my-artifact --dry-run`

    `python -m research.reproduce --config local --data dev --model mini`

    A run that was interrupted goes on where it stopped. The tables name what could not be loaded,
    and the others still run.
    """
    from .reproduction.config import Reproduction, plan
    from .reproduction.run import reproduce as run

    configuration = Reproduction.load(
        config,
        data=data,
        artifact=model,
        systems=system,
        negatives=negatives,
        queries=queries,
    )
    if dry_run:
        click.echo(plan(configuration))
        return

    outcome = run(
        configuration,
        output,
        options=load.load_options(),
        say=lambda text: click.echo(text, err=True),
        watch=progress,
    )
    click.echo(outcome.tables)
    if outcome.failures:
        click.echo(
            f"{len(outcome.failures)} part(s) failed; they are named in {outcome.tables}.", err=True
        )
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    reproduce()
