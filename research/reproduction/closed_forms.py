"""B in closed form (paper, Appendix B.1), for comparison with B trained by gradient.

Axes: L layers, H heads, P projection dimension, D head dimension.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import TrainingError
from rsrank_rag.training.store import QueryFeatures

Method = Literal["gradient", "oracle", "separation", "combined"]
"""How B is computed: by gradient, or by one of the closed forms."""


def closed_form(
    features: Sequence[QueryFeatures],
    layers: Sequence[int],
    method: str,
    *,
    projection_dim: int = 64,
    ridge: float = 1e-3,
) -> Projection:
    """Solve for B (paper, Appendix B.1).

    The rows of B are all alike, so a cosine to the ones vector is 1 or -1 for each layer, head and
    token, whatever the length of the shift: B ranks, but the zero of its scores means little.
    Matrices are accumulated in fp64, query by query.

    - ``oracle``: B mu = 1, with mu the mean oracle shift.
    - ``separation``: ridge regression of relevant shifts to 1 and irrelevant ones to 0.
    - ``combined``: the least response to irrelevant shifts among those with B mu = 1.

    Args:
        features: Features of the training queries.
        layers: Numbers of the layers that B reads.
        method: "oracle", "separation" or "combined".
        projection_dim: P.
        ridge: What is added to the diagonal, as a share of the diagonal's mean.

    Raises:
        TrainingError: No query has a relevant document.
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
    # (L, H, D)
    direction = torch.linalg.solve(gram + ridge * diagonal * eye, target[..., None])[..., 0]
    if method != "separation":
        # B mu = 1
        response = (direction * target / count).sum(-1, keepdim=True)
        direction = direction / response.clamp_min(1e-12)
    # (L, H, P, D)
    weight = direction[:, :, None].expand(-1, -1, projection_dim, -1)
    return Projection(weight.float().contiguous(), layers)


def _moments(features: Sequence[QueryFeatures], *, separation: bool) -> tuple[Tensor, Tensor, int]:
    """S^T S over irrelevant shifts (L, H, D, D), and the sum (L, H, D) and number of oracle shifts.

    For the separation S has all documents, and relevant documents take the place of the oracle.
    """
    gram = torch.zeros(())
    target = torch.zeros(())
    count = 0
    for query in features:
        labels = torch.tensor(query.relevant).repeat_interleave(query.tokens)
        shifts = query.shifts.double().cpu()
        documents = shifts[:, :, : len(labels)]
        if separation:
            rows = documents
            positive = documents[:, :, labels]
        else:
            rows = documents[:, :, ~labels]
            positive = shifts[:, :, len(labels) :]
        gram = gram + rows.mT @ rows
        target = target + positive.sum(2)
        count += positive.shape[2]
    return gram, target, count
