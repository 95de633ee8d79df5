"""The ``rsrank`` commands that make artifacts: train, tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from ..errors import InputError, TrainingError
from ..evaluation.metrics import plain
from ..language_model.options import LoadOptions, ModelSource
from .options import Revision, System, command, problems, screen

if TYPE_CHECKING:
    from ..training.tune import Tuned
    from ..training.verdict import Verdict

app = typer.Typer()


@command(app, resumes=True)
def train(
    config: Annotated[
        str, Option("--config", "-c", help="A recipe's name (above) or a TOML file.")
    ] = "your-data",
    base: Annotated[str | None, Option(help="Fine-tune this artifact.")] = None,
    data: Annotated[
        list[Path] | None, Option("--data", help="Labelled .jsonl(.gz) instead of the recipe's.")
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="Folder for all that is made.")] = Path(
        "runs/rsrank"
    ),
    settings: Annotated[
        list[str] | None, Option("--set", help="Change an entry, such as fit.epochs=10.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Write fine-tuned weights even if they may lose something.")
    ] = False,
) -> None:
    """Run a recipe: read data and features, train weights, write the artifact (OUTPUT/artifact).

    `rsrank train --config mini --data labelled.jsonl --output runs/mine`

    Recipes: mini, your-data, encoder. The same command goes on after an interruption.

    Fine-tuning an artifact (the recipe mini, or `--base`) ends with a verdict: the artifact's
    weights against fine-tuned ones, on queries left out of training. The artifact's own weights are
    written if fine-tuning gains too little, or loses nDCG@5, precision, recall, F1 or answers
    beyond chance, or if one of these counts fewer than 10 queries, or if there are fewer than 100
    queries. Training measures in float32 and cuts long documents; `rsrank evaluate` measures the
    artifact as it runs.
    """
    from ..training.recipe import Recipe
    from ..training.run import TrainingRun
    from ..training.verdict import MEASURES

    recipe = Recipe.load(config, settings or (), data or (), base)
    run = TrainingRun(
        recipe,
        output,
        progress=problems.is_terminal,
        force=force,
    )
    result = run.run()
    if result.verdict is None:
        for name, value in result.metrics.items():
            screen.print(f"{value:.3f} {MEASURES[name]}, on validation queries")
    else:
        show_verdict(result.verdict, ("base", "fine-tuned"))
        screen.print(f"verdict on the fine-tuned weights: {result.verdict}", soft_wrap=True)
    screen.print(f"written: {result.written}", soft_wrap=True)
    if result.problem and not force:
        screen.print("--force writes the fine-tuned weights.")
    screen.print(
        f"artifact: {run.artifact}\nTry it:   rsrank rank --model {run.artifact} -q ... -d FILE"
    )


@command(app)
def tune(
    load: LoadOptions,
    data: Annotated[Path, Option("--data", help="Labelled .jsonl(.gz).")],
    output: Annotated[
        Path,
        Option("--output", "-o", help="Folder for the artifact; for another system, NAME.json."),
    ],
    model: System = "mini",
    revision: Revision = None,
    precision: Annotated[
        float | None,
        Option(
            min=0, max=1, help="Goal: of thresholds with this precision, the one that keeps most."
        ),
    ] = None,
    recall: Annotated[
        float | None,
        Option(
            min=0, max=1, help="Goal: of thresholds with this recall, the one that keeps fewest."
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Write the artifact even if the goal is not reached.")
    ] = False,
) -> None:
    """Write a copy of an artifact with the threshold for the best F1, or for a precision or recall.

    `rsrank tune --model mini --data labelled.jsonl --output runs/tuned --precision 0.8`

    For another system, such as `cross-encoder:NAME`, the output is a file `NAME.json`. That file
    can be named wherever such a system can be named: it stands for the system with this threshold.

    Nothing is written if no threshold reaches the goal, or if queries that did not choose the
    threshold miss the goal: F1 is lower and the threshold would change, or precision or recall is
    missed beyond chance, or missed at all if fewer than 10 queries count.
    """
    from ..training.tune import Goal, tune

    source = ModelSource(model, revision, load)
    if precision is not None and recall is not None:
        raise InputError("Give --precision or --recall, not both.")
    goal = Goal()
    if recall is not None:
        goal = Goal("recall", recall)
    elif precision is not None:
        goal = Goal("precision", precision)
    with problems.status(Text(f"Scoring {data} ...")):
        tuned = tune(source, data, output, goal, force=force, show=show_tuned)
    if tuned.problem and not force:
        raise TrainingError(f"Nothing was written: {tuned.problem}. --force writes it.")
    screen.print(f"written: threshold {plain(tuned.threshold)}, in {output}", soft_wrap=True)


def show_tuned(tuned: Tuned) -> None:
    """Print a threshold, and what it changes."""
    screen.print(tuned.summary, soft_wrap=True)
    if tuned.is_new:
        show_verdict(tuned.verdict, ("so far", "tuned"))
        screen.print(
            f"what changes on queries that were left out (the goal decides): {tuned.verdict}",
            soft_wrap=True,
        )


def show_verdict(verdict: Verdict, names: tuple[str, str]) -> None:
    """Print the means of both sides and their differences, with intervals."""
    from ..training.verdict import MEASURES

    title = (
        f"Measured on queries that were left out: {verdict.queries}. Precision counts those that "
        "keep something, recall those with an answer. With 95% intervals, if 10 or more count "
        "and not all agree."
    )
    table = Table("", *names, "difference", title=title, title_justify="left")
    for name, words in MEASURES.items():
        columns = (verdict.before, verdict.after, verdict.difference)
        table.add_row(words, *[str(column.get(name, "-")) for column in columns])
    screen.print(table)
