"""Training B from nothing: by gradient on stored features (paper, Sections 4.3 and 5.3, Appendix B.4), or solved for.

Axes: L layers, H heads, P projection dimension, D head dimension.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import TrainingError
from ..evaluation.metrics import f1_at, mean
from ..language_model.options import has_fast_bfloat16
from ..method.concurrent_batches import is_out_of_memory
from ..method.projection import Projection
from ..partial_files import appearing, write_text
from .batches import Batch, batch_scores, batches, check_labels, device_for, score_batch
from .losses import (
    alignment_loss,
    calibration_loss,
    frobenius_loss,
    margin_loss,
    orthogonality_loss,
)
from .store import FeatureSource

TERMS = ("calibration", "margin", "orthogonality", "alignment", "frobenius")
"""The five terms of the objective, in the order of the paper's Section 4.3.2."""

CHECKPOINT = "checkpoint.pt"


class FitOptions(BaseModel, extra="forbid", frozen=True):
    """How B is trained. The defaults are the paper's (Appendix B.4), where it says; a weight of 0 removes a term."""

    projection_dim: int = Field(default=64, gt=0, description="P.")
    margin: float = Field(default=0.5, description="m.")
    calibration_weight: float = Field(default=0.8, ge=0)
    margin_weight: float = Field(default=1.0, ge=0)
    orthogonality_weight: float = Field(default=0.05, ge=0)
    alignment_weight: float = Field(default=0.5, ge=0)
    frobenius_weight: float = Field(default=0.1, ge=0)
    learning_rate: float = Field(default=0.05, gt=0)
    final_learning_rate: float = Field(
        default=0.001, gt=0, description="At the end of the cosine schedule."
    )
    weight_decay: float = Field(default=1e-3, ge=0)
    epochs: int = Field(default=120, gt=0)
    patience: int = Field(
        default=35, gt=0, description="Epochs without a better validation F1 before the end."
    )
    batch_queries: int = Field(
        default=16, gt=0, description="Queries a step. The paper does not say."
    )
    keep: Literal["best", "last"] = Field(
        default="best", description="Which epoch's B is the result."
    )
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
    """A trained B: that of the epoch with the best validation F1, or of the last one, if that was asked for."""

    projection: Projection
    best: Epoch | None = None  # none where it was not trained by gradient
    history: tuple[Epoch, ...] = ()


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

    Features are streamed and may be larger than memory.

    `output`: folder for ``log.jsonl`` and the checkpoint, from which an interrupted run goes on to the same B.
    `device`: None for CUDA if present, else the CPU. `identity`: what the features are of; a checkpoint of another one
    is not continued. `on_epoch`: told about each epoch.

    Raises TrainingError: no queries, labels of one class only, too little memory, or the checkpoint is another run's.
    """
    if not len(train) or not len(validation):
        raise TrainingError(
            f"B needs queries to learn from and others to choose the epoch by; got {len(train)} and {len(validation)}."
        )
    check_labels(train)
    options = options or FitOptions()
    run = _Run(train, validation, tuple(layers), options, device_for(device), identity)
    folder = None if output is None else Path(output)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        run.resume(folder / CHECKPOINT)
    while not run.finished:
        epoch = run.epoch()
        on_epoch(epoch)
        if folder is not None:
            run.save(folder / CHECKPOINT)
            write_text(
                folder / "log.jsonl", "".join(json.dumps(asdict(row)) + "\n" for row in run.history)
            )
    last = options.keep == "last"
    weight = run.weight.detach().cpu() if last else run.best_weight
    return Fitted(
        Projection(weight, layers),
        run.history[-1] if last else best_epoch(run.history),
        tuple(run.history),
    )


def best_epoch(history: Sequence[Epoch]) -> Epoch:
    """The first of those with the highest validation F1."""
    return max(history, key=lambda row: (row.validation_f1, -row.epoch))


@dataclass
class _Run:
    """Everything that changes during training."""

    train: FeatureSource
    validation: FeatureSource
    layers: tuple[int, ...]
    options: FitOptions
    device: torch.device
    features: str  # what they are of

    def __post_init__(self) -> None:
        train, layers, options, device = self.train, self.layers, self.options, self.device
        self.precision = (
            torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        )  # of the projection
        about = {"train": len(train), "validation": len(self.validation), "features": self.features}
        self.identity: dict[str, Any] = {**options.model_dump(), **about, "layers": list(layers)}
        count, heads, _, width = train[0].shifts.shape
        if count != len(layers):
            raise TrainingError(f"The features hold {count} layers, but {len(layers)} were named.")
        first = Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
        self.weight = first.weight.detach().to(device).requires_grad_()
        self.optimizer = torch.optim.AdamW(
            [self.weight],
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            fused=device.type == "cuda",
        )
        steps = options.epochs * math.ceil(len(train) / options.batch_queries)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, steps, options.final_learning_rate
        )
        self.best_weight = self.weight.detach().cpu().clone()
        self.history: list[Epoch] = []

    @property
    def finished(self) -> bool:
        done = len(self.history)
        return bool(done) and done >= min(
            self.options.epochs, best_epoch(self.history).epoch + self.options.patience
        )

    def epoch(self) -> Epoch:
        """One pass over the training queries, in an order that depends on the seed and the epoch alone."""
        number, order = len(self.history) + 1, list(range(len(self.train)))
        random.Random(f"{self.options.seed}-{number}").shuffle(order)
        try:
            terms = [self._step(batch) for batch in self._batches(self.train, order)]
            found = self._batches(self.validation, range(len(self.validation)))
            given = {"weight": self.weight.detach()}
            f1 = mean(
                [
                    f1_at(row, 0.0)
                    for batch in found
                    for row in score_batch(given, batch, self.precision)
                ]
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"{self.options.batch_queries} queries at once do not fit into the memory of {self.device}. Set a "
                "smaller fit.batch_queries."
            ) from error
        loss, *means = torch.stack(terms).mean(0).tolist()
        if not all(map(math.isfinite, (loss, *means))):
            raise TrainingError(f"The loss is not finite in epoch {number}. Lower learning_rate.")
        terms_of = dict(zip(TERMS, means, strict=True))
        self.history.append(
            Epoch(number, loss, **terms_of, learning_rate=self.rate, validation_f1=f1)
        )
        if best_epoch(self.history).epoch == number:
            self.best_weight = self.weight.detach().cpu().clone()
        return self.history[-1]

    def _batches(self, features: FeatureSource, order: Sequence[int]) -> Iterator[Batch]:
        return batches(features, order, self.options.batch_queries, self.device)

    def _step(self, batch: Batch) -> Tensor:
        """One step of the optimiser; the objective and its five terms, unweighted."""
        scores, oracle = batch_scores({"weight": self.weight}, batch, self.precision)
        terms = (
            calibration_loss(scores, batch.relevant, batch.valid),
            margin_loss(scores, batch.relevant, self.options.margin, batch.valid),
            orthogonality_loss(self.weight),
            alignment_loss(oracle) if oracle.numel() else scores.new_zeros(()),
            frobenius_loss(self.weight),
        )
        weights = (getattr(self.options, f"{name}_weight") for name in TERMS)
        total = sum(
            (weight * term for weight, term in zip(weights, terms, strict=True)),
            scores.new_zeros(()),
        )
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        self.rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        return torch.stack([total, *terms]).detach()

    def save(self, path: Path) -> None:
        run = {
            "options": self.identity,
            "history": [asdict(row) for row in self.history],
            "rate": self.schedule.state_dict(),
            "groups": self.optimizer.state_dict()[
                "param_groups"
            ],  # with the rate that the schedule goes on from
        }
        tensors = {
            "weight": self.weight.detach(),
            "best_weight": self.best_weight,
            **self.optimizer.state[self.weight],
        }
        content = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with appearing(path) as partial:
            save_file(content, partial, {"run": json.dumps(run)})

    def resume(self, path: Path) -> None:
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            state, record = (
                {name: file.get_tensor(name) for name in list(file.keys())},
                json.loads(file.metadata()["run"]),
            )
        if record["options"] != self.identity:
            different = {
                name: value
                for name, value in record["options"].items()
                if self.identity.get(name) != value
            }
            raise TrainingError(
                f"{path} belongs to a run with {different}. Use another folder, or remove the checkpoint."
            )
        with torch.no_grad():
            self.weight.copy_(state.pop("weight"))
        self.best_weight = state.pop("best_weight")
        self.optimizer.load_state_dict({"param_groups": record["groups"], "state": {0: state}})
        self.schedule.load_state_dict(record["rate"])
        self.history = [Epoch(**row) for row in record["history"]]


def closed_form(
    features: FeatureSource,
    layers: Sequence[int],
    method: str,
    *,
    projection_dim: int = 64,
    ridge: float = 1e-3,
) -> Projection:
    """Solve for B (paper, Appendix B.1).

    Its rows are all alike, so a cosine to the ones vector is 1 or -1 for each layer, head and token, whatever the
    length of the shift: it ranks, but its zero means little. Matrices are accumulated in fp64, query by query.

    - ``oracle``: B mu = 1, with mu the mean oracle shift.
    - ``separation``: ridge regression of relevant shifts to 1 and irrelevant ones to 0.
    - ``combined``: the least response to irrelevant shifts among those with B mu = 1.

    `ridge`: added to the diagonal, as a share of its mean. TrainingError: no query has a relevant document.
    """
    gram, target, count = _moments(features, separation=method == "separation")
    if not count:
        raise TrainingError(
            "No query has a relevant document, so there is no oracle shift to align with."
        )
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    if method == "oracle":
        gram = eye
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-12)
    direction = torch.linalg.solve(gram + ridge * diagonal * eye, target[..., None])[
        ..., 0
    ]  # (L, H, D)
    if method != "separation":  # B mu = 1
        direction = direction / (direction * target / count).sum(-1, keepdim=True).clamp_min(1e-12)
    weight = direction[:, :, None].expand(-1, -1, projection_dim, -1)  # (L, H, P, D)
    return Projection(weight.float().contiguous(), layers)


def _moments(features: FeatureSource, *, separation: bool) -> tuple[Tensor, Tensor, int]:
    """S^T S over irrelevant shifts (L, H, D, D), and the sum (L, H, D) and number of oracle shifts.

    For the separation S has all documents, and relevant ones stand in for the oracle.
    """
    gram, target, count = torch.zeros(()), torch.zeros(()), 0
    for number in range(len(features)):
        query = features[number]
        labels = torch.tensor(query.relevant).repeat_interleave(query.tokens)
        shifts = query.shifts.double().cpu()
        documents = shifts[:, :, : len(labels)]
        rows = documents if separation else documents[:, :, ~labels]
        positive = documents[:, :, labels] if separation else shifts[:, :, len(labels) :]
        gram = gram + rows.mT @ rows
        target = target + positive.sum(2)
        count += positive.shape[2]
    return gram, target, count
