"""The ``rsrank`` commands that make artifacts: features, train, push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..bulk.on_ray import Actors
from ..errors import InputError
from .options import command, problems, screen
from .tables import evaluation_tables

if TYPE_CHECKING:
    from ..training.recipe import Recipe
    from ..training.run import Result, TrainingRun

app = typer.Typer()

Config = Annotated[str, Option("--config", "-c", help="qwen3-8b, qwen3-0.6b, mini, your-data, or a TOML file.")]
Data = Annotated[list[Path] | None, Option("--data", help="Labelled .jsonl(.gz) instead of the recipe's data.")]
Output = Annotated[Path, Option("--output", "-o", help="Folder for features, checkpoint, figures and artifact.")]
Setting = Annotated[list[str] | None, Option("--set", help="Change one entry of the recipe, such as fit.epochs=10.")]
Layers = Annotated[str | None, Option("--layers", help="Layers that B reads, such as 1-24 or 1-8,12.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print disk, memory and hours, and stop.")]


def _training(
    config: str, data: list[Path] | None, output: Path, settings: list[str] | None, layers: str | None
) -> TrainingRun:
    from ..reproduction.closed_form import closed_form
    from ..training.recipe import Recipe
    from ..training.run import TrainingRun

    overrides = [*(settings or ()), *([] if layers is None else [f"features.layers={layers}"])]
    recipe = Recipe.load(config, overrides, data or ())
    return TrainingRun(recipe, output, say=problems.print, progress=problems.is_terminal, closed_form=closed_form)


def _plan(run: TrainingRun) -> None:
    recipe: Recipe = run.recipe
    sources = ", ".join(f"{part.title} (about)" if part.dataset else part.title for part in recipe.data)
    screen.print(f"recipe       {recipe.name}: {recipe.model.name}, {recipe.method}\ndata         {sources}")
    screen.print(str(run.estimate()))


@command(app, resumes=True)
def features(
    actors: Actors | None,
    config: Config = "your-data",
    data: Data = None,
    output: Output = Path("runs/rsrank"),
    settings: Setting = None,
    layers: Layers = None,
    dry_run: DryRun = False,
) -> None:
    """Read the shifts of labelled queries from the frozen language model, into OUTPUT/features.

    A run that was interrupted goes on where it stopped. Several GPUs:
    `accelerate launch --num_processes 4 -m rsrank_rag features ...`, or several machines: `--engine ray`.

    Too large? `--set features.max_tokens=8` keeps 8 tokens of each query, `--set features.max_documents=10` so many
    documents.
    """
    run = _training(config, data, output, settings, layers)
    if dry_run:
        _plan(run)
        return
    if actors is None:
        store = run.extract()
    else:
        from ..bulk.on_ray import features_on

        store = features_on(actors, run.recipe, output)
    screen.print(f"{len(store):,} queries in {store.folder}")


@command(app, resumes=True)
def train(
    config: Config = "your-data",
    data: Data = None,
    output: Output = Path("runs/rsrank"),
    settings: Setting = None,
    layers: Layers = None,
    features: Annotated[Path | None, Option(help="Train on this feature store, without the language model.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe: data, features, B, evaluation, model card, artifact (OUTPUT/artifact).

    `rsrank train --config your-data --data labelled.jsonl --output runs/mine`

    The same command goes on after an interruption.
    """
    run = _training(config, data, output, settings, layers)
    if dry_run:
        _plan(run)
        return
    if features is None:
        result = run.run()
    else:
        from ..training.store import FeatureStore

        result = run.run_from(FeatureStore(features))
    _show(result)


def _show(result: Result) -> None:
    records = [
        {"dataset": dataset, **{name.replace("@0", "@tau"): value for name, value in row.items()}}
        for dataset, row in result.metrics.items()
    ]
    screen.print(*evaluation_tables("trained", "kept above 0", records), sep="\n")
    screen.print(f"artifact: {result.artifact}\nTry it:   rsrank rank --model {result.artifact} -q ... -d FILE")


@command(app)
def push(
    artifact: Annotated[Path, typer.Argument(help="Folder of an artifact.")],
    repo_id: Annotated[str, typer.Argument(help="owner/name on the Hub; made if it does not exist.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, Option(help="Branch; made if it does not exist.")] = None,
    message: Annotated[str, Option(help="First line of the commit.")] = "Upload RSRank projection",
    dry_run: Annotated[bool, Option("--dry-run", help="Show the model card and the files, and stop.")] = False,
) -> None:
    """Publish an artifact and its model card on the Hugging Face Hub (log in first: `hf auth login`).

    `rsrank push runs/mine/artifact me/my-reranker --dry-run`
    """
    from ..artifact import hub

    if not artifact.is_dir():
        raise InputError(f"{artifact} is no folder. Give the artifact folder that rsrank train made.")
    config = hub.read_config(artifact)
    hub.read_projection(artifact, config)
    hub.check_shareable(config, include_backbone=False)
    if not hub.is_hub_id(repo_id):
        raise InputError(f"{repo_id!r} cannot be a repository on the Hub. Give owner/name.")
    if not dry_run:
        screen.print(hub.push(artifact, repo_id, private=private, revision=revision, token=None, message=message))
        return
    files = hub.contents(artifact, repo_id)
    typer.echo(bytes(files[hub.CARD]).decode())
    for name, content in files.items():
        typer.echo(f"{len(content) if isinstance(content, bytes) else content.stat().st_size:>13,} {name}")
