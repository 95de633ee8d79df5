"""The representational shift: what a document changes in the value vectors of the query's tokens.

Axes: N documents, H KV heads, T query tokens, S document tokens, D head dimension, P projection dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

EPSILON = 1e-6  # projected shifts shorter than this count as no shift at all (cosine 0)


def representational_shift(conditioned: Tensor, alone: Tensor) -> Tensor:
    """The shift, (N, H, T, D) fp32: Eq. (3) of the paper, for models with rotary positions.

    Value vectors of the query's tokens after each document, (N, H, T, D), less those of the same tokens without one.
    """
    return conditioned.float() - alone.float()


def best_matches(query: Tensor, document: Tensor, own: Tensor) -> Tensor:
    """Each query token's nearest token of a document, as a cosine of value vectors over all heads, (N, T) fp32.

    Ours, not the paper's; ColBERT's MaxSim, of what a kept prefix holds anyway. Values (N, H, T, D) and (N, H, S, D);
    ``own`` (N, S) says where a document's own tokens are.
    """
    q, d = (normalize(values.transpose(1, 2).flatten(2).float(), dim=-1) for values in (query, document))
    nearest: Tensor = (q @ d.mT).masked_fill(~own[:, None], -1).amax(-1)
    return nearest


def cosine_to_ones(projected: Tensor) -> Tensor:
    """Cosine, (...) in [-1, 1], between projected shifts (..., P) and the all-ones vector (paper, Section 4.3).

    Exactly 0 where the projected shift is zero.

    >>> cosine_to_ones(torch.tensor([[2.0, 2.0], [1.0, -1.0], [0.0, 0.0]])).round(decimals=4)
    tensor([1., 0., 0.])
    """
    norm: Tensor = torch.linalg.vector_norm(projected, dim=-1).clamp_min(EPSILON)
    cosine: Tensor = projected.sum(-1) / (norm * projected.shape[-1] ** 0.5)
    return cosine
