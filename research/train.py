"""`rsrank train` with recipes whose data are sets by name: python -m research.train --help."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rsrank_rag.cli.options import command, problems, screen

from .features import ResearchRun
from .recipe import ResearchRecipe

app = typer.Typer()


@command(app, resumes=True)
def train(
    config: Annotated[
        str, Option("--config", "-c", help="qwen3-8b, qwen3-0.6b, or a TOML file.")
    ] = "qwen3-0.6b",
    output: Annotated[Path, Option("--output", "-o", help="Folder for all that is made.")] = Path(
        "runs/research"
    ),
    settings: Annotated[
        list[str] | None, Option("--set", help="Change an entry, such as fit.epochs=10.")
    ] = None,
) -> None:
    """Run a recipe whose data are sets of the Hub, and print where its artifact is.

    `python -m research.train --config qwen3-8b --output runs/qwen3-8b`
    """
    recipe = ResearchRecipe.load(config, settings or ())
    run = ResearchRun(recipe, output, progress=problems.is_terminal)
    result = run.run()
    screen.print(f"written: {result.written}\nartifact: {run.artifact}", soft_wrap=True)


if __name__ == "__main__":
    app()
