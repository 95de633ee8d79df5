"""Train B on stored features: `python -m research.decoders.train RECIPE FEATURES OUTPUT`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from pydantic import BaseModel, PositiveFloat, PositiveInt
from typing_extensions import Self

from rsrank_rag.artifact.card import model_card
from rsrank_rag.artifact.config import RSRankConfig, TrainingRecord
from rsrank_rag.artifact.hub import write_artifact
from rsrank_rag.artifact.identity import describe
from rsrank_rag.artifact.opening import open_model
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.best_rule import best_rule
from rsrank_rag.evaluation.metrics import ScoredQuery, present_means
from rsrank_rag.evaluation.statistics import folds
from rsrank_rag.method.template import Template
from rsrank_rag.partial_files import replacing
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.training.feature_scores import scored, split
from rsrank_rag.training.fit import FitOptions, Fitted, fit
from rsrank_rag.training.recipe import read_toml, validated
from rsrank_rag.training.store import QueryFeatures
from rsrank_rag.training.verdict import measure

from .ablations import first_layers
from .plan import Plan
from .store import Store

FOLDER = Path(__file__).with_name("recipes")


class DecoderRecipe(BaseModel, extra="forbid", frozen=True):
    """Which stored features train B, and how."""

    name: str
    plan: str
    sets: tuple[str, ...]
    """Names of the plan's training sets."""
    whole: bool = False
    """Whether only queries of which all documents have been read are used."""
    last_layer: PositiveInt | None = None
    """The last layer that B reads; None for the last one of the features."""
    validation: PositiveFloat = 0.1
    """Share of each set's queries that choose the epoch and the rule."""
    folds: PositiveInt | None = None
    """Number of folds of a cross-validation, in place of validation queries: each query is scored
    by a B that learned from the other folds. These scores choose the rule. The B of the artifact
    learns from all queries, and is that of the last epoch."""
    bits: Literal[4, 8, 16] = 4
    """Bits to which the weights of the language model had been rounded."""
    fit: FitOptions = FitOptions()
    license: str | None = None
    notes: str = ""

    @classmethod
    def load(cls, source: str) -> Self:
        """Read a recipe by its name or from a TOML file; InputError if it is not valid."""
        return validated(cls, read_toml(source, FOLDER, "recipe"), source, "recipe")


Sets = dict[str, list[QueryFeatures]]
"""Stored features of a recipe's queries, by set."""


@dataclass(frozen=True)
class Trained:
    """B, rounded to float16 as artifacts store B, and what chooses the rule.

    Attributes:
        projection: B.
        fitted: The training that B comes from.
        scores: Scores of queries by a B that did not learn from them, by set.
    """

    projection: Projection
    fitted: Fitted
    scores: dict[str, list[ScoredQuery]]


def read_sets(recipe: DecoderRecipe, store: Store) -> Sets:
    """Read the features of a recipe's queries that are there.

    Raises:
        InputError: The plan has no such training set, or fewer than two queries have been read.
    """
    files = Plan.load(recipe.plan).files("train")
    sets = {}
    for name in recipe.sets:
        if name not in files:
            raise InputError(f"The plan {recipe.plan!r} has no training set {name!r}.")
        queries = store.read(name, files[name].drawn(), whole=recipe.whole).values()
        sets[name] = first_layers(list(queries), recipe.last_layer)
        if len(sets[name]) < 2:
            raise InputError(f"{store.folder} has features of {len(sets[name])} queries of {name}.")
    return sets


def train(recipe: DecoderRecipe, sets: Sets, output: Path) -> Trained:
    """B of all layers but the first.

    Without folds, validation queries choose the epoch.
    """
    if recipe.folds is not None:
        scores = fold_scores(recipe, sets, recipe.folds)
        fitted = fit_b(recipe, list(chain(*sets.values())), [], output)
        return Trained(half(fitted.projection), fitted, scores)
    validation_places = {}
    for name, features in sets.items():
        validation_places[name] = split(len(features), recipe.validation, recipe.fit.seed)[1]
    training, validation = divided(sets, validation_places)
    fitted = fit_b(recipe, training, list(chain(*validation.values())), output)
    projection = half(fitted.projection)
    return Trained(projection, fitted, score_sets(projection, validation))


def fold_scores(recipe: DecoderRecipe, sets: Sets, count: int) -> dict[str, list[ScoredQuery]]:
    """Scores of all queries, each by the B that did not learn from the query's fold."""
    places = {name: folds(len(features), count) for name, features in sets.items()}
    scores: dict[str, list[ScoredQuery]] = {name: [] for name in sets}
    for number in range(count):
        fold = {}
        for name, of_set in places.items():
            # A set with fewer queries than folds has fewer folds.
            fold[name] = of_set[number] if number < len(of_set) else []
        training, validation = divided(sets, fold)
        projection = half(fit_b(recipe, training, [], None).projection)
        for name, rows in score_sets(projection, validation).items():
            scores[name] += rows
    return scores


