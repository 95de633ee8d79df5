"""B without gradient descent: the three closed forms the paper compares with (Appendix B.1).

Their rows are all alike, so a cosine to the ones vector is 1 or -1 for each layer, head and token, whatever the length
of the shift: they rank, but their zero means little. Matrices are accumulated in fp64, query by query.

Axes: L layers, H heads, M rows (query tokens of documents), P projection dimension, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import InputError, TrainingError
from ..method.projection import Projection
from ..training.store import FeatureSource, QueryFeatures

Method = Literal["oracle", "separation", "combined"]


def closed_form(
    features: FeatureSource, layers: Sequence[int], method: Method, *, projection_dim: int = 64, ridge: float = 1e-3
) -> Projection:
    """Solve for B.

    - ``oracle``: B mu = 1, with mu the mean oracle shift.
    - ``separation``: ridge regression of relevant shifts to 1 and irrelevant ones to 0.
    - ``combined``: the least response to irrelevant shifts among those with B mu = 1.

    Args:
        features: Labelled features.
        layers: Their backbone layers.
        method: Which.
        projection_dim: P.
        ridge: Added to the diagonal, as a share of its mean.

    Raises:
        InputError: No such method.
        TrainingError: The features lack what the method needs.
    """
    if method not in get_args(Method):
        raise InputError(f"There is no closed form {method!r}. Choose one of {', '.join(get_args(Method))}.")
    if method == "separation":
        direction = _separation(features, ridge)
    else:
        mean = _mean_oracle(features)
        direction = mean / mean.square().sum(-1, keepdim=True).clamp_min(1e-12)
        if method == "combined":
            direction = _constrained(features, mean, ridge)
    weight = direction[:, :, None].expand(-1, -1, projection_dim, -1)  # (L, H, P, D)
    return Projection(weight.float().contiguous(), layers)


def _mean_oracle(features: FeatureSource) -> Tensor:
    """Mean oracle shift over queries and tokens, (L, H, D)."""
    total, count = torch.zeros(()), 0
    for number in range(len(features)):
        query = features[number]
        if query.oracle:
            total = total + query.shifts[:, :, -query.tokens :].double().sum(2)
            count += query.tokens
    if not count:
        raise TrainingError("No query has a relevant document, so there is no oracle shift to align with.")
    return total / count


def _separation(features: FeatureSource, ridge: float) -> Tensor:
    """(X^T X + ridge) w = X^T y with y 1 for rows of relevant documents and 0 for the others; w is (L, H, D)."""
    gram, target = torch.zeros(()), torch.zeros(())
    for number in range(len(features)):
        relevant, irrelevant = _rows(features[number])
        rows = torch.cat([relevant, irrelevant], dim=2)
        gram = gram + rows.mT @ rows
        target = target + relevant.sum(2)
    direction: Tensor = torch.linalg.solve(_regularised(gram, ridge), target[..., None])[..., 0]
    return direction


def _constrained(features: FeatureSource, mean: Tensor, ridge: float) -> Tensor:
    """Min |w S|^2 over irrelevant shifts S with w mu = 1: w = C^-1 mu / (mu^T C^-1 mu), C = S S^T + ridge."""
    gram = torch.zeros(())
    for number in range(len(features)):
        _, irrelevant = _rows(features[number])
        gram = gram + irrelevant.mT @ irrelevant
    if gram.ndim == 0:
        raise TrainingError("There are no queries.")
    solved: Tensor = torch.linalg.solve(_regularised(gram, ridge), mean[..., None])[..., 0]
    return solved / (solved * mean).sum(-1, keepdim=True).clamp_min(1e-12)


def _rows(query: QueryFeatures) -> tuple[Tensor, Tensor]:
    """Rows of relevant and of irrelevant documents, (L, H, M, D) each, fp64."""
    labels = torch.tensor(query.relevant).repeat_interleave(query.tokens)
    documents = query.shifts[:, :, : len(labels)].double().cpu()
    return documents[:, :, labels], documents[:, :, ~labels]


def _regularised(gram: Tensor, ridge: float) -> Tensor:
    """Add a share of the mean diagonal to the diagonal of (L, H, D, D)."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-12)
    return gram + ridge * diagonal * torch.eye(gram.shape[-1], dtype=gram.dtype)
