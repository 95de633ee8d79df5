"""B as torch trains it; the formula that uses it is in `formula`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ...method.formula import Weights


class Projection(nn.Module):
    """The projection matrix B of the paper (Section 4.3), shape (L, H, P, D), always fp32.

    Args:
        weight: B, (L, H, P, D).
        layers: The L backbone layers that B reads, ascending, counted from 0.
        head_weight: The weight of each layer's and head's terms, (L, H); None for 1 each, as in
            the paper.
        agreement: The weights g, w and b of the similarity terms, (3,), see `similarity_terms`;
            None for no such terms, as in the paper.

    Raises:
        ValueError: B does not have the shape above.
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
        self.weight = nn.Parameter(weight.float())
        self.head_weight = None if head_weight is None else nn.Parameter(head_weight.float())
        self.agreement = None if agreement is None else nn.Parameter(agreement.float())
        self.layers = tuple(layers)

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The weights of an artifact, to be trained."""
        arrays = {name: torch.as_tensor(array) for name, array in weights.state_dict().items()}
        return cls(layers=weights.layers, **arrays)

    def weights(self) -> Weights:
        """The same numbers as an artifact holds them. They change if this is trained further."""
        return Weights(layers=self.layers, **self.state_dict())

    @classmethod
    def random(
        cls, layers: Sequence[int], heads: int, dim: int, head_dim: int, *, seed: int = 0
    ) -> Self:
        """Untrained B with orthonormal rows where ``dim <= head_dim`` (zero orthogonality loss)."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(len(layers), heads, max(dim, head_dim), head_dim, generator=generator)
        orthonormal, _ = torch.linalg.qr(weight)  # (L, H, max, D)
        if dim <= head_dim:
            orthonormal = orthonormal.mT[..., :dim, :]
        return cls(orthonormal.contiguous(), layers)
