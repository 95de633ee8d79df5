"""B: the only trained part. One small matrix per layer and KV head that turns shifts into a score.

Axes: L layers, H KV heads, P projection dimension, D head dimension, N documents, T query tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .shift import cosine_to_ones


class Projection(nn.Module):
    """The projection matrix B of the paper (Section 4.3), shape (L, H, P, D), always fp32.

    Args:
        weight: B, (L, H, P, D).
        layers: The L backbone layers that B reads, ascending, counted from 0.
    """

    def __init__(self, weight: Tensor, layers: Sequence[int]) -> None:
        super().__init__()
        if weight.ndim != 4 or weight.shape[0] != len(layers):
            raise ValueError(f"B must be (L, H, P, D) with L={len(layers)} layers, got {tuple(weight.shape)}")
        self.weight = nn.Parameter(weight.float())
        self.layers = tuple(layers)
        self._row = {layer: row for row, layer in enumerate(self.layers)}

    @classmethod
    def random(cls, layers: Sequence[int], heads: int, dim: int, head_dim: int, *, seed: int = 0) -> Projection:
        """Untrained B with orthonormal rows where ``dim <= head_dim`` (zero orthogonality loss)."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(len(layers), heads, max(dim, head_dim), head_dim, generator=generator)
        q, _ = torch.linalg.qr(weight)  # (L, H, max, D)
        weight = q.mT[..., :dim, :] if dim <= head_dim else q
        return cls(weight.contiguous(), layers)

    def reads(self, layer: int) -> bool:
        """Whether B has a matrix for this backbone layer."""
        return layer in self._row

    def projected(self, layer: int, shift: Tensor) -> Tensor:
        """B[l, h] @ shift.

        Args:
            layer: Backbone layer, one of ``layers``.
            shift: (N, H, T, D) fp32.

        Returns:
            (N, H, T, P).
        """
        return torch.einsum("hpd,nhtd->nhtp", self.weight[self._row[layer]], shift.float())

    def cosines(self, layer: int, shift: Tensor) -> Tensor:
        """Score terms of one layer: cos(B[l, h] @ shift, ones).

        Args:
            layer: Backbone layer, one of ``layers``.
            shift: (N, H, T, D) fp32.

        Returns:
            (N, H, T) in [-1, 1]. Sum over H and over layers and average over T for the score.
        """
        return cosine_to_ones(self.projected(layer, shift))

    def forward(self, shift: Tensor) -> Tensor:
        """The paper's score of whole shift tensors.

        Args:
            shift: (N, L, H, T, D), layers in the order of ``layers``.

        Returns:
            (N,) scores; a document is relevant where its score is above 0.
        """
        terms = [self.cosines(layer, shift[:, row]) for row, layer in enumerate(self.layers)]
        return torch.stack(terms, dim=1).mean(-1).sum((1, 2))
