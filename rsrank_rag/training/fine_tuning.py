"""Regularised fine-tuning: an artifact's weights, moved as far as labelled queries speak for it.

Training minimises the loss of all queries plus ``penalty / 2`` times the squared change of the
weights. The unit of a change moves a typical score equally in every artifact.

Cross-validation scores each query with weights that were trained without it.

If an artifact has weights besides B, few queries change only those other weights. The other weights
are few, and each of them moves scores more than a number of B does.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import softplus
from tqdm.auto import tqdm

from ..backends.torch.projection import Projection
from ..evaluation.metrics import ScoredQuery
from ..evaluation.statistics import folds
from .feature_scores import (
    BATCH_QUERIES,
    batch_scores,
    batches,
    check_labels,
    scored,
)
from .store import QueryFeatures

# By how much a change of one unit moves a typical score, by tensor. The three similarity weights
# are few and hard to overfit, so they may move more than the many numbers of B and of the heads.
MOVES = {"weight": 0.3, "head_weight": 0.3, "agreement": 1.0}


class FineTuningOptions(BaseModel, extra="forbid", frozen=True):
    """How an artifact's weights are fine-tuned."""

    penalty: PositiveFloat = 3.0
    """On the squared change of the weights."""
    folds: int = Field(default=5, ge=2)
    """Parts that are left out of training, one after another."""
    projection_from: int = 300
    """Fewest queries with which B changes, in an artifact that has other weights, too."""
    iterations: PositiveInt = 40
    """Of L-BFGS, at most."""


@dataclass(frozen=True)
class FineTuned:
    """Fine-tuned weights, and the scores of queries that were left out of training.

    Attributes:
        projection: The weights, trained on all queries.
        before: The queries left out, scored with the artifact's weights, less its threshold.
        after: The same queries, each scored with weights that were trained without it.
    """

    projection: Projection
    before: list[ScoredQuery]
    after: list[ScoredQuery]


def fine_tune(
    features: Sequence[QueryFeatures],
    base: Projection,
    options: FineTuningOptions,
    *,
    threshold: float = 0.0,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> FineTuned:
    """Fine-tune an artifact's weights, and score each query with weights that have not seen it.

    Args:
        features: Of the labelled queries.
        base: The artifact's weights.
        options: How to train.
        threshold: Of the artifact. Fine-tuned weights have the threshold zero.
        device: Where to train.
        progress: Whether to show a progress bar.

    Raises:
        InputError: There are fewer than two queries, or labels of one class only.
    """
    check_labels(features)
    count = len(features)
    tuner = _Tuner(base, options, count, device)
    before: list[ScoredQuery] = []
    after: list[ScoredQuery] = []
    left_out_in_turn = folds(count, options.folds)
    for numbers in tqdm(left_out_in_turn, "folds", unit="fold", disable=not progress):
        left_out = [features[number] for number in numbers]
        of_base = scored(left_out, tuner.weights, device=device)
        before += [query.shifted(threshold) for query in of_base]
        rest = [features[number] for number in range(count) if number not in numbers]
        after += scored(left_out, tuner.train(rest), device=device)
    projection = copy.deepcopy(base)
    projection.load_state_dict(tuner.train(features))
    return FineTuned(projection, before, after)


def fine_tuning_loss(scores: Tensor, relevant: Tensor, irrelevant: Tensor) -> Tensor:
    """Loss of each query, (Q,): a part for the order plus a part for the zero point.

    The order's part is the mean over the relevant documents of a softmax loss. Its rivals are the
    irrelevant documents and a document of score 0. The zero point's part is twice the weighted mean
    of the documents' logistic losses. Relevant documents have weight 2, because F1 is highest if
    documents are kept that are relevant with a probability somewhat below one half.

    Args:
        scores: Scores of Q queries with N documents each, (Q, N).
        relevant: Which entries are relevant documents, (Q, N).
        irrelevant: Which entries are irrelevant documents, (Q, N). Padding is in neither mask.
    """
    zero_document = scores.new_zeros(len(scores), 1)
    rivals = torch.cat([scores.masked_fill(~irrelevant, -torch.inf), zero_document], 1)
    order = softplus(rivals.logsumexp(1, keepdim=True) - scores).masked_fill(~relevant, 0.0)
    weight = relevant * 2.0 + irrelevant
    zero = softplus(torch.where(relevant, -scores, scores)) * weight
    order = order.sum(1) / relevant.sum(1).clamp_min(1)
    return order + 2 * zero.sum(1) / weight.sum(1).clamp_min(1)


class _Tuner:
    """An artifact's weights, and those of them that ``count`` queries in all may move."""

    def __init__(
        self, base: Projection, options: FineTuningOptions, count: int, device: torch.device | str
    ) -> None:
        self.options = options
        self.device = device
        self.weights = {}
        for name, weight in base.named_parameters():
            self.weights[name] = weight.detach().to(device)
        self.moving = dict(self.weights)
        if len(self.weights) > 1 and count < options.projection_from:
            del self.moving["weight"]

    def units(self, features: Sequence[QueryFeatures]) -> dict[str, Tensor]:
        """How far to move a tensor for its `MOVES`: divided by the root mean square gradient.

        The gradient of a sum with random signs has, in the mean, the squared length of all scores'
        gradients together.
        """
        generator = torch.Generator().manual_seed(0)
        free = {name: weight.clone().requires_grad_() for name, weight in self.moving.items()}
        squares = torch.zeros(len(free), device=self.device)
        count = 0
        for batch in batches(features, BATCH_QUERIES, self.device):
            valid = batch.relevant | batch.irrelevant
            signs = torch.randint(0, 2, valid.shape, generator=generator) * 2 - 1
            scores, _ = batch_scores({**self.weights, **free}, batch)
            total = (scores * signs.to(self.device) * valid).sum()
            gradients = torch.autograd.grad(total, list(free.values()))
            squares += torch.stack([gradient.square().sum() for gradient in gradients])
            count += int(valid.sum())
        scales = (count / squares.clamp_min(1e-12)).sqrt()
        return {name: MOVES[name] * scale for name, scale in zip(free, scales, strict=True)}

    def train(self, features: Sequence[QueryFeatures]) -> dict[str, Tensor]:
        """All weights, with the least loss and penalty on some queries."""
        units = self.units(features)
        change = {}
        for name, weight in self.moving.items():
            change[name] = torch.zeros_like(weight, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            list(change.values()),
            max_iter=self.options.iterations,
            history_size=10,
            tolerance_change=1e-4,
            line_search_fn="strong_wolfe",
        )

        def moved() -> dict[str, Tensor]:
            weights = dict(self.weights)
            for name, part in change.items():
                weights[name] = weights[name] + units[name] * part
            return weights

        def closure() -> Tensor:
            optimizer.zero_grad()
            squares = [part.square().sum() for part in change.values()]
            total = self.options.penalty / 2 * torch.stack(squares).sum()
            total.backward()  # type: ignore[no-untyped-call]
            for batch in batches(features, BATCH_QUERIES, self.device):
                scores, _ = batch_scores(moved(), batch)
                loss = fine_tuning_loss(scores, batch.relevant, batch.irrelevant).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                total = total.detach() + loss.detach()
            return total

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return moved()
