"""The representational shift: what a document changes in the value vectors of the query's tokens.

Axes: N documents, H KV heads, T query tokens, D head dimension, P projection dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Projected shifts shorter than this count as no shift at all (cosine 0)."""


def representational_shift(conditioned: Tensor, alone: Tensor) -> Tensor:
    """Subtract the query-only value vectors from those read after a document, in fp32.

    Args:
        conditioned: Value vectors of the query's tokens after each document, (N, H, T, D).
        alone: The same tokens' value vectors without a document, (1, H, T, D) or (H, T, D).

    Returns:
        The shift, (N, H, T, D), fp32. Eq. (3) of the paper, for models with rotary positions.
    """
    return conditioned.float() - alone.float()


def cosine_to_ones(projected: Tensor) -> Tensor:
    """Cosine between projected shifts and the all-ones vector (paper, Section 4.3, scoring function).

    Args:
        projected: (..., P).

    Returns:
        (...), in [-1, 1]; exactly 0 where the projected shift is zero.

    >>> cosine_to_ones(torch.tensor([[2.0, 2.0], [1.0, -1.0], [0.0, 0.0]])).round(decimals=4)
    tensor([1., 0., 0.])
    """
    norm: Tensor = torch.linalg.vector_norm(projected, dim=-1).clamp_min(EPSILON)
    cosine: Tensor = projected.sum(-1) / (norm * projected.shape[-1] ** 0.5)
    return cosine


def oracle_similarity(shift: Tensor, oracle: Tensor) -> Tensor:
    """Cosine between each document's shift and the shift of all relevant documents together.

    It needs the labels, so it is a yardstick and not a reranker (paper, Section 4.2).

    Args:
        shift: (N, H, T, D), one layer's shifts.
        oracle: (H, T, D), the same layer's oracle shift.

    Returns:
        (N, H, T) cosines in [-1, 1].
    """
    return torch.nn.functional.cosine_similarity(shift.float(), oracle.float(), dim=-1, eps=EPSILON)
