"""Training B from nothing by gradient on features (paper, Sections 4.3 and 5.3, Appendix B.4).

Axes: L layers, H heads, P projection dimension, D head dimension.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm.auto import tqdm

from ..backends.torch.projection import Projection
from ..errors import TrainingError
from ..evaluation.metrics import apply_rule
from ..partial_files import write_text
from ..ranking.rule import Rule
from .feature_scores import Batch, batch_scores, batches, check_labels, scored
from .losses import (
    alignment_loss,
    calibration_loss,
    frobenius_loss,
    margin_loss,
    orthogonality_loss,
)
from .store import QueryFeatures

TERMS = ("calibration", "margin", "orthogonality", "alignment", "frobenius")
"""The five terms of the objective, in the order of the paper's Section 4.3.2."""


class FitOptions(BaseModel, extra="forbid", frozen=True):
    """How B is trained; the defaults are the paper's (Appendix B.4). Weight 0 removes a term."""

    projection_dim: PositiveInt = 64
    """P."""
    margin: float = 0.5
    """m."""
    calibration_weight: NonNegativeFloat = 0.8
    margin_weight: NonNegativeFloat = 1.0
    irrelevant_weight: NonNegativeFloat = 1.0
    """Of irrelevant documents in calibration and margin. Above 1, fewer of them are above zero."""
    orthogonality_weight: NonNegativeFloat = 0.05
    alignment_weight: NonNegativeFloat = 0.5
    frobenius_weight: NonNegativeFloat = 0.1
    learning_rate: PositiveFloat = 0.05
    final_learning_rate: PositiveFloat = 0.001
    """At the end of the cosine schedule."""
    weight_decay: NonNegativeFloat = 1e-3
    epochs: PositiveInt = 120
    patience: PositiveInt = 35
    """Epochs without a better validation F1 before the end."""
    batch_queries: PositiveInt = 16
    """Queries a step. The paper does not say."""
    seed: int = 0


@dataclass(frozen=True)
class Epoch:
    """One epoch: F1 at zero on the validation queries, and mean loss and terms over its steps.

    Without validation queries, F1 is None.
    """

    epoch: int
    validation_f1: float | None
    loss: float
    terms: dict[str, float]


@dataclass(frozen=True)
class Fitted:
    """A trained B, the epoch that it is of, and all epochs."""

    projection: Projection
    best: Epoch
    history: tuple[Epoch, ...]


def fit(
    train: Sequence[QueryFeatures],
    validation: Sequence[QueryFeatures],
    layers: Sequence[int],
    options: FitOptions,
    *,
    output: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> Fitted:
    """Train B, and take the epoch with the best F1 at zero on the validation queries.

    Without validation queries, the last epoch is taken.

    Args:
        train: Features to learn from, at least one query; they may be larger than memory.
        validation: Features that choose the epoch.
        layers: The L layers that the features are of.
        options: How to train.
        output: Folder for ``log.jsonl``, one epoch a line.
        device: Where to train.
        progress: Whether to show a progress bar.

    Raises:
        InputError: All labels are of one class.
        TrainingError: The loss is not finite.
    """
    check_labels(train)
    _, heads, _, width = train[0].shifts.shape
    first = Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
    weight = first.weight.detach().to(device).requires_grad_()
    optimizer = torch.optim.AdamW(
        [weight], lr=options.learning_rate, weight_decay=options.weight_decay
    )
    steps = options.epochs * math.ceil(len(train) / options.batch_queries)
    schedule = CosineAnnealingLR(optimizer, steps, options.final_learning_rate)
    history: list[Epoch] = []
    epochs = range(1, options.epochs + 1)
    for number in tqdm(epochs, "training B", unit="epoch", disable=not progress):
        order = list(train)
        random.Random(f"{options.seed}-{number}").shuffle(order)
        losses = []
        for batch in batches(order, options.batch_queries, device):
            parts = objective(weight, batch, options)
            optimizer.zero_grad()
            parts[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(parts.detach())
        means = torch.stack(losses).mean(0)
        if not means.isfinite().all():
            raise TrainingError(
                f"The loss is not finite in epoch {number}. Set a smaller fit.learning_rate."
            )
        f1 = None
        if validation:
            rows = scored(validation, {"weight": weight.detach()}, device=device)
            f1 = apply_rule(rows, Rule(0.0)).f1
        loss, *terms = means.tolist()
        epoch = Epoch(number, f1, loss, dict(zip(TERMS, terms, strict=True)))
        history.append(epoch)
        if output is not None:
            log = [json.dumps(asdict(epoch)) + "\n" for epoch in history]
            write_text(output / "log.jsonl", "".join(log))
        best = epoch
        if validation:
            best = max(history, key=lambda epoch: epoch.validation_f1 or 0.0)
        if best is epoch:
            best_weight = weight.detach().cpu().clone()
        if number >= best.epoch + options.patience:
            break
    return Fitted(Projection(best_weight, layers), best, tuple(history))


def objective(weight: Tensor, batch: Batch, options: FitOptions) -> Tensor:
    """The paper's objective (Section 4.3.2) of B, (L, H, P, D), then its five terms, (6,)."""
    scores, oracles = batch_scores({"weight": weight}, batch)
    labels = (batch.relevant, batch.irrelevant)
    emphasis = options.irrelevant_weight
    terms = [
        calibration_loss(scores, *labels, emphasis),
        margin_loss(scores, *labels, options.margin, emphasis),
        orthogonality_loss(weight),
        alignment_loss(oracles),
        frobenius_loss(weight),
    ]
    total = scores.new_zeros(())
    for name, term in zip(TERMS, terms, strict=True):
        total = total + getattr(options, f"{name}_weight") * term
    return torch.stack([total, *terms])
