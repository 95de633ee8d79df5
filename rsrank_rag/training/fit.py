"""Training B by gradient on stored features (paper, Sections 4.3 and 5.3, Appendix B.4).

Axes: L layers, H heads, P projection dimension, D head dimension, Q queries of a batch, M rows (query tokens of all
documents of a batch), N documents of a query.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import TrainingError
from ..evaluation.metrics import ScoredQuery, f1_at
from ..language_model.options import has_fast_bfloat16
from ..method.batching import is_out_of_memory
from ..method.projection import Projection
from ..method.shift import cosine_to_ones
from ..partial_files import write_text
from .losses import alignment_loss, calibration_loss, frobenius_loss, margin_loss, orthogonality_loss
from .store import FeatureSource, QueryFeatures

TERMS = ("calibration", "margin", "orthogonality", "alignment", "frobenius")
"""The five terms of the objective, in the order of the paper's Section 4.3.2."""

AHEAD = 3
"""Batches that are read from the disk while earlier ones are trained on."""


class FitOptions(BaseModel):
    """How B is trained. The defaults are the paper's (Appendix B.4), where it says; a weight of 0 removes a term."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    projection_dim: int = Field(default=64, gt=0, description="P.")
    margin: float = Field(default=0.5, description="m.")
    calibration_weight: float = Field(default=0.8, ge=0)
    margin_weight: float = Field(default=1.0, ge=0)
    orthogonality_weight: float = Field(default=0.05, ge=0)
    alignment_weight: float = Field(default=0.5, ge=0)
    frobenius_weight: float = Field(default=0.1, ge=0)
    learning_rate: float = Field(default=0.05, gt=0)
    final_learning_rate: float = Field(default=0.001, gt=0, description="At the end of the cosine schedule.")
    weight_decay: float = Field(default=1e-3, ge=0)
    epochs: int = Field(default=120, gt=0)
    patience: int = Field(default=35, gt=0, description="Epochs without a better validation F1 before the end.")
    batch_queries: int = Field(default=16, gt=0, description="Queries a step. The paper does not say.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="Of the projection.")
    keep: Literal["best", "last"] = Field(default="best", description="Which epoch's B is the result.")
    seed: int = 0


@dataclass(frozen=True)
class Epoch:
    """One epoch in numbers: mean loss terms over its steps, and F1 at zero on the validation queries."""

    epoch: int
    loss: float
    calibration: float
    margin: float
    orthogonality: float
    alignment: float
    frobenius: float
    learning_rate: float
    validation_f1: float


@dataclass(frozen=True)
class Fitted:
    """A trained B.

    Attributes:
        projection: B of the epoch with the best validation F1 (or of the last one, if that was asked for).
    """

    projection: Projection
    best: Epoch
    history: tuple[Epoch, ...]


@dataclass(frozen=True)
class Batch:
    """Features of several queries as one matrix of rows.

    Attributes:
        shifts: (L, H, M, D).
        slot: Flat (query, document) place of each row in the padded scores; oracles have places of their own behind.
        oracles: Number of oracles.
        share: 1 / T of each row's query.
        relevant: (Q, N) labels.
        valid: (Q, N), which places hold a document.
    """

    shifts: Tensor
    slot: Tensor
    share: Tensor
    relevant: Tensor
    valid: Tensor
    oracles: int

    @classmethod
    def of(cls, queries: Sequence[QueryFeatures]) -> Batch:
        """Join queries."""
        width = max(len(query.relevant) for query in queries)
        slots, shares, oracles = [], [], 0
        for row, query in enumerate(queries):
            places = [row * width + i for i in range(len(query.relevant))]
            if query.oracle:
                places.append(len(queries) * width + oracles)
                oracles += 1
            slots += [place for place in places for _ in range(query.tokens)]
            shares += [1 / query.tokens] * (len(places) * query.tokens)
        return cls(
            torch.cat([query.shifts for query in queries], dim=2),
            torch.tensor(slots),
            torch.tensor(shares),
            torch.tensor([[*query.relevant, *[False] * (width - len(query.relevant))] for query in queries]),
            torch.tensor([[i < len(query.relevant) for i in range(width)] for query in queries]),
            oracles,
        )

    def to(self, device: torch.device) -> Batch:
        """On a device. Copies from host memory go through page-locked memory and are not waited for."""

        def moved(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            if device.type == "cuda" and part.device.type == "cpu":
                part = part.pin_memory()
            return part.to(device, non_blocking=True)

        return Batch(**{part.name: moved(getattr(self, part.name)) for part in fields(self)})


def batch_scores(weight: Tensor, batch: Batch, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The paper's scores of a batch, and the cosines of its oracle shifts.

    `weight`: B, (L, H, P, D). `precision`: of the matrix product; cosines and sums are fp32.

    Returns:
        Scores (Q, N), 0 where there is no document, and each oracle's mean cosine over layers, heads and tokens.
    """
    projected = batch.shifts.to(precision) @ weight.to(precision).mT  # (L, H, M, P)
    cosines = cosine_to_ones(projected.float())
    places = batch.valid.numel()
    flat = torch.zeros(places + batch.oracles, device=weight.device)
    flat = flat.index_add(0, batch.slot, cosines.sum((0, 1)) * batch.share)
    return flat[:places].view(batch.valid.shape), flat[places:] / (weight.shape[0] * weight.shape[1])


