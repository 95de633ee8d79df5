"""Training for a domain: an artifact's weights, moved as far as labelled queries speak for it and no farther.

What is sought is the most probable change of the weights: the loss of all queries plus ``strength / 2`` times the
squared change, in units that move a typical score alike in every artifact. Few queries weigh little against the second
part, so the base stays; many move it. Of several strengths, that is taken which is best on queries left out of training
(cross-validation), by the mean of nDCG@5 and F1 at zero; the base as it is, unless it gains more than a standard error.

Below some hundred queries B stays where an artifact has other weights: these are few, and move scores more.

Did it help? The verdict compares base and trained weights on the same queries, which neither has seen.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import softplus

from ..errors import TrainingError
from ..evaluation.metrics import ScoredQuery, ranking_by_query, selection
from ..evaluation.statistics import Estimate, Record, estimate_mean, paired_differences
from ..method.projection import Projection, shift_terms
from .batches import (
    BATCH_QUERIES,
    Batch,
    Weights,
    batch_scores,
    batches,
    check_labels,
    device_for,
    score_batch,
)
from .store import FeatureSource, QueryFeatures

SPREAD = {"weight": 0.3, "head_weight": 0.3, "agreement": 1.0}
"""By how much a change of one unit moves a typical score, by tensor."""

Outcome = Literal[
    "better",
    "no difference that can be told",
    "worse: the base is kept",
    "worse: taken all the same",
]

WORSE: Outcome = "worse: the base is kept"

DECIDING = ("ndcg@5", "f1")
"""What training must not lower, and should raise one of: the order of documents, and which of them are kept."""

HOLD_OUT_FROM = (
    500  # from so many queries on, two tenths are left out of training instead of each fold in turn
)


class DomainOptions(BaseModel, extra="forbid", frozen=True):
    """How weights near those of a base are found."""

    strengths: tuple[float, ...] = Field(
        default=(10.0, 3.0, 1.0), min_length=1, description="Besides the base as it is."
    )
    folds: int = Field(
        default=5, ge=2, description="Parts that are left out of training, one after another."
    )
    projection_from: int = Field(
        default=300, description="B moves from so many queries on, if there is more to move."
    )
    iterations: int = Field(default=40, gt=0, description="Of L-BFGS, at most.")


@dataclass(frozen=True)
class Trained:
    """What training for a domain found."""

    projection: Projection
    strength: float  # the chosen one; infinite where the base did best
    values: dict[
        float, float
    ]  # by strength: mean of nDCG@5 and F1 at zero on queries left out; of the base first
    base: list[ScoredQuery]  # the queries left out, by the base
    trained: list[ScoredQuery]  # the same by weights that were trained without them


def train_near(
    features: FeatureSource,
    base: Projection,
    options: DomainOptions,
    *,
    device: str | torch.device | None = None,
    watch: Callable[[list[list[int]]], Iterable[list[int]]] = iter,
) -> Trained:
    """Find weights near a base, and how they do on queries that they have not seen.

    The strength that scores a fold's queries is chosen by the other folds.

    `device`: None for CUDA if present, else the CPU. `watch`: what folds are taken through, such as a progress bar.

    Raises TrainingError: fewer than two queries, or labels of one class only.
    """
    check_labels(features)
    near = _Near(features, base, options, device_for(device))
    strengths, everything = (math.inf, *options.strengths), range(len(features))
    found = []  # by fold and strength: the queries left out
    for held in watch(parts(len(features), options.folds)):
        rest = sorted({*everything} - {*held})
        found.append([near.scored(projection, held) for projection in near.path(rest, strengths)])
    values = [torch.stack([_values(rows) for rows in fold]) for fold in found]
    chosen = [_best([*values[:number], *values[number + 1 :]]) for number in range(len(values))]
    best = _best(values)
    *_, projection = near.path(everything, strengths[: best + 1])
    return Trained(
        projection,
        strengths[best],
        dict(zip(strengths, torch.cat(values, 1).mean(1).tolist(), strict=True)),
        [row for fold in found for row in fold[0]],
        [row for fold, choice in zip(found, chosen, strict=True) for row in fold[choice]],
    )


def _values(rows: Sequence[ScoredQuery]) -> Tensor:
    """The mean of each query's nDCG@5 and F1 at zero."""
    found = by_query(rows)
    return torch.tensor([found["ndcg@5"], found["f1"]], dtype=torch.float64).mean(0)