def divided(sets: Sets, places: Mapping[str, Sequence[int]]) -> tuple[list[QueryFeatures], Sets]:
    """The features at other places than these, and by set the features at these places."""
    others: list[QueryFeatures] = []
    selected: Sets = {}
    for name, features in sets.items():
        selected[name] = [features[place] for place in places[name]]
        others += [query for place, query in enumerate(features) if place not in places[name]]
    return others, selected


def fit_b(
    recipe: DecoderRecipe,
    training: Sequence[QueryFeatures],
    validation: Sequence[QueryFeatures],
    output: Path | None,
) -> Fitted:
    """Train B of all layers but the first."""
    layers = range(1, 1 + len(training[0].shifts))
    return fit(training, validation, layers, recipe.fit, output=output)


def score_sets(projection: Projection, sets: Sets) -> dict[str, list[ScoredQuery]]:
    """Scores of stored features, by set."""
    weights = {"weight": projection.weight.detach()}
    return {name: scored(queries, weights) for name, queries in sets.items()}


def half(projection: Projection) -> Projection:
    """B rounded to float16, as shipped artifacts store it."""
    return Projection(projection.weight.detach().half().float(), projection.layers)


def rule_for(sets: Mapping[str, Sequence[ScoredQuery]]) -> Rule:
    """The best rule with the paper's threshold, zero. Each set of queries counts the same."""
    queries: list[ScoredQuery] = []
    weights: list[float] = []
    for rows in sets.values():
        queries += rows
        weights += [1 / len(rows)] * len(rows)
    return best_rule(queries, weights=np.array(weights), threshold=0.0)


def artifact_config(
    recipe: DecoderRecipe,
    model: str,
    projection: Projection,
    record: TrainingRecord,
    sets: dict[str, list[ScoredQuery]],
) -> RSRankConfig:
    """The config of an artifact that names the plan's language model and pins no hash.

    Args:
        recipe: The recipe.
        model: Folder or Hub id of the language model.
        projection: B.
        record: The data and settings of the training.
        sets: Scores of queries that were held out, which choose the rule.
    """
    part = Plan.load(recipe.plan).model
    template = Template()
    core, prompts = open_model(
        model, None, part.load_options(), last_layer=projection.layers[-1], template=template
    )
    spec = describe(core, prompts, part.name, part.revision, {})
    rule = rule_for(sets)
    return RSRankConfig(
        backbone=spec.model_copy(update={"bits": recipe.bits}),
        layers=projection.layers,
        projection_dim=recipe.fit.projection_dim,
        template=template,
        max_length=part.max_length,
        threshold=0.0,
        max_gap=rule.max_gap,
        fallback=rule.fallback,
        license=recipe.license,
        training=record,
    )


@command(resumes=False)
@click.argument("recipe")
@click.argument("features", type=PATH)
@click.argument("output", type=PATH)
@click.option("--model", help="Folder or Hub id of the language model instead of the plan's.")
def main(recipe: str, features: Path, output: Path, model: str | None) -> None:
    """Train B of RECIPE on FEATURES, and write an artifact into OUTPUT/artifact."""
    read = DecoderRecipe.load(recipe)
    sets = read_sets(read, Store(features))
    for name, features_of_set in sets.items():
        click.echo(f"{name}: {len(features_of_set)} queries")
    trained = train(read, sets, output / "fit")
    rows = list(chain(*trained.scores.values()))
    epoch = trained.fitted.best.epoch
    record = TrainingRecord(
        data=read.sets,
        seed=read.fit.seed,
        metrics={"queries held out, at zero": present_means(measure(rows))},
        settings={
            "queries": sum(len(features) for features in sets.values()),
            "queries held out": len(rows),
            "epoch": epoch,
            **changed(read.fit),
        },
        notes=read.notes,
    )
    model = model or Plan.load(read.plan).model.name
    config = artifact_config(read, model, trained.projection, record, trained.scores)
    with replacing(output / "artifact") as folder:
        write_artifact(folder, config, trained.projection.weights(), model_card(config))
    click.echo(f"epoch {epoch} of {len(trained.fitted.history)}: {output / 'artifact'}")


def changed(options: FitOptions) -> dict[str, Any]:
    """Settings of the training that are not the paper's."""
    return options.model_dump(exclude_defaults=True, exclude={"seed"})


if __name__ == "__main__":
    main()