def fit(
    train: FeatureSource,
    validation: FeatureSource,
    layers: Sequence[int],
    options: FitOptions | None = None,
    *,
    output: str | Path | None = None,
    device: str | torch.device | None = None,
    identity: str = "",
    on_epoch: Callable[[Epoch], object] = lambda epoch: None,
) -> Fitted:
    """Train B, and keep the one with the best F1 at zero on the validation queries.

    Args:
        train: Features to learn from; they are streamed and may be larger than memory.
        validation: Features to choose the epoch by.
        layers: Backbone layers of the features.
        options: Losses and schedule.
        output: Folder for ``checkpoint.safetensors`` and ``log.jsonl``. If it holds the checkpoint of a run with these
            options that was interrupted, that run goes on and ends with the same B.
        device: Where to train; None for CUDA if present, else the CPU.
        identity: What the features are of. A checkpoint of another identity is not continued.
        on_epoch: Told about each epoch.

    Raises:
        TrainingError: No queries, labels of one class only, too little memory, or the checkpoint is another run's.
    """
    options = options or FitOptions()
    _check(train, validation)
    run = _Run(train, validation, tuple(layers), options, device, identity)
    folder = None if output is None else Path(output)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        run.resume(folder / "checkpoint.safetensors")
    while not run.finished:
        epoch = run.epoch()
        on_epoch(epoch)
        if folder is not None:
            run.save(folder / "checkpoint.safetensors")
            lines = [json.dumps(asdict(row)) for row in run.history]
            write_text(folder / "log.jsonl", "\n".join(lines) + "\n")
    last = options.keep == "last"
    weight = run.weight.detach().cpu() if last else run.best_weight
    return Fitted(Projection(weight, layers), run.history[-1] if last else run.best, tuple(run.history))


def best_epoch(history: Sequence[Epoch]) -> Epoch:
    """The first of those with the highest validation F1."""
    return max(history, key=lambda row: (row.validation_f1, -row.epoch))


def scored(
    features: FeatureSource, projection: Projection, *, device: str | torch.device | None = None
) -> list[ScoredQuery]:
    """Scores of all documents of stored features: what the artifact would give, without its language model."""
    where = _device(device)
    weight = projection.weight.detach().to(where)
    return [row for batch in _batches(features, range(len(features)), 16, where) for row in _score(weight, batch, None)]