def _best(folds: Sequence[Tensor]) -> int:
    """The best strength by its values, (strengths, queries) a fold; 0, the base's, if that is hardly worse."""
    values = torch.cat(list(folds), 1)
    gains = values - values[0]
    best = int(gains.mean(1).argmax())
    error = gains[best].std() / math.sqrt(gains.shape[1])
    return (
        best if bool(gains[best].mean() > error) else 0
    )  # of a single query, the error is not a number


def parts(count: int, folds: int) -> list[list[int]]:
    """Numbers of the queries that are left out, one list a fold."""
    if count < 2:
        raise TrainingError(
            f"{count} labelled query cannot be learned from and measured on. Label more."
        )
    order = list(range(count))
    random.Random("folds-0").shuffle(order)
    if count >= HOLD_OUT_FROM:
        return [sorted(order[start::10]) for start in range(2)]
    return [sorted(order[start::folds]) for start in range(min(folds, count))]


def domain_loss(scores: Tensor, relevant: Tensor, valid: Tensor) -> Tensor:
    """Loss of each query, (Q,): for the order, and for the zero.

    Each relevant document against the irrelevant ones and one of score 0 (softmax), and twice the documents' mean
    logistic loss by their signs, in which a relevant one counts double: F1 is best where a document is kept that is
    relevant with somewhat less than even odds. All three are (Q, N).
    """
    positive, negative = relevant & valid, ~relevant & valid
    rivals = torch.cat(
        [scores.masked_fill(~negative, -torch.inf), scores.new_zeros(len(scores), 1)], 1
    )
    order = softplus(rivals.logsumexp(1, keepdim=True) - scores).masked_fill(~positive, 0.0)
    weight = positive * 2.0 + negative
    zero = softplus(torch.where(relevant, -scores, scores)) * weight
    return order.sum(1) / positive.sum(1).clamp_min(1) + 2 * zero.sum(1) / weight.sum(1).clamp_min(
        1
    )


def _with_cosines(query: QueryFeatures, weight: Tensor) -> QueryFeatures:
    """A query with the mean cosines that B, (L, H, P, D), gives its documents in the place of their shifts."""
    cosines = shift_terms(query.shifts.to(weight.device).float(), weight)  # (L, H, M * T)
    means = cosines.reshape(*cosines.shape[:2], -1, query.tokens).mean(3, keepdim=True)
    return replace(query, shifts=means, tokens=1)


