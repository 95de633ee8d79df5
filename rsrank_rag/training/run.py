"""Running a recipe: data, features, weights, evaluation, model card, artifact.

Features stay in the output folder, so that the same recipe goes on where it stopped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from timeit import timeit
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
from .estimate import Estimate
from .feature_scores import batch_scores, make_batch, scored, split
from .features import FeatureExtractor
from .fine_tuning import fine_tune
from .fit import fit
from .recipe import Recipe
from .store import QueryFeatures, open_folder, read_features, write_features
from .verdict import Verdict, judge, measure


@dataclass(frozen=True)
class Result:
    """Weights with the config of their artifact.

    Attributes:
        projection: The weights.
        config: The config. Its metrics were measured by the artifact's rule on queries held out.
        written: Which weights these are, and why, in a sentence.
        problem: Why fine-tuned weights should not be written; None if nothing speaks against them.
        verdict: Of fine-tuning: the base's weights against fine-tuned ones, on queries held out.
    """

    projection: Projection
    config: RSRankConfig
    written: str
    problem: str | None = None
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

    @property
    def artifact(self) -> Path:
        """Folder of the artifact."""
        return self.output / "artifact"

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
        features = self.extract()
        model = self._model
        if model.projection is None:
            result = self._from_nothing(features)
        else:
            result = self._fine_tuned(features, model.projection)
        weights = result.projection.weights()
        hub.write_derived(self.artifact, result.config, weights, model.folder)
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
        folder = self.output / "features"
        open_folder(folder, self._description())
        paths = [folder / f"{number:05d}.pt" for number in range(len(queries))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        extractor = self._extractor
        for number in tqdm(missing, "features", unit="query", disable=not self.progress):
            write_features(paths[number], extractor.extract(queries[number]))
        return list(map(read_features, paths))

    def estimate(self) -> Estimate:
        """What `run` will take, from the times that the query of middle length takes.

        Raises:
            RSRankError: As `extract`, but no file is read or written.
        """
        queries = sorted(self.queries, key=_characters)
        middle = queries[len(queries) // 2]
        extractor = self._extractor
        # The first run takes longer than the others.
        features = extractor.extract(middle)
        reading = timeit(lambda: extractor.extract(middle), number=1)
        reading *= sum(map(_characters, queries)) / _characters(middle)
        weight = torch.rand(self._model.config.shape, device=self._device, requires_grad=True)

        def step() -> None:
            batch = make_batch([features], self._device)
            batch_scores({"weight": weight}, batch)[0].sum().backward()  # type: ignore[no-untyped-call]

        share = sum(map(self._rows, queries)) / self._rows(middle)
        training = timeit(step, number=1) * share * self.recipe.passes
        return Estimate(
            queries=len(queries),
            pairs=sum(len(query.documents) for query in queries),
            disk=round(share * features.shifts.nbytes),
            memory=sum(weight.nbytes for weight in self._model.core.model.parameters()),
            hours=(reading + training) / 3600,
        )

    def _rows(self, query: LabelledQuery) -> int:
        """Shifts of a query's features in a layer and head."""
        labels = [document.relevant for document in query.documents]
        return self._model.prompts.query(query.query).length * (len(labels) + any(labels))

    @property
    def _device(self) -> torch.device:
        name = self.recipe.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(name)

    @property
    def _extractor(self) -> FeatureExtractor:
        model = self._model
        reader = ShiftReader(model.core, model.prompts, model.config.layers)
        return FeatureExtractor(reader, self.recipe.features)

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

    def _fine_tuned(self, features: Sequence[QueryFeatures], base: Projection) -> Result:
        """Fine-tuned weights, or the base's if there is a `Verdict.problem`."""
        recipe = self.recipe
        config = self._model.config
        tuned = fine_tune(
            features,
            base,
            recipe.fine_tuning,
            threshold=config.threshold,
            device=self._device,
            progress=self.progress,
        )
        warn_of_reuse(str(recipe.base), config.training.data, recipe.titles)
        verdict = judge(tuned.before, tuned.after, replace(config.rule, threshold=0.0))
        write_text(self.output / "verdict.json", verdict.model_dump_json(indent=2) + "\n")
        problem = verdict.problem
        if problem and not self.force:
            written = f"the weights of {recipe.base}, unchanged: {problem}"
            notes = f"{config.training.notes} {_note(written)}".strip()
            training = config.training.model_copy(update={"notes": notes})
            config = config.model_copy(update={"training": training})
            return Result(base, config, written, problem, verdict)
        written = f"fine-tuned weights, {verdict} on {verdict.queries} queries held out"
        if config.threshold:
            written += f"; threshold 0, no longer {config.threshold:g}"
        if problem:
            written += f"; forced: {problem}"
        settings = recipe.fine_tuning.model_dump()
        settings |= {"method": "fine-tuning", "base": recipe.base, "outcome": verdict.outcome}
        metrics = {name: estimate.mean for name, estimate in verdict.after.items()}
        config = self._config(metrics, settings, written)
        return Result(tuned.projection, config, written, problem, verdict)

    def _from_nothing(self, features: Sequence[QueryFeatures]) -> Result:
        """Train B from nothing, and measure the best epoch on the validation queries."""
        recipe = self.recipe
        training, held_out = split(len(features), recipe.validation, recipe.fit.seed)
        validation = [features[number] for number in held_out]
        fitted = fit(
            [features[number] for number in training],
            validation,
            self._model.config.layers,
            recipe.fit,
            output=self.output / "fit",
            device=self._device,
            progress=self.progress,
        )
        written = (
            f"B of epoch {fitted.best.epoch} of {len(fitted.history)}, chosen by F1 at zero on "
            f"{len(validation)} validation queries"
        )
        settings = recipe.fit.model_dump(exclude={"seed"})
        settings["epochs_run"] = len(fitted.history)
        weights = dict(fitted.projection.named_parameters())
        metrics = present_means(measure(scored(validation, weights, device=self._device)))
        return Result(fitted.projection, self._config(metrics, settings, written), written)

    def _config(
        self, metrics: dict[str, float], settings: dict[str, Any], written: str
    ) -> RSRankConfig:
        """The config of trained weights; see `Result.written`."""
        model = self._model
        recipe = self.recipe
        config = model.config
        record = TrainingRecord(
            data=tuple(dict.fromkeys([*config.training.data, *recipe.titles])),
            seed=recipe.fit.seed,
            metrics={"held out": metrics},
            settings=settings,
            notes=_note(written),
        )
        update = {
            "max_length": model.prompts.max_length,
            "threshold": 0.0,
            "license": recipe.license or config.license,
            "training": record,
        }
        return config.model_copy(update=update)


def _characters(query: LabelledQuery) -> int:
    """Characters of a query and its documents."""
    return len(query.query) + sum(len(document.content()) for document in query.documents)


def _note(written: str) -> str:
    return f"Made by rsrank train: {written}."
