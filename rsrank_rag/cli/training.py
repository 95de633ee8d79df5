"""The ``rsrank`` commands that make artifacts: train, tune, push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Option

from ..errors import InputError
from ..language_model.options import LoadOptions
from .evaluation import evaluation_tables
from .options import Model, Revision, command, problems, screen

if TYPE_CHECKING:
    from ..training.domain import Verdict
    from ..training.run import Result

app = typer.Typer()


@command(app, resumes=True)
def train(
    config: Annotated[
        str, Option("--config", "-c", help="A recipe's name (above) or a TOML file.")
    ] = "your-data",
    base: Annotated[
        str | None, Option(help="Begin with this artifact's weights and stay near them.")
    ] = None,
    data: Annotated[
        list[Path] | None, Option(help="Labelled .jsonl(.gz) instead of the recipe's data.")
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="Folder for all that is made.")] = Path(
        "runs/rsrank"
    ),
    settings: Annotated[
        list[str] | None, Option("--set", help="Change an entry, such as fit.epochs=10.")
    ] = None,
    layers: Annotated[
        str | None, Option("--layers", help="Layers that B reads, such as 1-24 or 1-8,12.")
    ] = None,
    accept: Annotated[
        bool, Option("--accept", help="Write the trained weights even if the base was better.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print disk, memory and hours, and stop.")
    ] = False,
) -> None:
    """Run a recipe: data, features, B, evaluation, model card, artifact (OUTPUT/artifact).

    `rsrank train --config mini --data labelled.jsonl --output runs/mine`

    Recipes: mini, your-data, encoder. The same command goes on after an interruption.

    Training that begins with an artifact (the recipe mini, or `--base`) ends with a verdict: base against trained on
    queries left out of training. Where the base was better, its weights are what is written.

    Features too large? `--set features.max_tokens=8` keeps 8 tokens of each query, `--set features.max_documents=10`
    so many documents.
    """
    from ..training.recipe import Recipe
    from ..training.run import TrainingRun

    overrides = [*(settings or ()), *([] if layers is None else [f"features.layers={layers}"])]
    recipe = Recipe.load(config, overrides, data or (), base)
    run = TrainingRun(
        recipe, output, say=problems.print, progress=problems.is_terminal, accept=accept
    )
    if not dry_run:
        _show(run.run())
        return
    sources = ", ".join(part.title for part in recipe.data)
    screen.print(
        f"recipe       {recipe.name}: {recipe.model.name}\ndata         {sources}\n{run.estimate()}"
    )


@command(app)
def tune(
    load: LoadOptions,
    data: Annotated[Path, Option("--data", help="Labelled .jsonl(.gz).")],
    output: Annotated[
        Path, Option("--output", "-o", help="Folder for the artifact with the threshold.")
    ],
    model: Model = "mini",
    revision: Revision = None,
    precision: Annotated[
        float | None, Option(min=0, max=1, help="Wanted: the lowest threshold that has it.")
    ] = None,
    recall: Annotated[
        float | None, Option(min=0, max=1, help="Wanted: the highest threshold that has it.")
    ] = None,
) -> None:
    """Find the threshold for the best F1, or a wanted precision or recall, and write a copy of the artifact with it.

    `rsrank tune --model runs/mine/artifact --data labelled.jsonl --output runs/tuned --precision 0.8`
    """
    from ..training.tune import Goal, tune

    if precision is not None and recall is not None:
        raise InputError("Give --precision or --recall, not both.")
    goal = Goal() if recall is None else Goal("recall", recall)
    goal = goal if precision is None else Goal("precision", precision)
    with problems.status(f"Scoring {data} ..."):
        tuned = tune(model, data, output, goal, revision=revision, load=load)
    low, high = tuned.interval
    screen.print(
        f"threshold {tuned.threshold:.3f} for {goal} (95% of resamples: {low:.3f} to {high:.3f})"
    )
    _verdict(tuned.verdict, (f"at {tuned.before:g}", "tuned"), "Both on queries left out of tuning")
    screen.print(f"artifact: {output}")


def _show(result: Result) -> None:
    records = [
        {"dataset": dataset, **{name.replace("@0", "@tau"): value for name, value in row.items()}}
        for dataset, row in result.metrics.items()
    ]
    screen.print(*evaluation_tables("trained", "kept above 0", records), sep="\n")
    if result.verdict is not None:
        _verdict(result.verdict, ("base", "trained"), "Both on queries left out of training")
    screen.print(
        f"artifact: {result.artifact}\nTry it:   rsrank rank --model {result.artifact} -q ... -d FILE"
    )


def _verdict(verdict: Verdict, names: tuple[str, str], title: str) -> None:
    """Means of both, their difference with its interval, and the outcome."""
    table = Table(
        "",
        *names,
        "difference",
        "95% interval",
        title=f"{title}: {verdict.queries}",
        title_justify="left",
    )
    for name, found in verdict.difference.items():
        interval = "" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}"
        means = (f"{mean[name].mean:.3f}" for mean in (verdict.base, verdict.trained))
        table.add_row(name, *means, f"{found.mean:+.3f}", interval)
    screen.print(table)
    screen.print(f"verdict: {verdict.outcome}")


@command(app)
def push(
    artifact: Annotated[Path, typer.Argument(help="Folder of an artifact.")],
    repo_id: Annotated[
        str, typer.Argument(help="owner/name on the Hub; made if it does not exist.")
    ],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, Option(help="Branch; made if it does not exist.")] = None,
    message: Annotated[str, Option(help="First line of the commit.")] = "Upload RSRank projection",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the model card and the files, and stop.")
    ] = False,
) -> None:
    """Publish an artifact and its model card on the Hugging Face Hub (log in first: `hf auth login`).

    `rsrank push runs/mine/artifact me/my-reranker --dry-run`
    """
    from ..artifact import hub

    if not artifact.is_dir():
        raise InputError(
            f"{artifact} is no folder. Give the artifact folder that rsrank train made."
        )
    config = hub.read_config(artifact)
    hub.read_projection(artifact, config)
    hub.check_shareable(config, include_backbone=False)
    if not hub.is_hub_id(repo_id):
        raise InputError(f"{repo_id!r} cannot be a repository on the Hub. Give owner/name.")
    if not dry_run:
        screen.print(
            hub.push(
                artifact, repo_id, private=private, revision=revision, token=None, message=message
            )
        )
        return
    files = hub.contents(artifact, repo_id)
    typer.echo(bytes(files[hub.CARD]).decode())
    for name, content in files.items():
        typer.echo(
            f"{len(content) if isinstance(content, bytes) else content.stat().st_size:>13,} {name}"
        )
