"""Batches of features, and the scores that weights give them.

Axes: L layers, H heads, P projection dimension, D head dimension, Q queries of a batch, N documents
of a query, R token rows: one for each query token of each document of a batch.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError
from ..evaluation.metrics import ScoredQuery
from ..method.formula import combine, shift_terms, token_mean
from .store import QueryFeatures

# Queries at a time, where nothing else is set.
BATCH_QUERIES = 16

NamedWeights = Mapping[str, Tensor]
"""Parameters of a `Projection` by name: ``weight`` (B), ``head_weight``, ``agreement``."""


@dataclass(frozen=True)
class Batch:
    """Features of several queries as one matrix of rows, on a device."""

    queries: Sequence[QueryFeatures]
    # (L, H, R, D).
    shifts: Tensor
    # (Q, N): which entries are relevant documents, and which irrelevant ones.
    relevant: Tensor
    irrelevant: Tensor
    # (Q, N, W, 2): cosine and MaxSim by similarity window, 0 where there are none.
    similarity: Tensor


def make_batch(queries: Sequence[QueryFeatures], device: torch.device | str) -> Batch:
    """Join the features of Q queries into one batch on a device; for shapes see `Batch`."""
    labels = []
    similarities = []
    for query in queries:
        labels.append(torch.tensor(query.relevant, dtype=torch.bool))
        similarity = query.similarity
        if similarity is None:
            similarity = torch.zeros(len(query.relevant), 1, 2)
        similarities.append(similarity)
    similarities = with_equal_windows(similarities)
    return Batch(
        queries,
        torch.cat([query.shifts for query in queries], dim=2).to(device),
        pad_sequence(labels, batch_first=True).to(device),
        pad_sequence([~relevant for relevant in labels], batch_first=True).to(device),
        pad_sequence(similarities, batch_first=True).to(device),
    )


def with_equal_windows(similarities: Sequence[Tensor]) -> list[Tensor]:
    """Similarities (N, W, 2) with the same W: missing windows repeat the first one."""
    most = max(similarity.shape[1] for similarity in similarities)
    equal = []
    for similarity in similarities:
        missing = most - similarity.shape[1]
        equal.append(torch.cat([similarity, similarity[:, :1].expand(-1, missing, -1)], 1))
    return equal


def batches(
    features: Sequence[QueryFeatures], size: int, device: torch.device | str
) -> Iterator[Batch]:
    """Batches of so many queries, in order."""
    for start in range(0, len(features), size):
        yield make_batch(features[start : start + size], device)


def batch_scores(weights: NamedWeights, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores of a batch in float32, and the mean terms of its oracle shifts.

    Args:
        weights: Of an artifact.
        batch: Q queries.

    Returns:
        Scores (Q, N), and the mean shift term of each oracle shift, over layers, heads and tokens.
    """
    terms = shift_terms(batch.shifts.float(), weights["weight"], weights.get("head_weight"))
    layers, heads, _ = terms.shape
    lengths = [query.shifts.shape[2] for query in batch.queries]
    scores = []
    oracles = []
    parts = torch.split(terms.sum((0, 1)), lengths)
    for query, rows in zip(batch.queries, parts, strict=True):
        means = token_mean(rows.view(-1, query.tokens), rows.new_tensor([query.tokens]))
        scores.append(means[: len(query.relevant)])
        oracles.append(means[len(query.relevant) :])
    shift_scores = pad_sequence(scores, batch_first=True)
    combined = combine(shift_scores, batch.similarity, weights.get("agreement"))
    return combined, torch.cat(oracles) / (layers * heads)


@torch.no_grad()
def scored(
    features: Sequence[QueryFeatures],
    weights: NamedWeights,
    *,
    device: torch.device | str = "cpu",
) -> list[ScoredQuery]:
    """Scores of stored features, without the language model.

    Args:
        features: Of Q queries.
        weights: As in `batch_scores`.
        device: Where to compute.

    Returns:
        For each query, its documents' scores and labels.
    """
    moved = {name: weight.to(device) for name, weight in weights.items()}
    queries = []
    for batch in batches(features, BATCH_QUERIES, device):
        scores, _ = batch_scores(moved, batch)
        for query, row in zip(batch.queries, scores.tolist(), strict=True):
            queries.append(ScoredQuery(row[: len(query.relevant)], query.relevant))
    return queries


def check_labels(features: Sequence[QueryFeatures]) -> None:
    """Raise InputError where all labels are of one class, from which nothing can be learned."""
    labels = {label for query in features for label in query.relevant}
    if len(labels) < 2:
        raise InputError(
            "All documents have the same label. Add some of the other, to learn the difference."
        )


def split(count: int, validation: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Numbers of training and validation queries, at random; at least one each.

    Args:
        count: Of all queries, at least two.
        validation: Number of validation queries, or below 1 their share.
        seed: Of the draw.
    """
    order = list(range(count))
    random.Random(f"split-{seed}").shuffle(order)
    if validation < 1:
        validation *= count
    size = min(max(1, round(validation)), count - 1)
    return sorted(order[size:]), sorted(order[:size])
