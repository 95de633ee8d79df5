"""Running a recipe: data, features, B, evaluation, model card, artifact.

Every step leaves its result in the output folder and is not repeated when the same recipe is run again.
"""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..artifact import hub
from ..artifact.config import INSIDE, BackboneSpec, RSRankConfig, TrainingRecord
from ..artifact.identity import describe, folder_of, hashes
from ..artifact.pretrained import open_artifact
from ..errors import InputError
from ..evaluation.datasets import LabelledQuery
from ..evaluation.evaluate import score_dataset, summarise
from ..evaluation.metrics import ScoredQuery, f1_at, mean, ranking_metrics
from ..language_model.check import open_backbone
from ..language_model.loading import load_model
from ..language_model.options import ModelSource
from ..method.backbone import Backbone
from ..method.concurrent_batches import token_budget_for
from ..method.projection import Projection
from ..method.template import PromptTokenizer
from ..partial_files import replacing, write_text
from ..rsrank import RSRank
from .batches import device_for, scored, split
from .domain import WORSE, Verdict, judge, train_near
from .estimate import Estimate, estimate
from .features import VALUES, FeatureExtractor, Reading, digest, plan_features, spec_for, subsample
from .fit import Epoch, FitOptions, Fitted, closed_form, fit
from .recipe import Recipe
from .store import FeatureSource, FeatureStore, subset


@dataclass(frozen=True)
class Result:
    """What a recipe made."""

    artifact: Path
    metrics: dict[str, dict[str, float]]  # dataset -> metric -> value
    verdict: Verdict | None = None  # where training began with an artifact: whether it helped


@dataclass(frozen=True)
class Learned:
    """B, what was scored without the language model and its name, and what the artifact says of the training."""

    projection: Projection
    measured: tuple[str, list[ScoredQuery]]
    settings: dict[str, Any]
    notes: str = ""
    verdict: Verdict | None = None
    threshold: float = 0.0


@dataclass
class Learner:
    """Trains B on some queries of a source; those numbered in `held` choose the epoch. The rest is as in `fit`."""

    recipe: Recipe
    features: FeatureSource
    held: Sequence[int]
    layers: Sequence[int]
    output: Path
    identity: str

    def learn(
        self,
        train: Sequence[int],
        options: FitOptions | None = None,
        folder: str = "fit",
        on_epoch: Callable[[Epoch], object] = lambda epoch: None,
    ) -> Fitted:
        """B from the queries of these numbers, a random one from none."""
        options, source, held = (
            options or self.recipe.fit,
            *(subset(self.features, x) for x in (train, self.held)),
        )
        if not train:
            _, heads, _, width = self.features[0].shifts.shape
            return Fitted(
                Projection.random(
                    self.layers, heads, options.projection_dim, width, seed=options.seed
                )
            )
        if self.recipe.method != "gradient":
            return Fitted(
                closed_form(
                    source, self.layers, self.recipe.method, projection_dim=options.projection_dim
                )
            )
        where: dict[str, Any] = {"output": self.output / folder, "device": self.recipe.model.device}
        return fit(
            source, held, self.layers, options, **where, identity=self.identity, on_epoch=on_epoch
        )

    def scored(self, projection: Projection) -> list[ScoredQuery]:
        """The validation queries' scores."""
        return scored(subset(self.features, self.held), projection, device=self.recipe.model.device)

    def sample(self, train: Sequence[int], size: int, seed: int) -> tuple[list[int], FitOptions]:
        """Some training queries, drawn at random, and how B learns from them: so many epochs, nothing is chosen."""
        changes: dict[str, Any] = {
            "epochs": self.recipe.sample_epochs,
            "keep": "last",
            "seed": seed,
        }
        drawn = random.Random(f"samples-{seed}").sample(list(train), size)
        return drawn, self.recipe.fit.model_copy(update=changes)

    def sample_curve(
        self, train: Sequence[int], say: Callable[[str], object]
    ) -> list[dict[str, float]]:
        """Recall@5 and F1 at zero on the validation queries by number of training queries; 0 is a random B."""
        rows: list[dict[str, float]] = []
        sizes = [size for size in self.recipe.sample_sizes if size < len(train)]
        for size in [*sizes, len(train)] if self.recipe.sample_sizes else []:
            drawn, options = self.sample(train, size, self.recipe.fit.seed)
            found = self.scored(self.learn(drawn, options, f"fit-samples/{size}").projection)
            recall, f1 = (
                ranking_metrics(found)["recall@5"],
                mean([f1_at(query, 0.0) for query in found]),
            )
            rows.append({"samples": size, "recall@5": recall, "f1@0": f1})
            say(f"{size:5} samples: Recall@5 {recall:.3f}, F1 at zero {f1:.3f}")
        return rows


