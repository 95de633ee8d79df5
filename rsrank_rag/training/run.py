"""Running a recipe: data, features, B, evaluation, model card, artifact.

Every step leaves its result in the output folder and is not repeated when the same recipe is run again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ..artifact import hub
from ..artifact.config import BackboneSpec, Histogram, RSRankConfig, TrainingRecord
from ..artifact.identity import describe
from ..errors import BackboneError, InputError, TrainingError
from ..evaluation import plots
from ..evaluation.datasets import LabelledQuery
from ..evaluation.evaluate import score_dataset, summarise
from ..evaluation.metrics import ScoredQuery, f1_at, ranking_metrics
from ..language_model.loading import LOAD_ERRORS, load_model, shortened
from ..method.backbone import Backbone
from ..method.batching import token_budget_for
from ..method.projection import Projection
from ..method.reading import ShiftReader
from ..method.template import PromptTokenizer
from ..reproduction.closed_form import closed_form
from ..rsrank import INSIDE, RSRank
from .features import FeatureExtractor, FeatureSource, FeatureStore, Plan, digest, spec_for, subsample
from .fit import Epoch, Fitted, Resident, Subset, fit, scored, split
from .recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Estimate:
    """What a recipe will take on this machine.

    Attributes:
        plan: Tokens and bytes of the features.
        evaluation_tokens: Tokens that the language model reads for the evaluation.
        weight_bytes: Of the language model in memory.
        flops: Of the language model's pass.
        flops_per_second: Half of what a large matrix product reached here just now.
        parameters: Numbers in B.
    """

    plan: Plan
    evaluation_tokens: int
    weight_bytes: int
    flops: float
    flops_per_second: float
    parameters: int

    @property
    def hours(self) -> float:
        """Of the language model's pass."""
        return self.flops / self.flops_per_second / 3600

    def __str__(self) -> str:
        plan = self.plan
        return "\n".join(
            [
                f"queries      {plan.queries:,} with {plan.documents:,} documents",
                f"reading      {plan.prompt_tokens:,} tokens and {self.evaluation_tokens:,} for the evaluation, "
                f"{self.flops / 1e12:,.1f} TFLOP: about "
                f"{_hours(self.hours)} here (at {self.flops_per_second / 1e12:,.2f} TFLOP/s, half of what a large "
                "matrix product reaches)",
                f"memory       {self.weight_bytes / 1e9:,.2f} GB for the language model's weights",
                f"disk         {plan.bytes / 1e9:,.2f} GB for the features (less with features.max_tokens or "
                "features.max_documents)",
                f"B            {self.parameters:,} numbers",
            ]
        )


@dataclass(frozen=True)
class Result:
    """What a recipe made.

    Attributes:
        artifact: Folder of the artifact.
        metrics: Dataset -> metric -> value.
        samples: Rows of the sample-efficiency table, if asked for.
    """

    artifact: Path
    metrics: dict[str, dict[str, float]]
    samples: list[dict[str, float]]


