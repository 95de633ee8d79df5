"""Train B on stored features: `python -m research.decoders.train RECIPE FEATURES OUTPUT`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from pydantic import BaseModel, PositiveFloat, PositiveInt
from torch import Tensor
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
    bits: Literal[4, 8, 16] = 4
    """Bits to which the weights of the language model had been rounded."""
    fit: FitOptions = FitOptions()
    license: str | None = None
    notes: str = ""

    @classmethod
    def load(cls, source: str) -> Self:
        """Read a recipe by its name or from a TOML file; InputError if it is not valid."""
        return validated(cls, read_toml(source, FOLDER, "recipe"), source, "recipe")


@dataclass
class TrainingSets:
    """Stored features of a recipe's queries, and their split.

    Attributes:
        training: Features that train B.
        validation: Features that choose the epoch and the rule, by set.
    """

    training: list[QueryFeatures] = field(default_factory=list)
    validation: dict[str, list[QueryFeatures]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def held_out(self) -> list[QueryFeatures]:
        """The validation queries of all sets."""
        return list(chain(*self.validation.values()))


def read_sets(recipe: DecoderRecipe, store: Store) -> TrainingSets:
    """Read and split the features of a recipe's queries that are there.

    Raises:
        InputError: The plan has no such training set, or fewer than two queries have been read.
    """
    files = Plan.load(recipe.plan).files("train")
    sets = TrainingSets()
    for name in recipe.sets:
        if name not in files:
            raise InputError(f"The plan {recipe.plan!r} has no training set {name!r}.")
        queries = store.read(name, files[name].drawn(), whole=recipe.whole).values()
        features = first_layers(list(queries), recipe.last_layer)
        if len(features) < 2:
            raise InputError(f"{store.folder} has features of {len(features)} queries of {name}.")
        training, validation = split(len(features), recipe.validation, recipe.fit.seed)
        sets.counts[name] = len(features)
        sets.training += [features[number] for number in training]
        sets.validation[name] = [features[number] for number in validation]
    return sets


def train(recipe: DecoderRecipe, sets: TrainingSets, output: Path) -> Fitted:
    """B of all layers but the first, with the epoch that is best on the validation queries."""
    layers = range(1, 1 + len(sets.training[0].shifts))
    return fit(sets.training, sets.held_out, layers, recipe.fit, output=output)


def score_sets(
    weights: dict[str, Tensor], sets: dict[str, list[QueryFeatures]]
) -> dict[str, list[ScoredQuery]]:
    """Scores of stored features, by set."""
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
        sets: Scored validation queries, which choose the rule.
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
    click.echo(f"queries: {sets.counts}")
    fitted = train(read, sets, output / "fit")
    projection = half(fitted.projection)
    held_out = score_sets({"weight": projection.weight.detach()}, sets.validation)
    rows = list(chain(*held_out.values()))
    record = TrainingRecord(
        data=read.sets,
        seed=read.fit.seed,
        metrics={"validation queries, at zero": present_means(measure(rows))},
        settings={
            "queries": sum(sets.counts.values()),
            "validation queries": len(sets.held_out),
            "epoch": fitted.best.epoch,
            **changed(read.fit),
        },
        notes=read.notes,
    )
    model = model or Plan.load(read.plan).model.name
    config = artifact_config(read, model, projection, record, held_out)
    with replacing(output / "artifact") as folder:
        write_artifact(folder, config, projection.weights(), model_card(config))
    click.echo(f"epoch {fitted.best.epoch} of {len(fitted.history)}: {output / 'artifact'}")


def changed(options: FitOptions) -> dict[str, Any]:
    """Settings of the training that are not the paper's."""
    return options.model_dump(exclude_defaults=True, exclude={"seed"})


if __name__ == "__main__":
    main()