@dataclass
class TrainingRun:
    """Runs a recipe step by step."""

    recipe: Recipe
    output: Path
    say: Callable[[str], object] = str
    progress: bool = False
    reading: Reading = VALUES
    accept: bool = False  # write what was trained even if it is worse than the base

    @cached_property
    def queries(self) -> list[LabelledQuery]:
        """The recipe's queries, read when they are first needed."""
        recipe = self.recipe
        if not recipe.data:
            raise InputError(
                f"The recipe {recipe.name!r} names no data. Pass --data FILE with labelled queries."
            )
        queries = [query for part in recipe.data for query in part.load(recipe.fit.seed)]
        if len(queries) < recipe.minimum_queries:
            raise InputError(
                f"{len(queries)} labelled queries are too few: this recipe asks for {recipe.minimum_queries}. The "
                "paper reaches 95% of its recall with 50; with fewer, B learns its examples by heart. Label more "
                "queries, or take an artifact that exists."
            )
        return subsample(queries, recipe.features.max_documents, recipe.fit.seed)

    @cached_property
    def evaluation(self) -> dict[str, list[LabelledQuery]]:
        """The recipe's evaluation sets, by name."""
        return {part.title: part.load(self.recipe.fit.seed) for part in self.recipe.evaluation}

    def estimate(self) -> Estimate:
        """Disk, memory and time, without the language model's weights; sets by name count with their mean sizes."""
        data, seed = self.recipe.data, self.recipe.fit.seed
        held = [query for part in self.recipe.evaluation for query in part.load(seed)]
        if all(part.file for part in data):
            return estimate(self.recipe, self.queries, held)
        queries = [query for part in data for query in part.load(seed)]
        return estimate(
            self.recipe, subsample(queries, self.recipe.features.max_documents, seed), held
        )

    def run(self) -> Result:
        """Run the recipe, or what is left of it.

        Raises RSRankError: the language model cannot be loaded or read, the data are missing or too few, or features or
        a checkpoint in the output folder belong to something else.
        """
        ranking_metrics(
            []
        )  # fails now, not after the work, where ir-measures is missing; likewise without data
        if self.evaluation:
            self.say(f"{sum(map(len, self.evaluation.values())):,} labelled queries for evaluation")
        store = self.extract()
        features = store.in_memory(device_for(self.recipe.model.device))
        learned = (
            self._from_nothing(store, features)
            if self.recipe.base is None
            else self._near(features)
        )
        core, prompts, _ = self._model
        config = self._config(store, learned, {})
        ranker = RSRank(
            core,
            prompts,
            learned.projection,
            config,
            token_budget=self.recipe.features.token_budget,
        )
        found = {
            label: self._scored(ranker, label, queries)
            for label, queries in self.evaluation.items()
        }
        metrics = {  # of the sets that were scored, else of what was held out
            label: {
                name.replace("@tau", "@0"): float(v)
                for name, v in summarise(rows, alternatives=False).items()
                if v is not None
            }
            for label, rows in (found or dict([learned.measured])).items()
        }
        _dump(self.output / "metrics.json", metrics)
        config, artifact = self._config(store, learned, metrics), self.output / "artifact"
        write_artifact(artifact, config, learned.projection, self.recipe.model.source)
        return Result(artifact, metrics, learned.verdict)

    def extract(self) -> FeatureStore:
        """Make the feature store, or what is missing of it; TrainingError as of `FeatureStore.create`."""
        self.say(f"{len(self.queries):,} labelled queries")
        core, prompts, spec = self._model
        part, layers = self.recipe.features, self.recipe.layers(core.num_layers)
        budget = part.token_budget or token_budget_for(
            self.recipe.model.options().resolved_device()
        )
        extractor = FeatureExtractor(
            self.reading.reader(core, prompts, layers), part, token_budget=budget
        )
        heads, width = self.reading.shape(core)
        plan = plan_features(self.queries, prompts, part, len(layers) * heads * width)
        sources = [source.title for source in self.recipe.data]
        wanted = spec_for(extractor, self.queries, spec, self.reading, sources=sources)
        store = FeatureStore.create(self.output / "features", wanted, plan.bytes)
        if store.missing():
            self.say(
                f"Features of {plan.queries:,} queries with {plan.documents:,} documents: {plan.bytes / 1e9:.2f} GB. "
                "It takes less with --set features.max_tokens=8 or features.max_documents=10."
            )
        done = store.fill(lambda number: extractor.extract(self.queries[number]))
        for _ in self._bar(done, total=len(self.queries), desc="features", unit="query"):
            pass
        return store

    @cached_property
    def _bar(self) -> "Callable[..., tqdm[Any]]":
        return partial(tqdm, disable=not self.progress)

    @cached_property
    def _model(self) -> tuple[Backbone, PromptTokenizer, BackboneSpec]:
        part, options = self.recipe.model, self.recipe.model.options()
        if self.recipe.base is not None:
            source = ModelSource(self.recipe.base, load=options, max_length=part.max_length)
            core, prompts, _, config = open_artifact(source)
            return core, prompts, config.backbone
        layers = self.recipe.features.layers
        last_layer = layers[-1] if layers else None
        loaded = load_model(
            part.source, revision=part.revision, options=options, last_layer=last_layer
        )
        depth = {"num_layers": loaded.num_layers, "fusion_layer": part.fusion_layer}
        core = open_backbone(loaded.model, last_layer, **depth, documents_stay=part.documents_stay)
        prompts = PromptTokenizer(
            loaded.tokenizer,
            self.recipe.template,
            max_length=min(core.max_length, part.max_length or core.max_length),
            shared_positions=core.causal,
        )
        name, files = (
            part.name if part.source == part.name else INSIDE,
            hashes(folder_of(part.source, part.revision)),
        )
        revision = part.revision or getattr(loaded.model.config, "_commit_hash", None)
        return (
            core,
            prompts,
            describe(core, prompts, name, None if name == INSIDE else revision, files),
        )

    def _near(self, features: FeatureSource) -> Learned:
        """Weights near the base's, unless they are worse."""
        recipe, folder = self.recipe, hub.resolve(str(self.recipe.base))
        config = hub.read_config(folder)
        base = hub.read_projection(folder, config)
        watch = partial(self._bar, desc="folds", unit="fold")
        trained = train_near(features, base, recipe.domain, device=recipe.model.device, watch=watch)
        for strength, value in trained.values.items():
            what = (
                "the base's weights"
                if math.isinf(strength)
                else f"weights near them, strength {strength:g}"
            )
            self.say(
                f"{value:.3f} mean of nDCG@5 and F1 at zero on queries left out of training: {what}"
            )
        verdict = judge(trained.base, trained.trained, (config.threshold, 0.0))
        keep = verdict.outcome == WORSE and not self.accept
        if verdict.outcome == WORSE and self.accept:
            verdict = verdict.model_copy(update={"outcome": "worse: taken all the same"})
        write_text(self.output / "verdict.json", verdict.model_dump_json(indent=2) + "\n")
        about = {
            "base": str(recipe.base),
            "strength": str(trained.strength),
            "outcome": verdict.outcome,
        }
        return Learned(
            base if keep else trained.projection,
            ("held out", trained.base if keep else trained.trained),
            {"method": "near a base", **about},
            f"Base and trained weights on {verdict.queries} queries left out of training: {verdict.outcome}.",
            verdict,
            config.threshold if keep else 0.0,
        )

    def _from_nothing(self, store: FeatureStore, features: FeatureSource) -> Learned:
        """B by the recipe's method, and its curve by the number of queries."""
        recipe = self.recipe
        train, held = split(len(store), recipe.held, recipe.fit.seed)
        identity = hashlib.sha256(
            f"{store.spec.model_dump_json()} {train} {held}".encode()
        ).hexdigest()
        learner = Learner(recipe, features, held, store.spec.layers, self.output, identity)
        settings: dict[str, Any] = {
            "method": recipe.method,
            "projection_dim": recipe.fit.projection_dim,
        }
        notes = ""
        with self._bar(total=recipe.fit.epochs, desc="training B", unit="epoch") as bar:

            def show(epoch: Epoch) -> None:
                bar.n = epoch.epoch
                bar.set_postfix(loss=f"{epoch.loss:.3f}", f1=f"{epoch.validation_f1:.3f}")

            fitted = learner.learn(train, on_epoch=show)
        if best := fitted.best:
            self.say(
                f"B of epoch {best.epoch} of {len(fitted.history)}: F1 at zero {best.validation_f1:.3f} on "
                f"{len(held)} validation queries."
            )
            settings |= {
                **recipe.fit.model_dump(exclude={"seed"}),
                "epochs_run": len(fitted.history),
            }
            notes = "The validation queries chose the epoch." if recipe.fit.keep == "best" else ""
        samples = learner.sample_curve(train, self.say)
        if samples:
            _dump(self.output / "samples.json", samples)
        return Learned(
            fitted.projection, ("validation", learner.scored(fitted.projection)), settings, notes
        )

    def _scored(
        self, ranker: RSRank, label: str, queries: list[LabelledQuery]
    ) -> list[ScoredQuery]:
        """Scores of an evaluation set; those of an earlier run with the same B are taken from its file."""
        titles = self.recipe.features.titles
        weights = b"".join(
            weight.detach().cpu().numpy().tobytes() for weight in ranker.projection.parameters()
        )
        key = hashlib.sha256(weights + digest(queries, titles=titles).encode()).hexdigest()
        path = self.output / "scores" / f"{label}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return [ScoredQuery(**row) for row in kept["queries"]]
        found = score_dataset(ranker, self._bar(queries, desc=label, unit="query"), titles=titles)
        rows = [{"scores": list(row.scores), "relevant": list(row.relevant)} for row in found]
        _dump(path, {"key": key, "queries": rows})
        return found

    def _config(
        self, store: FeatureStore, learned: Learned, metrics: dict[str, dict[str, float]]
    ) -> RSRankConfig:
        recipe, spec = self.recipe, store.spec
        return RSRankConfig(
            backbone=spec.backbone,
            layers=spec.layers,
            projection_dim=learned.projection.weight.shape[2],
            fusion_layer=spec.fusion_layer,
            documents_stay=spec.documents_stay,
            template=spec.template,
            max_length=spec.max_length,
            threshold=learned.threshold,
            license=recipe.license,
            training=TrainingRecord(
                data=spec.sources,
                seed=recipe.fit.seed,
                metrics=metrics,
                settings=learned.settings,
                notes=f"Made by the recipe {recipe.name!r}. {learned.notes}".strip(),
            ),
        )


def write_artifact(
    folder: Path, config: RSRankConfig, projection: Projection, model: str | Path
) -> None:
    """Write an artifact, with a copy of the language model's folder where it is to hold one: all or nothing."""
    with replacing(folder) as new:
        hub.write_artifact(new, config, projection, hub.model_card(config))
        if config.backbone.name == INSIDE:
            shutil.copytree(model, new / INSIDE)


def _dump(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