class _Near:
    """Weights near a base's."""

    def __init__(
        self,
        features: FeatureSource,
        base: Projection,
        options: DomainOptions,
        device: torch.device,
    ) -> None:
        self.base, self.options, self.device = base, options, device
        weights = {name: weight.detach().to(device) for name, weight in base.named_parameters()}
        if len(weights) > 1 and len(features) < options.projection_from:
            fixed = weights.pop("weight")
            features = [_with_cosines(features[number], fixed) for number in range(len(features))]
        self.features, self.weights = features, weights
        self.units = self._units()

    def path(self, numbers: Sequence[int], strengths: Sequence[float]) -> Iterator[Projection]:
        """The weights that these queries lead to at each strength, from the greatest to the smallest."""
        change = {
            name: torch.zeros_like(weight, requires_grad=True)
            for name, weight in self.weights.items()
        }
        for strength in strengths:
            if math.isfinite(strength):
                self._minimise(change, numbers, strength)
            found = copy.deepcopy(self.base)
            found.load_state_dict({**found.state_dict(), **self._moved(change)})
            yield found

    def scored(self, projection: Projection, numbers: Sequence[int]) -> list[ScoredQuery]:
        """Scores of queries."""
        given = dict(projection.named_parameters())
        weights = {name: given[name].detach().to(self.device) for name in self.weights}
        return [row for batch in self._batches(numbers) for row in score_batch(weights, batch)]

    def _units(self) -> dict[str, Tensor]:
        """How far to move a tensor for its `SPREAD`: that, by the root mean square of scores' gradients.

        Gradients of sums with random signs have in the mean the squared length of all of them together.
        """
        generator = torch.Generator().manual_seed(0)
        free = {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}
        squares, count = dict.fromkeys(free, torch.zeros((), device=self.device)), 0
        for batch in self._batches(range(len(self.features))):
            signs = (
                torch.randint(0, 2, batch.valid.shape, generator=generator).to(self.device) * 2 - 1
            )
            total = (batch_scores(free, batch)[0] * signs * batch.valid).sum()
            slopes = torch.autograd.grad(total, list(free.values()))
            squares = {
                name: squares[name] + slope.square().sum()
                for name, slope in zip(free, slopes, strict=True)
            }
            count += int(batch.valid.sum())
        return {
            name: SPREAD[name] * (count / square.clamp_min(1e-12)).sqrt()
            for name, square in squares.items()
        }

    def _minimise(self, change: Weights, numbers: Sequence[int], strength: float) -> None:
        optimizer = torch.optim.LBFGS(
            list(change.values()),
            max_iter=self.options.iterations,
            history_size=10,
            tolerance_change=1e-4,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            total = (
                strength
                / 2
                * sum((part.square().sum() for part in change.values()), torch.zeros(()))
            )
            total.backward()  # type: ignore[no-untyped-call]
            for batch in self._batches(numbers):
                scores, _ = batch_scores(self._moved(change), batch)
                loss = domain_loss(scores, batch.relevant, batch.valid).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                total = total.detach() + loss.detach()
            return total

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    def _moved(self, change: Weights) -> dict[str, Tensor]:
        return {
            name: weight + self.units[name] * change[name] for name, weight in self.weights.items()
        }

    def _batches(self, numbers: Sequence[int]) -> Iterator[Batch]:
        return batches(self.features, numbers, BATCH_QUERIES, self.device)


class Verdict(Record):
    """Base and trained weights on so many held-out queries: ``ndcg@5``; ``precision``, ``recall``, ``f1`` of the kept.

    Worse if the interval of a difference of one of `DECIDING` lies below zero, else better if one lies above.
    """

    queries: int
    base: dict[str, Estimate]
    trained: dict[str, Estimate]
    difference: dict[str, Estimate]  # trained minus base, query by query (paired bootstrap)
    outcome: Outcome


def judge(
    base: Sequence[ScoredQuery],
    trained: Sequence[ScoredQuery],
    thresholds: tuple[float, float] = (0.0, 0.0),
) -> Verdict:
    """Compare two scorings of the same queries, each with its threshold."""
    first, second = map(by_query, (base, trained), thresholds)
    difference = {
        name: estimate_mean(paired_differences(second[name], first[name])) for name in first
    }
    deciding = [difference[name] for name in DECIDING]
    outcome: Outcome = "no difference that can be told"
    if any(found.high is not None and found.high < 0 for found in deciding):
        outcome = WORSE
    elif any(found.low is not None and found.low > 0 for found in deciding):
        outcome = "better"
    means = [
        {name: estimate_mean(values) for name, values in found.items()} for found in (first, second)
    ]
    return Verdict(
        queries=len(base), base=means[0], trained=means[1], difference=difference, outcome=outcome
    )


def by_query(rows: Sequence[ScoredQuery], threshold: float = 0.0) -> dict[str, list[float]]:
    """Each query's ``ndcg@5``, and ``precision``, ``recall`` and ``f1`` of what scores above the threshold."""
    kept = [selection(query, threshold) for query in rows]
    parts = {
        name: [found[place] for found in kept]
        for place, name in enumerate(("precision", "recall", "f1"))
    }
    return {"ndcg@5": ranking_by_query(rows)["ndcg@5"], **parts}
