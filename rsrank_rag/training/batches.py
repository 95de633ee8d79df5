"""Batches of stored features, and the scores that weights give them.

Axes: L layers, H heads, P projection dimension, D head dimension, Q queries of a batch, M rows (query tokens of all
documents of a batch), N documents of a query.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from ..errors import TrainingError
from ..evaluation.metrics import ScoredQuery
from ..method.projection import Projection, combine, shift_terms, weigh_heads
from .store import FeatureSource, QueryFeatures

BATCH_QUERIES = 16  # queries at a time, where nothing else was asked for
AHEAD = 3  # batches that are read from the disk while earlier ones are trained on

Weights = Mapping[str, Tensor]
"""The parameters of a `Projection` by name: ``weight`` (B), and ``head_weight`` and ``agreement`` where it has them."""


@dataclass(frozen=True)
class Batch:
    """Features of several queries as one matrix of rows."""

    shifts: Tensor  # (L, H, M, D)
    slot: Tensor  # (M,): the row's flat (query, document) place in the padded scores; oracles have places behind them
    share: Tensor  # (M,): 1 / T of the row's query
    relevant: Tensor  # (Q, N) labels
    valid: Tensor  # (Q, N), which places hold a document
    agreement: Tensor  # (Q, N, 2), 0 where there is none
    oracles: int

    @classmethod
    def of(cls, queries: Sequence[QueryFeatures]) -> Self:
        """Join queries."""
        width, oracles = max(len(query.relevant) for query in queries), 0
        slots, shares = [], []
        for row, query in enumerate(queries):
            places = [row * width + i for i in range(len(query.relevant))]
            if query.oracle:
                places.append(len(queries) * width + oracles)
                oracles += 1
            slots += [place for place in places for _ in range(query.tokens)]
            shares += [1 / query.tokens] * (len(places) * query.tokens)

        def padded(rows: Sequence[Sequence[Any]]) -> Tensor:
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

        return cls(
            torch.cat([query.shifts for query in queries], dim=2),
            torch.tensor(slots),
            torch.tensor(shares),
            padded([query.relevant for query in queries]),
            padded([[True] * len(query.relevant) for query in queries]),
            padded([query.agreement or [(0.0, 0.0)] * len(query.relevant) for query in queries]),
            oracles,
        )

    def to(self, device: torch.device) -> Self:
        """On a device. Copies from host memory go through page-locked memory and are not waited for."""

        def moved(part: Tensor) -> Tensor:
            pinned = (
                part.pin_memory() if device.type == "cuda" and part.device.type == "cpu" else part
            )
            return pinned.to(device, non_blocking=True)

        parts: Any = {name: moved(part) for name, part in vars(self).items() if name != "oracles"}
        return replace(self, **parts)


def batches(
    features: FeatureSource, order: Sequence[int], size: int, device: torch.device
) -> Iterator[Batch]:
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


def batch_scores(
    weights: Weights, batch: Batch, precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Scores of a batch, (Q, N), and each oracle's mean term over layers, heads and tokens.

    Without B in the weights, what stands in the place of the shifts are its cosines. The precision is of the matrix
    product; cosines and sums are fp32.
    """
    head_weight = weights.get("head_weight")
    if "weight" in weights:
        weight = weights["weight"].to(precision)
        terms = shift_terms(batch.shifts.to(precision), weight, head_weight)  # (L, H, M)
    else:
        terms = weigh_heads(batch.shifts[..., 0], head_weight)
    places = batch.valid.numel()
    flat = terms.new_zeros(places + batch.oracles).index_add(
        0, batch.slot, terms.sum((0, 1)) * batch.share
    )
    scores = flat[:places].view(batch.valid.shape)
    scores = combine(scores, batch.agreement, weights.get("agreement"))
    return scores, flat[places:] / terms[..., 0].numel()


@torch.no_grad()
def score_batch(
    weights: Weights, batch: Batch, precision: torch.dtype = torch.float32
) -> list[ScoredQuery]:
    """Scores and labels, a query each."""
    scores, _ = batch_scores(weights, batch, precision)
    rows = zip(scores.tolist(), batch.relevant.tolist(), batch.valid.sum(-1).tolist(), strict=True)
    return [ScoredQuery(row[:count], labels[:count]) for row, labels, count in rows]


def scored(
    features: FeatureSource, projection: Projection, *, device: str | torch.device | None = None
) -> list[ScoredQuery]:
    """Scores of all documents of stored features: what the artifact would give, without its language model."""
    where = device_for(device)
    weights = {name: weight.detach().to(where) for name, weight in projection.named_parameters()}
    found = batches(features, range(len(features)), BATCH_QUERIES, where)
    return [row for batch in found for row in score_batch(weights, batch)]


def check_labels(features: FeatureSource) -> None:
    """Refuse to learn from one class."""
    labels: set[bool] = set()
    for number in range(len(features)):
        labels |= set(features[number].relevant)
        if (
            len(labels) == 2
        ):  # mostly after the first query: a whole store need not be read for this
            return
    kind = "relevant" if labels == {True} else "irrelevant"
    raise TrainingError(
        f"All documents are {kind}. Add some of the other kind: B learns to tell them apart."
    )


def device_for(device: str | torch.device | None) -> torch.device:
    """Where to train; None for CUDA if present, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def split(count: int, held: int | float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Numbers of training and validation queries, at random; at least one each.

    `held`: validation queries: a number of them, or below 1 a share.
    """
    if count < 2:
        raise TrainingError(
            f"{count} labelled queries cannot be split into training and validation ones."
        )
    order = list(range(count))
    random.Random(f"split-{seed}").shuffle(order)
    validation = min(max(1, round(count * held) if held < 1 else int(held)), count - 1)
    return sorted(order[validation:]), sorted(order[:validation])
