"""`rsrank train` with recipes whose data are sets by name: python -m research.train --help."""

from collections.abc import Sequence
from pathlib import Path

import click
from click import option

from rsrank_rag.cli.arguments import PATH, command, on_terminal
from rsrank_rag.cli.training import dry_run_option

from .estimate import estimate_recipe
from .features import ResearchRun
from .recipe import ResearchRecipe


@command(resumes=True)
@option("--config", "-c", default="qwen3-0.6b", help="qwen3-8b, qwen3-0.6b, or a TOML file.")
@option("--output", "-o", type=PATH, default="runs/research", help="Folder for all that is made.")
@option("--set", "settings", multiple=True, help="Change an entry, such as fit.epochs=10.")
@dry_run_option
def train(config: str, output: Path, settings: Sequence[str], dry_run: bool) -> None:
    """Run a recipe whose data are sets of the Hub, and print where its artifact is.

    `python -m research.train --config qwen3-8b --output runs/qwen3-8b`
    """
    recipe = ResearchRecipe.load(config, settings)
    if dry_run:
        click.echo(str(estimate_recipe(recipe)))
        return
    run = ResearchRun(recipe, output, progress=on_terminal())
    result = run.run()
    click.echo(f"written: {result.written}\nartifact: {run.artifact}")


if __name__ == "__main__":
    train()