class _Run:
    """Everything that changes during training."""

    def __init__(
        self,
        train: FeatureSource,
        validation: FeatureSource,
        layers: tuple[int, ...],
        options: FitOptions,
        device: str | torch.device | None,
        identity: str,
    ) -> None:
        self.layers, self.features = layers, identity
        self.train, self.validation, self.options = train, validation, options
        self.device = _device(device)
        self.precision = _precision(options.precision, self.device)
        count, heads, _, width = train[0].shifts.shape
        if count != len(layers):
            raise TrainingError(f"The features hold {count} layers, but {len(layers)} were named.")
        first = Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
        self.weight = first.weight.detach().to(self.device).requires_grad_()
        self.optimizer = torch.optim.AdamW(
            [self.weight], lr=options.learning_rate, weight_decay=options.weight_decay, fused=self.device.type == "cuda"
        )
        self.best_weight = self.weight.detach().cpu().clone()
        self.history: list[Epoch] = []

    @property
    def best(self) -> Epoch:
        return best_epoch(self.history)

    @property
    def finished(self) -> bool:
        if not self.history:
            return False
        return len(self.history) >= self.options.epochs or len(self.history) - self.best.epoch >= self.options.patience

    def epoch(self) -> Epoch:
        """One epoch.

        Raises:
            TrainingError: The loss is not finite, or a batch does not fit into memory.
        """
        try:
            return self._epoch()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"{self.options.batch_queries} queries at once do not fit into the memory of {self.device}. Set a "
                "smaller fit.batch_queries."
            ) from error

    def _epoch(self) -> Epoch:
        """One pass over the training queries, in an order that depends on the seed and the epoch alone."""
        number, options = len(self.history) + 1, self.options
        order = list(range(len(self.train)))
        random.Random(f"{options.seed}-{number}").shuffle(order)
        batches = math.ceil(len(order) / options.batch_queries)
        sums = torch.zeros(6, device=self.device)
        for step, batch in enumerate(_batches(self.train, order, options.batch_queries, self.device)):
            progress = (number - 1 + step / batches) / options.epochs
            span = options.learning_rate - options.final_learning_rate
            rate = options.final_learning_rate + span * (1 + math.cos(math.pi * progress)) / 2
            self.optimizer.param_groups[0]["lr"] = rate
            terms = self._terms(batch)
            self.optimizer.zero_grad()
            terms[0].backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            sums += torch.stack([term.detach() for term in terms])
        means = (sums / batches).tolist()
        if not all(map(math.isfinite, means)):
            raise TrainingError(f"The loss is not finite in epoch {number}. Lower learning_rate.")
        terms_of = dict(zip(TERMS, means[1:], strict=True))
        f1 = self._validation_f1()
        self.history.append(Epoch(epoch=number, loss=means[0], **terms_of, learning_rate=rate, validation_f1=f1))
        if self.best.epoch == number:
            self.best_weight = self.weight.detach().cpu().clone()
        return self.history[-1]

    def _terms(self, batch: Batch) -> tuple[Tensor, ...]:
        """The objective and its five terms, unweighted."""
        scores, oracle = batch_scores(self.weight, batch, self.precision)
        terms = (
            calibration_loss(scores, batch.relevant, batch.valid),
            margin_loss(scores, batch.relevant, self.options.margin, batch.valid),
            orthogonality_loss(self.weight),
            alignment_loss(oracle) if oracle.numel() else scores.new_zeros(()),
            frobenius_loss(self.weight),
        )
        weights = (getattr(self.options, f"{name}_weight") for name in TERMS)
        total = sum((weight * term for weight, term in zip(weights, terms, strict=True)), scores.new_zeros(()))
        return total, *terms

    def _validation_f1(self) -> float:
        found = [
            f1_at(row, 0.0)
            for batch in _batches(self.validation, range(len(self.validation)), self.options.batch_queries, self.device)
            for row in _score(self.weight.detach(), batch, self.precision)
        ]
        return math.fsum(found) / len(found)

    @property
    def identity(self) -> dict[str, Any]:
        queries = {"train": len(self.train), "validation": len(self.validation), "features": self.features}
        return {**self.options.model_dump(), **queries, "layers": list(self.layers)}

    def save(self, path: Path) -> None:
        moments = self.optimizer.state[self.weight]
        tensors = {
            "weight": self.weight.detach().cpu(),
            "best_weight": self.best_weight,
            "exp_avg": moments["exp_avg"].cpu(),
            "exp_avg_sq": moments["exp_avg_sq"].cpu(),
            "step": moments["step"].cpu(),
        }
        record = {"options": self.identity, "history": [asdict(row) for row in self.history]}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"run": json.dumps(record)})
        partial.replace(path)

    def resume(self, path: Path) -> None:
        if not path.exists():
            return
        with safe_open(path, framework="pt") as file:
            record = json.loads(file.metadata()["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
        if record["options"] != self.identity:
            different = {name: value for name, value in record["options"].items() if self.identity.get(name) != value}
            raise TrainingError(
                f"{path} belongs to a run with {different}. Use another folder, or remove the checkpoint."
            )
        with torch.no_grad():
            self.weight.copy_(tensors["weight"])
        self.best_weight = tensors["best_weight"]
        self.optimizer.state[self.weight] = {
            "step": tensors["step"].to(self.device),  # the fused optimiser wants it there, the other does not mind
            "exp_avg": tensors["exp_avg"].to(self.device),
            "exp_avg_sq": tensors["exp_avg_sq"].to(self.device),
        }
        self.history = [Epoch(**row) for row in record["history"]]


def _batches(features: FeatureSource, order: Sequence[int], size: int, device: torch.device) -> Iterator[Batch]:
    """Batches in order, read ahead by threads."""

    def make(numbers: Sequence[int]) -> Batch:
        return Batch.of([features[number] for number in numbers]).to(device)

    groups = [order[start : start + size] for start in range(0, len(order), size)]
    with ThreadPoolExecutor(2) as threads:
        waiting = deque(threads.submit(make, group) for group in groups[:AHEAD])
        for following in [*groups[AHEAD:], *[None] * min(AHEAD, len(groups))]:
            batch = waiting.popleft().result()
            if following is not None:
                waiting.append(threads.submit(make, following))
            yield batch


@torch.no_grad()
def _score(weight: Tensor, batch: Batch, precision: torch.dtype | None) -> list[ScoredQuery]:
    scores, _ = batch_scores(weight, batch, precision or torch.float32)
    rows = zip(scores.tolist(), batch.relevant.tolist(), batch.valid.sum(-1).tolist(), strict=True)
    return [ScoredQuery(row[:count], labels[:count]) for row, labels, count in rows]


def _check(train: FeatureSource, validation: FeatureSource) -> None:
    if not len(train) or not len(validation):
        raise TrainingError(
            f"Training needs queries to learn from and others to choose the epoch by; got {len(train)} and "
            f"{len(validation)}."
        )
    labels: set[bool] = set()
    for number in range(len(train)):
        labels |= set(train[number].relevant)
        if len(labels) == 2:  # mostly after the first query: a whole store need not be read for this
            return
    kind = "relevant" if labels == {True} else "irrelevant"
    raise TrainingError(f"All documents are {kind}. Add some of the other kind: B learns to tell them apart.")


def _device(device: str | torch.device | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _precision(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32


def split(count: int, held: int | float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Numbers of training and validation queries, at random; at least one each.

    `held`: validation queries: a number of them, or below 1 a share.

    Raises:
        TrainingError: Fewer than two queries.
    """
    if count < 2:
        raise TrainingError(f"{count} labelled queries cannot be split into training and validation ones.")
    order = list(range(count))
    random.Random(f"split-{seed}").shuffle(order)
    validation = min(max(1, round(count * held) if held < 1 else int(held)), count - 1)
    return sorted(order[validation:]), sorted(order[:validation])
