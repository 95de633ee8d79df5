"""The maths: what a document changes in the value vectors of the query's tokens, and B, which turns that into a score.

B is the only trained part of the paper's method: one small matrix per layer and KV head. Beside it, an artifact may
weigh heads, and add agreement; both are ours, not the paper's.

Axes: L layers, H KV heads, P projection dimension, D head dimension, N documents, T query tokens, S document tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import Self

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
    q, d = (
        normalize(values.transpose(1, 2).flatten(2).float(), dim=-1) for values in (query, document)
    )
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


class Projection(nn.Module):
    """The projection matrix B of the paper (Section 4.3), shape (L, H, P, D), always fp32.

    Args:
        weight: B, (L, H, P, D).
        layers: The L backbone layers that B reads, ascending, counted from 0.
        head_weight: What each layer's and head's term counts, (L, H); None for 1 each, as in the paper.
        agreement: g, w and b, (3,): g times the cosine of document and query, plus w times how well the query's tokens
            are matched, plus b, is added to a score. None for nothing, as in the paper.
    """

    def __init__(
        self,
        weight: Tensor,
        layers: Sequence[int],
        *,
        head_weight: Tensor | None = None,
        agreement: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight.ndim != 4 or weight.shape[0] != len(layers):
            raise ValueError(
                f"B must be (L, H, P, D) with L={len(layers)} layers, got {tuple(weight.shape)}"
            )
        for name, value, shape in (
            ("head_weight", head_weight, weight.shape[:2]),
            ("agreement", agreement, (3,)),
        ):
            if value is not None and tuple(value.shape) != tuple(shape):
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        self.weight = nn.Parameter(weight.float())
        self.head_weight = None if head_weight is None else nn.Parameter(head_weight.float())
        self.agreement = None if agreement is None else nn.Parameter(agreement.float())
        self.layers = tuple(layers)
        self._row = {layer: row for row, layer in enumerate(self.layers)}

    @classmethod
    def random(
        cls, layers: Sequence[int], heads: int, dim: int, head_dim: int, *, seed: int = 0
    ) -> Self:
        """Untrained B with orthonormal rows where ``dim <= head_dim`` (zero orthogonality loss)."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(len(layers), heads, max(dim, head_dim), head_dim, generator=generator)
        q, _ = torch.linalg.qr(weight)  # (L, H, max, D)
        weight = q.mT[..., :dim, :] if dim <= head_dim else q
        return cls(weight.contiguous(), layers)

    def cosines(self, layer: int, shift: Tensor) -> Tensor:
        """cos(B[l, h] @ shift, ones), (N, H, T) in [-1, 1], of a layer's shifts (N, H, T, D) fp32."""
        return cosine_to_ones(
            torch.einsum("hpd,nhtd->nhtp", self.weight[self._row[layer]], shift.float())
        )

    def terms(self, layer: int, shift: Tensor) -> Tensor:
        """The cosines, each as much as its head counts: sum over H and layers and average over T for the score."""
        cosines = self.cosines(layer, shift)
        return (
            cosines
            if self.head_weight is None
            else cosines * self.head_weight[self._row[layer], :, None]
        )

    def beside(self, agreement: Tensor) -> Tensor:
        """What agreement, (N, 1 + T) as `ShiftReader.read` gives it, adds to a score: (N, 1 + T), to be summed up.

        Of the query as a whole, less the border, and of each of its tokens.
        """
        if self.agreement is None:
            return torch.zeros_like(agreement)
        whole, matched, border = self.agreement.to(agreement.dtype)
        return torch.cat([whole * agreement[:, :1] + border, matched * agreement[:, 1:]], dim=1)

    def forward(self, shift: Tensor) -> Tensor:
        """The paper's scores, (N,), of whole shift tensors, (N, L, H, T, D) with layers in the order of ``layers``."""
        terms = [self.terms(layer, shift[:, row]) for row, layer in enumerate(self.layers)]
        return torch.stack(terms, dim=1).mean(-1).sum((1, 2))
