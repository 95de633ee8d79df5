"""The ``rsrank`` commands that make artifacts: train, tune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import echo, option

from ..errors import BackboneError, TrainingError, needs
from ..training.verdict import MEASURES, RULE_MEASURES, Verdict
from .arguments import (
    PATH,
    ModelOptions,
    command,
    model_option,
    on_terminal,
    print_table,
    show_waiting,
)

if TYPE_CHECKING:
    from ..training.tune import Tuned


dry_run_option = option(
    "--dry-run", is_flag=True, help="Say what it will take on this machine, and stop."
)


@command(resumes=True)
@option("--config", "-c", default="your-data", help="A recipe's name (above) or a TOML file.")
@option("--base", help="Fine-tune this artifact.")
@option("--data", type=PATH, multiple=True, help="Labelled .jsonl(.gz) instead of the recipe's.")
@option("--output", "-o", type=PATH, default="runs/rsrank", help="Folder for all that is made.")
@option("--set", "settings", multiple=True, help="Change an entry, such as fit.epochs=10.")
@option("--force", is_flag=True, help="Write fine-tuned weights even if they may lose something.")
@dry_run_option
def train(
    config: str,
    base: str | None,
    data: Sequence[Path],
    output: Path,
    settings: Sequence[str],
    force: bool,
    dry_run: bool,
) -> None:
    """Run a recipe: read data and features, train weights, write the artifact (OUTPUT/artifact).

    `rsrank train --config mini --data labelled.jsonl --output runs/mine`

    Recipes: mini, your-data, encoder. The same command goes on after an interruption.

    Fine-tuning an artifact (the recipe mini, or `--base`) ends with a verdict: the artifact's
    weights against fine-tuned ones, on queries left out of training. Fine-tuned weights are written
    if there are 100 queries or more, and of nDCG@5, precision, recall, F1 and answers lost, one is
    better beyond chance, none is worse, and none counts fewer than 10 queries. Training measures in
    float32 and cuts long documents; `rsrank evaluate` measures the artifact as it runs.
    """
    with needs("Training needs {}.", "train", "torch", "transformers"):
        from ..training.recipe import Recipe
        from ..training.run import TrainingRun

    recipe = Recipe.load(config, settings, data, base)
    if dry_run:
        # Nothing is downloaded only to say what a training will take.
        local = recipe.model.model_copy(update={"local_files_only": True})
        recipe = recipe.model_copy(update={"model": local})
    run = TrainingRun(recipe, output, progress=on_terminal(), force=force)
    if dry_run:
        try:
            echo(str(run.estimate()))
        except BackboneError as error:
            raise BackboneError(
                f"{error} A dry run downloads nothing. Download the language model first, with "
                "`hf download NAME`."
            ) from error
        return
    result = run.run()
    if result.verdict is None:
        for name, value in result.config.training.metrics["held out"].items():
            echo(f"{value:.3f} {MEASURES[name]}, on validation queries")
    else:
        show_verdict(result.verdict, ("base", "fine-tuned"))
        echo(f"verdict on the fine-tuned weights: {result.verdict}")
    echo(f"written: {result.written}")
    if result.problem and not force:
        echo("--force writes the fine-tuned weights.")
    echo(f"artifact: {run.artifact}\nTry it:   rsrank rank --model {run.artifact} -q ... -d FILE")


@command()
@option("--data", type=PATH, required=True, help="Labelled .jsonl(.gz).")
@option(
    "--output",
    "-o",
    type=PATH,
    required=True,
    help="Folder for the artifact; for another system, NAME.json.",
)
@model_option
@option(
    "--lost",
    type=click.FloatRange(0, 1),
    help="Goal: at most this share of the answers lost. Default: the share so far, at most 0.1.",
)
@option(
    "--recall",
    type=click.FloatRange(0, 1),
    help="Goal: at least this mean recall. Default: the recall so far, at most 0.8.",
)
@option("--force", is_flag=True, help="Write the rule even if it may do harm.")
def tune(
    data: Path,
    output: Path,
    model: str,
    options: ModelOptions,
    lost: float | None,
    recall: float | None,
    force: bool,
) -> None:
    """Write a copy of an artifact with the best rule for a goal: threshold, gap and fallback.

    `rsrank tune --model mini --data labelled.jsonl --output runs/tuned --lost 0.05`

    Of the rules that reach the goal, the best one keeps the fewest passages. An answer is lost if a
    query has a relevant passage and no relevant one is kept. For another system, such as
    `cross-encoder:NAME`, the output is a file `NAME.json`. That file can be named wherever such a
    system can be named: it stands for the system with this rule.

    Nothing is written if, on queries that did not choose the rule, nothing is better beyond chance,
    answers are lost beyond chance, more are lost than the goal allows and than so far, or recall
    falls beyond chance below the goal.
    """
    from ..training.tune import tune

    show_waiting(f"Scoring {data} ...")
    source = options.source(model)
    tuned = tune(source, data, output, lost=lost, recall=recall, force=force, show=show_tuned)
    if tuned.problem and not force:
        raise TrainingError(f"Nothing was written: {tuned.problem}. --force writes it.")
    echo(f"written: {tuned.rule}, in {output}")


def show_tuned(tuned: Tuned) -> None:
    """Print a rule, and what it changes."""
    echo(tuned.summary)
    show_verdict(tuned.verdict, ("so far", "tuned"))
    echo(f"what changes on queries that were left out: {tuned.verdict}")


def show_verdict(verdict: Verdict, names: tuple[str, str]) -> None:
    """Print the means of both sides and their differences, with intervals."""
    title = (
        f"Measured on queries that were left out: {verdict.queries}. Precision counts those that "
        "keep something, recall and answers lost those with an answer. With 95% intervals, if 10 "
        "or more count and not all agree."
    )
    columns = (verdict.before, verdict.after, verdict.difference)
    rows = []
    for name in verdict.after:
        words = (MEASURES | RULE_MEASURES)[name]
        rows.append((words, *[str(column.get(name, "-")) for column in columns]))
    print_table(title, ("", *names, "difference"), rows)


COMMANDS = (train, tune)