class Kitchen:
    """Runs a recipe step by step.

    Args:
        recipe: What to make.
        output: Where to leave it.
        say: Told what is going on.
        progress: Show progress bars.
    """

    def __init__(
        self, recipe: Recipe, output: str | Path, *, say: Callable[[str], object] = str, progress: bool = False
    ) -> None:
        self.recipe, self.output, self.say, self.progress = recipe, Path(output), say, progress

    @cached_property
    def queries(self) -> list[LabelledQuery]:
        """The recipe's queries, read when they are first needed."""
        recipe = self.recipe
        if not recipe.data:
            raise InputError(f"The recipe {recipe.name!r} names no data. Pass --data FILE with labelled queries.")
        queries = [query for part in recipe.data for query in part.load(recipe.fit.seed)]
        self._check_count(len(queries))
        return subsample(queries, recipe.features.max_documents, recipe.fit.seed)

    def _check_count(self, count: int) -> None:
        if count < self.recipe.minimum_queries:
            raise TrainingError(
                f"{count} labelled queries are too few: this recipe asks for {self.recipe.minimum_queries}. The paper "
                "reaches 95% of its recall with 50; with fewer, B learns its examples by heart. Label more queries, or "
                "take an artifact that exists."
            )

    @cached_property
    def evaluation(self) -> dict[str, list[LabelledQuery]]:
        """The recipe's evaluation sets, by name."""
        return {part.label: part.load(self.recipe.fit.seed) for part in self.recipe.evaluation}

    def estimate(self) -> Estimate:
        """Disk, memory and time, without loading the language model's weights.

        Raises:
            BackboneError: There is no such language model.
        """
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        part, options = self.recipe.model, self.recipe.model.options()
        known = {"revision": part.revision, "local_files_only": part.local_files_only}
        try:
            config = AutoConfig.from_pretrained(part.source, **known).get_text_config()
            layers = self._layers(config.num_hidden_layers)
            tokenizer = AutoTokenizer.from_pretrained(part.source, **known)
        except LOAD_ERRORS as error:
            raise BackboneError(f"The language model {part.name!r} could not be found: {error}") from error
        with torch.device("meta"):
            model = AutoModel.from_config(shortened(config, layers[-1] + 1))
        weights = sum(parameter.numel() for parameter in model.parameters())
        working = weights - model.get_input_embeddings().weight.numel()
        dtype, device = options.resolved_dtype(), options.resolved_device()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if self.recipe.features.signal == "hidden":
            heads, width = 1, config.hidden_size
        limit = min(config.max_position_embeddings, part.max_length or config.max_position_embeddings)
        prompts = PromptTokenizer(tokenizer, self.recipe.template, max_length=limit, shared_positions=True)
        reader = _Unread(prompts, frozenset(layers))
        extractor = self._extractor(reader)  # type: ignore[arg-type]
        plan = extractor.plan(self.queries, heads, width)
        held = [query for queries in self.evaluation.values() for query in queries]
        evaluation = extractor.plan(held, 1, 1).prompt_tokens
        bits = 8 if part.load_in_8bit or part.load_in_fp8 else 4 if part.load_in_4bit else dtype.itemsize * 8
        return Estimate(
            plan=plan,
            evaluation_tokens=evaluation,
            weight_bytes=weights * bits // 8,
            flops=2.0 * working * (plan.prompt_tokens + evaluation),
            flops_per_second=_matmul_rate(device, dtype) / 2,
            parameters=len(layers) * heads * self.recipe.fit.projection_dim * width,
        )

    def cook(self) -> Result:
        """Run the recipe, or what is left of it.

        Raises:
            BackboneError: The language model cannot be loaded or read.
            InputError: The data are missing.
            TrainingError: They are too few, or features or a checkpoint in the output folder belong to something else.
        """
        if _place()[1] > 1:
            raise InputError(
                "Only the features are made by several processes. Run rsrank features under accelerate launch, and "
                "then rsrank train by itself."
            )
        ranking_metrics([])  # fails now, not after the work, where ir-measures is missing; likewise without data
        held = sum(map(len, self.evaluation.values()))
        self.say(f"{len(self.queries):,} labelled queries, {held:,} for evaluation")
        core, prompts, spec = self._backbone()
        store = self.features(core, prompts, spec)
        projection, config = self._learn(store)
        ranker = RSRank(core, prompts, projection, config, token_budget=self.recipe.features.token_budget)
        found = {label: self._scored(ranker, label, queries) for label, queries in self.evaluation.items()}
        config = self._recorded(config, found)
        RSRank(core, prompts, projection, config).save_pretrained(self.output / "artifact")
        return Result(self.output / "artifact", config.training.metrics, self.samples)

    def cook_from(self, store: FeatureStore) -> Result:
        """Train B on features that exist, without the language model; metrics are of the validation queries.

        Raises:
            TrainingError: The store is unfinished or of another model than the recipe's, or a checkpoint in the output
                folder belongs to something else.
        """
        recipe, spec = self.recipe, store.spec
        inside = recipe.model.source != recipe.model.name
        wanted = {
            "model.name": (INSIDE if inside else recipe.model.name, spec.backbone.name),
            "template": (recipe.template, spec.template),
            "features.signal": (recipe.features.signal, spec.signal),
            "features.null_prefix": (recipe.features.null_prefix, spec.null_prefix),
            "features.layers": (recipe.features.layers or spec.layers, spec.layers),
        }
        different = [f"{name} {theirs!r}, not {ours!r}" for name, (ours, theirs) in wanted.items() if ours != theirs]
        if different:
            raise TrainingError(
                f"{store.folder} was made with {'; '.join(different)} as in the recipe {recipe.name!r}. Pass the "
                "recipe and settings that it was made with."
            )
        self._check_count(len(store))
        projection, config = self._learn(store)
        config = self._recorded(config, {})
        artifact = self.output / "artifact"
        hub.write_artifact(artifact, config, projection.weight, hub.model_card(config))
        if inside:
            shutil.copytree(recipe.model.source, artifact / INSIDE, dirs_exist_ok=True)
        return Result(artifact, config.training.metrics, self.samples)

    def _learn(self, store: FeatureStore) -> tuple[Projection, RSRankConfig]:
        """B, and its config without metrics."""
        recipe, spec = self.recipe, store.spec
        train, held = split(len(store), recipe.validation_share, recipe.fit.seed)
        device = torch.device(recipe.model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        place = _place_for(store, device)
        features: FeatureSource = store if place is None else Resident(store, place)
        self.identity = hashlib.sha256(f"{spec.model_dump_json()} {train} {held}".encode()).hexdigest()
        projection = self._train(features, train, held, spec.layers)
        self.samples = self._samples(features, train, held, spec.layers)
        self.output.mkdir(parents=True, exist_ok=True)
        if self.samples:
            _dump(self.output / "samples.json", self.samples)
            self._draw(lambda: _sample_curves(self.samples), "samples")
        self.validation = scored(Subset(features, held), projection, device=recipe.model.device)
        self.sources = spec.sources
        config = RSRankConfig(
            backbone=spec.backbone,
            layers=spec.layers,
            projection_dim=recipe.fit.projection_dim,
            signal=spec.signal,
            null_prefix=spec.null_prefix,
            template=spec.template,
            max_length=spec.max_length,
            license=recipe.license,
        )
        return projection, config

    def _scored(self, ranker: RSRank, label: str, queries: list[LabelledQuery]) -> list[ScoredQuery]:
        """Scores of an evaluation set; those of an earlier run with the same B are taken from its file."""
        titles = self.recipe.features.titles
        content = ranker.projection.weight.detach().cpu().numpy().tobytes()
        key = hashlib.sha256(content + digest(queries, titles=titles).encode()).hexdigest()
        path = self.output / "scores" / f"{label}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return [ScoredQuery(**row) for row in kept["queries"]]
        bar = tqdm(queries, desc=label, unit="query", disable=not self.progress)
        found = score_dataset(ranker, bar, titles=titles)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"scores": list(row.scores), "relevant": list(row.relevant)} for row in found]
        _dump(path, {"key": key, "queries": rows})
        return found

    def extract(self) -> FeatureStore:
        """Only the features."""
        self.say(f"{len(self.queries):,} labelled queries")
        return self.features(*self._backbone())

    def features(self, core: Backbone, prompts: PromptTokenizer, spec: BackboneSpec) -> FeatureStore:
        """Make the feature store, or what is missing of it; several processes of ``accelerate launch`` share it.

        Raises:
            TrainingError: The folder holds other features, or the disk is too small.
        """
        store, extractor, plan = self._begin(core, prompts, spec)
        worker, workers = _place()
        if store.missing():
            self.say(self._forecast(extractor, plan))
        done = store.fill(self.queries, extractor, worker=worker, workers=workers)
        for _ in tqdm(done, total=len(self.queries), desc="features", unit="query", disable=not self.progress):
            pass
        while workers > 1 and store.missing():  # the others' shards; accelerate ends all if one fails
            time.sleep(0.5)
        return store

    def extract_part(self, worker: int, workers: int) -> None:
        """Make the shards of the feature store that fall to one of several workers, and wait for no other.

        Raises:
            RSRankError: As `features`.
        """
        store, extractor, _ = self._begun
        for _ in store.fill(self.queries, extractor, worker=worker, workers=workers):
            pass

    @cached_property
    def _begun(self) -> tuple[FeatureStore, FeatureExtractor, Plan]:
        return self._begin(*self._backbone())

    def _begin(
        self, core: Backbone, prompts: PromptTokenizer, spec: BackboneSpec
    ) -> tuple[FeatureStore, FeatureExtractor, Plan]:
        part = self.recipe.features
        reader = ShiftReader(
            core, prompts, self._layers(core.num_layers), signal=part.signal, null_prefix=part.null_prefix
        )
        extractor = self._extractor(reader)
        heads, width = (1, core.config.hidden_size) if part.signal == "hidden" else (core.num_heads, core.head_dim)
        plan = extractor.plan(self.queries, heads, width)
        sources = [part.label for part in self.recipe.data]
        wanted = spec_for(extractor, self.queries, plan, spec, sources=sources)
        return FeatureStore.create(self.output / "features", wanted, plan.bytes), extractor, plan

    def _forecast(self, extractor: FeatureExtractor, plan: Plan) -> str:
        """Size, and time measured on a query of middling size after a warm-up."""
        order = sorted(range(len(self.queries)), key=plan.query_bytes.__getitem__)
        sample = self.queries[order[len(order) // 2]]
        for _ in range(2):
            started = time.perf_counter()
            extractor.extract(sample)
            seconds = time.perf_counter() - started
        tokens = extractor.plan([sample], 1, 1).prompt_tokens
        return (
            f"Features of {plan.queries:,} queries with {plan.documents:,} documents: {plan.bytes / 1e9:.2f} GB, about "
            f"{_hours(seconds * plan.prompt_tokens / tokens / 3600)} on one device (measured on one query). It takes "
            "less with --set features.max_tokens=8 or features.max_documents=10."
        )

    def _extractor(self, reader: ShiftReader) -> FeatureExtractor:
        part = self.recipe.features
        device = self.recipe.model.options().resolved_device()
        return FeatureExtractor(
            reader,
            dtype=part.dtype,
            max_tokens=part.max_tokens,
            token_budget=part.token_budget or token_budget_for(device),
            titles=part.titles,
        )

    def _layers(self, count: int) -> tuple[int, ...]:
        chosen = self.recipe.features.layers or tuple(range(1, count))
        if chosen[-1] >= count:
            raise BackboneError(f"Layer {chosen[-1]} was asked for; {self.recipe.model.name} has 1..{count - 1}.")
        return chosen

    def _backbone(self) -> tuple[Backbone, PromptTokenizer, BackboneSpec]:
        part = self.recipe.model
        options = part.options()
        if _place()[1] > 1 and options.device is None:
            options = replace(options, device=_local_device())
        chosen = self.recipe.features.layers
        last_layer = None if chosen is None else chosen[-1]
        loaded = load_model(part.source, revision=part.revision, options=options, last_layer=last_layer)
        core = Backbone(loaded.model, last_layer, num_layers=loaded.num_layers)
        prompts = PromptTokenizer(
            loaded.tokenizer,
            self.recipe.template,
            max_length=min(core.max_length, part.max_length or core.max_length),
            shared_positions=core.causal,
        )
        name = part.name if part.source == part.name else INSIDE
        revision = part.revision or getattr(loaded.model.config, "_commit_hash", None)
        return core, prompts, describe(core, prompts, name, None if name == INSIDE else revision)

    def _train(self, features: FeatureSource, train: list[int], held: list[int], layers: tuple[int, ...]) -> Projection:
        recipe = self.recipe
        self.history: tuple[Epoch, ...] = ()
        if recipe.method != "gradient":
            dim = recipe.fit.projection_dim
            return closed_form(Subset(features, train), layers, recipe.method, projection_dim=dim)
        with tqdm(total=recipe.fit.epochs, desc="training B", unit="epoch", disable=not self.progress) as bar:

            def show(epoch: Epoch) -> None:
                bar.n = epoch.epoch
                bar.set_postfix(loss=f"{epoch.loss:.3f}", f1=f"{epoch.validation_f1:.3f}")

            fitted = fit(
                Subset(features, train),
                Subset(features, held),
                layers,
                recipe.fit,
                output=self.output / "fit",
                device=recipe.model.device,
                identity=self.identity,
                on_epoch=show,
            )
        self.history = fitted.history
        self._draw(lambda: _curves(fitted), "curves")
        self.say(
            f"B of epoch {fitted.best.epoch} of {len(fitted.history)}: F1 at zero {fitted.best.validation_f1:.3f} on "
            f"{len(held)} validation queries."
        )
        return fitted.projection

    def _draw(self, figure: Callable[[], Figure], name: str) -> None:
        if importlib.util.find_spec("matplotlib") is not None:
            plots.save(figure(), self.output / name)

    def _samples(
        self, features: FeatureSource, train: list[int], held: list[int], layers: tuple[int, ...]
    ) -> list[dict[str, float]]:
        """Recall@5 and F1 at zero on the validation queries, by number of training queries; 0 is a random B."""
        rows: list[dict[str, float]] = []
        options = self.recipe.fit.model_copy(update={"epochs": self.recipe.sample_epochs, "keep": "last"})
        order = random.Random(f"samples-{options.seed}").sample(train, len(train))
        heads, width = features[0].shifts.shape[1], features[0].shifts.shape[-1]
        validation = Subset(features, held)
        sizes = [size for size in self.recipe.sample_sizes if size < len(train)]
        for size in [*sizes, len(train)] if self.recipe.sample_sizes else []:
            chosen = Subset(features, order[:size])
            if not size:
                projection = Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
            elif self.recipe.method != "gradient":
                projection = closed_form(chosen, layers, self.recipe.method, projection_dim=options.projection_dim)
            else:
                projection = fit(
                    chosen,
                    validation,
                    layers,
                    options,
                    output=self.output / "fit-samples" / str(size),
                    device=self.recipe.model.device,
                    identity=self.identity,
                ).projection
            found = scored(validation, projection, device=self.recipe.model.device)
            rows.append({"samples": size, "recall@5": ranking_metrics(found)["recall@5"], "f1@0": _mean_f1(found)})
            self.say(f"{size:5} samples: Recall@5 {rows[-1]['recall@5']:.3f}, F1 at zero {rows[-1]['f1@0']:.3f}")
        return rows

    def _recorded(self, config: RSRankConfig, found: dict[str, list[ScoredQuery]]) -> RSRankConfig:
        """The config with metrics and a histogram of the evaluation sets, else of the validation queries."""
        recipe = self.recipe
        scored_sets = found or {"validation": self.validation}
        metrics = {}
        for label, rows in scored_sets.items():
            record = summarise(label, rows).as_dict()
            metrics[label] = {name.replace("@tau", "@0"): float(v) for name, v in record.items() if name != "dataset"}
        _dump(self.output / "metrics.json", metrics)
        settings: dict[str, Any] = {"method": recipe.method, "projection_dim": recipe.fit.projection_dim}
        if recipe.method == "gradient":
            settings |= {**recipe.fit.model_dump(exclude={"seed"}), "epochs_run": len(self.history)}
        chose = ", which also chose the epoch" if recipe.method == "gradient" else ""
        training = TrainingRecord(
            data=self.sources,
            seed=recipe.fit.seed,
            metrics=metrics,
            settings=settings,
            histogram=histogram_of([row for rows in scored_sets.values() for row in rows]),
            notes=f"Made by the recipe {recipe.name!r}."
            + ("" if found else f" Metrics are of the validation queries{chose}."),
        )
        return config.model_copy(update={"training": training})


@dataclass(frozen=True)
class _Unread:
    """What planning needs of a reader: no language model."""

    prompts: PromptTokenizer
    layers: frozenset[int]


def histogram_of(queries: Sequence[ScoredQuery], bins: int = 20) -> Histogram:
    """Scores of relevant and irrelevant documents in equal bins, one of whose edges is zero."""
    scores = [score for query in queries for score in query.scores]
    reach = max((abs(score) for score in scores), default=1.0) or 1.0
    step = 2 * reach / bins
    counts = {True: [0] * bins, False: [0] * bins}
    for query in queries:
        for score, label in zip(query.scores, query.relevant, strict=True):
            # (-reach, ...]: a score of exactly 0 is not above zero, so it belongs to the bin below it.
            place = min(max(math.ceil((score + reach) / step) - 1, 0), bins - 1)
            counts[bool(label)][place] += 1
    return Histogram(
        edges=tuple(-reach + step * i for i in range(bins + 1)),
        relevant=tuple(counts[True]),
        irrelevant=tuple(counts[False]),
    )


def _curves(fitted: Fitted) -> Figure:
    names = ("loss", "calibration", "margin", "orthogonality", "alignment", "frobenius")
    return plots.learning_curves(
        [row.epoch for row in fitted.history],
        {name: [getattr(row, name) for row in fitted.history] for name in names},
        [row.validation_f1 for row in fitted.history],
        fitted.best.epoch,
    )


def _sample_curves(rows: Sequence[dict[str, float]]) -> Figure:
    curves = {"Recall@5": [row["recall@5"] for row in rows], "F1 at zero": [row["f1@0"] for row in rows]}
    return plots.sample_efficiency([int(row["samples"]) for row in rows], curves)


def _mean_f1(found: Sequence[ScoredQuery]) -> float:
    return math.fsum(f1_at(query, 0.0) for query in found) / max(len(found), 1)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here and now."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    best = math.inf
    for _ in range(4):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def _place_for(store: FeatureStore, device: torch.device) -> torch.device | None:
    """Where features may be copied to once: the GPU or host memory, if they take up at most half of what is free."""
    size = sum(store.path(shard).stat().st_size for shard in range(len(store.spec.shards)))
    if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] / 2:
        return device
    return torch.device("cpu") if size < _free_memory() / 2 else None


def _free_memory() -> int:
    """Bytes of host memory that can still be had, within a container's limit."""
    limits = []
    try:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (ValueError, AttributeError, OSError):
        pass  # no such limit, or not Linux
    return min(limits, default=0)


def _place() -> tuple[int, int]:
    """This process's number and how many there are, under ``accelerate launch`` or ``torchrun``."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _local_device() -> str:
    from accelerate import PartialState

    return str(PartialState().device)


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
