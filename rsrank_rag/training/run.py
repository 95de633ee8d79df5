"""Running a recipe: data, features, weights, evaluation, model card, artifact.

Features stay in the output folder, so that the same recipe goes on where it stopped.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..artifact import hub
from ..artifact.config import RSRankConfig, TrainingRecord, content_digest
from ..artifact.identity import describe, folder_of, hashes
from ..artifact.opening import open_model, open_on_torch
from ..backends.torch.backbone import Backbone
from ..backends.torch.projection import Projection
from ..errors import InputError
from ..evaluation.datasets import LabelledQuery, warn_of_reuse
from ..evaluation.metrics import present_means, ranking_measures
from ..method.scoring import ShiftReader
from ..method.template import PromptTokenizer
from ..partial_files import write_text
from .feature_scores import device_for, scored, split
from .features import FeatureExtractor
from .fine_tuning import fine_tune
from .fit import fit
from .recipe import Recipe
from .store import QueryFeatures, open_folder, read_features, write_features
from .verdict import Verdict, judge, measure


@dataclass(frozen=True)
class Result:
    """Weights, and what is known of them."""

    projection: Projection
    # Measured by the artifact's rule on queries held out.
    metrics: dict[str, float]
    settings: dict[str, Any]
    # Which weights these are, and why, in a sentence.
    written: str
    # Why fine-tuned weights should not be written; None if nothing speaks against them.
    problem: str | None = None
    # Of fine-tuning: the base's weights against fine-tuned ones, on queries held out.
    verdict: Verdict | None = None


@dataclass(frozen=True)
class _Model:
    """A language model, and the config of its artifact; with a base, its weights and folder."""

    core: Backbone
    prompts: PromptTokenizer
    config: RSRankConfig
    projection: Projection | None = None
    folder: Path = Path()


@dataclass
class TrainingRun:
    """Runs a recipe step by step.

    Args:
        recipe: What to do.
        output: Folder for everything that is made.
        progress: Whether to show progress bars.
        force: Write fine-tuned weights even if they may lose something.
    """

    recipe: Recipe
    output: Path
    progress: bool = False
    force: bool = False
    # Not a field. The paper's ablations read other signals.
    reader = ShiftReader

    @property
    def artifact(self) -> Path:
        """Folder of the artifact."""
        return self.output / "artifact"

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that B reads. The first use loads the language model.

        Raises:
            BackboneError: The model cannot be loaded, or does not have these layers.
        """
        return self._model.config.layers

    @cached_property
    def queries(self) -> list[LabelledQuery]:
        """The recipe's queries.

        Raises:
            InputError: There are too few queries.
        """
        recipe = self.recipe
        queries = recipe.read_queries()
        if len(queries) < recipe.minimum_queries:
            raise InputError(
                f"{len(queries)} labelled queries are too few: this recipe asks for "
                f"{recipe.minimum_queries}. Pass --data FILE with more. Fine-tuning an artifact "
                "(--config mini) needs 2."
            )
        return queries

    def run(self) -> Result:
        """Run the recipe, or what is left of it.

        Raises:
            RSRankError: The language model cannot be loaded or read, the data are missing or too
                few, or features in the output folder belong to something else.
        """
        # Fails before the work, not after it, where ir-measures is missing.
        ranking_measures([])
        device = device_for(self.recipe.model.device)
        features = self.extract()
        model = self._model
        if model.projection is None:
            result = self._from_nothing(features, device)
        else:
            result = self._fine_tuned(features, device, model.projection)
        config = self._config(result)
        hub.write_derived(self.artifact, config, result.projection.weights(), model.folder)
        return result

    def extract(self) -> list[QueryFeatures]:
        """Compute the features of the recipe's queries that the output folder lacks.

        Returns:
            The features of all queries, in the order of the queries.

        Raises:
            InputError: As `queries`, or a query is empty or too long.
            BackboneError: The language model cannot be loaded or read.
            ScoringError: A document does not fit into memory.
            TrainingError: The output folder holds features of something else, or a shift is not
                finite.
        """
        queries = self.queries
        model = self._model
        folder = self.output / "features"
        open_folder(folder, self._description())
        paths = [folder / f"{number:05d}.pt" for number in range(len(queries))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        reader = self.reader(model.core, model.prompts, self.layers)
        extractor = FeatureExtractor(reader, self.recipe.features)
        for number in self._bar(missing, desc="features", unit="query"):
            write_features(paths[number], extractor.extract(queries[number]))
        return list(map(read_features, paths))

    @cached_property
    def _bar(self) -> "Callable[..., tqdm[Any]]":
        return partial(tqdm, disable=not self.progress)

    @cached_property
    def _model(self) -> _Model:
        recipe = self.recipe
        part = recipe.model
        options = part.load_options()
        if recipe.base is not None:
            folder = hub.resolve(recipe.base, part.revision)
            config = hub.read_config(folder)
            if not options.dtype and options.on_onnx(config.backbone.model_type):
                # The artifact will run on ONNX Runtime, which has no bfloat16.
                options = options.model_copy(update={"dtype": "float32"})
            source = options.source(recipe.base, part.revision, max_length=part.max_length)
            core, prompts, weights = open_on_torch(source, folder, config)
            return _Model(core, prompts, config, Projection.of(weights), folder)
        core, prompts = open_model(
            part.name,
            part.revision,
            options,
            last_layer=recipe.features.last_layer,
            template=recipe.template,
            max_lengths=(part.max_length,),
        )
        revision = part.revision or getattr(core.model.config, "_commit_hash", None)
        files = hashes(folder_of(part.name, part.revision))
        last = recipe.features.last_layer or core.num_layers - 1
        config = RSRankConfig(
            backbone=describe(core, prompts, part.name, revision, files),
            # Layer 0 has the embeddings of tokens, which no document shifts.
            layers=tuple(range(1, last + 1)),
            projection_dim=recipe.fit.projection_dim,
            template=prompts.template,
        )
        return _Model(core, prompts, config)

    def _description(self) -> dict[str, Any]:
        """What the features are of, entry by entry.

        Value vectors are not compared: they differ a little between devices.
        """
        model = self._model
        config = model.config.model_dump(
            mode="json",
            include={
                "attention_window",
                "backbone",
                "fusion_layer",
                "layers",
                "similarity_window",
                "template",
            },
            exclude={"backbone": {"values"}},
        )
        queries = [query.model_dump(mode="json") for query in self.queries]
        return {
            **config,
            "bits": model.core.bits,
            "compute_dtype": str(model.core.dtype),
            "data": content_digest(json.dumps(queries)),
            "dtype": self.recipe.features.dtype,
            "max_length": model.prompts.max_length,
        }

    def _fine_tuned(
        self,
        features: Sequence[QueryFeatures],
        device: torch.device,
        base: Projection,
    ) -> Result:
        """Fine-tuned weights, or the base's if there is a `Verdict.problem`."""
        recipe = self.recipe
        watch = partial(self._bar, desc="folds", unit="fold")
        config = self._model.config
        tuned = fine_tune(
            features,
            base,
            recipe.fine_tuning,
            threshold=config.threshold,
            device=device,
            watch=watch,
        )
        titles = [part.title for part in recipe.data]
        warn_of_reuse(str(recipe.base), config.training.data, titles)
        verdict = judge(tuned.before, tuned.after, replace(config.rule, threshold=0.0))
        write_text(self.output / "verdict.json", verdict.model_dump_json(indent=2) + "\n")
        settings = recipe.fine_tuning.model_dump()
        settings |= {"method": "fine-tuning", "base": recipe.base, "outcome": verdict.outcome}
        problem = verdict.problem
        projection = base
        written = f"the weights of {recipe.base}, unchanged: {problem}"
        if self.force or not problem:
            projection = tuned.projection
            written = f"fine-tuned weights, {verdict} on {verdict.queries} queries held out"
            if config.threshold:
                written += f"; threshold 0, no longer {config.threshold:g}"
            if problem:
                written += f"; forced: {problem}"
        metrics = {name: estimate.mean for name, estimate in verdict.after.items()}
        return Result(projection, metrics, settings, written, problem, verdict)

    def _from_nothing(self, features: Sequence[QueryFeatures], device: torch.device) -> Result:
        """Train B from nothing, and measure the best epoch on the validation queries."""
        recipe = self.recipe
        training, held_out = split(len(features), recipe.validation, recipe.fit.seed)
        validation = [features[number] for number in held_out]
        fitted = fit(
            [features[number] for number in training],
            validation,
            self.layers,
            recipe.fit,
            output=self.output / "fit",
            device=device,
            watch=partial(self._bar, desc="training B", unit="epoch"),
        )
        settings = recipe.fit.model_dump(exclude={"seed"})
        settings["epochs_run"] = len(fitted.history)
        weights = dict(fitted.projection.named_parameters())
        rows = scored(validation, weights, device=device)
        written = (
            f"B of epoch {fitted.best.epoch} of {len(fitted.history)}, chosen by F1 at zero on "
            f"{len(validation)} validation queries"
        )
        metrics = present_means(measure(rows))
        return Result(fitted.projection, metrics, settings, written)

    def _config(self, result: Result) -> RSRankConfig:
        model = self._model
        recipe = self.recipe
        config = model.config
        record = TrainingRecord(
            data=tuple(
                dict.fromkeys([*config.training.data, *(part.title for part in recipe.data)])
            ),
            seed=recipe.fit.seed,
            metrics={"held out": result.metrics},
            settings=result.settings,
            notes=f"Made by rsrank train: {result.written}.",
        )
        if result.projection is model.projection:
            notes = f"{config.training.notes} {record.notes}".strip()
            known = config.training.model_copy(update={"notes": notes})
            return config.model_copy(update={"training": known})
        update = {
            "max_length": model.prompts.max_length,
            "threshold": 0.0,
            "license": recipe.license or config.license,
            "training": record,
        }
        return config.model_copy(update=update)
