"""The formula of a score: the shift of the query's value vectors, B, and similarity.

Everything that scores calls these functions: a batch, an explanation, and training.

B is the only trained part of the paper's method: one small matrix for each layer and KV head. An
artifact may also weigh heads, and add similarity terms; neither is in the paper.

Axes: L layers, H KV heads, P projection dimension, D head dimension, N documents, T query tokens,
S document tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import Self

# A projected shift that is shorter counts as no shift: its cosine is 0.
EPSILON = 1e-6


def representational_shift(conditioned: Tensor, alone: Tensor) -> Tensor:
    """The shift, (N, H, T, D) fp32: Eq. (3) of the paper, for models with rotary positions.

    Args:
        conditioned: Value vectors of the query's tokens after each document, (N, H, T, D).
        alone: Value vectors of the same tokens after the null prefix, (N or 1, H, T, D).
    """
    return conditioned.float() - alone.float()


def shift_terms(shifts: Tensor, weight: Tensor, head_weight: Tensor | None = None) -> Tensor:
    """What each head and token adds to a score: cos(B shift, ones), times the head's weight.

    The cosine between the projected shift and the all-ones vector is in [-1, 1], and exactly 0
    where the projected shift is zero. A score is the sum of these terms over layers and heads and
    their mean over the query's tokens (paper, Section 4.3), to which `combine` adds the similarity
    terms.

    >>> shifts = torch.tensor([[[2.0, 2.0], [1.0, -1.0], [0.0, 0.0]]])
    >>> shift_terms(shifts, torch.eye(2)[None]).round(decimals=4)
    tensor([[1., 0., 0.]])

    Args:
        shifts: (..., H, T, D).
        weight: B, (..., H, P, D), in the dtype of the shifts. The matrix product has this dtype.
        head_weight: (..., H); None for 1 each, as in the paper.

    Returns:
        (..., H, T), fp32.
    """
    projected = torch.einsum("...hpd,...htd->...htp", weight, shifts).float()
    norm = torch.linalg.vector_norm(projected, dim=-1).clamp_min(EPSILON)
    cosines: Tensor = projected.sum(-1) / (norm * projected.shape[-1] ** 0.5)
    if head_weight is not None:
        cosines = cosines * head_weight[..., None]
    return cosines


def maxsim(query: Tensor, document: Tensor, own: Tensor) -> Tensor:
    """Each query token's best cosine with a token of the document, (N, T) fp32.

    This is ColBERT's MaxSim before its sum, of value vectors over all heads. It is ours.

    Args:
        query: Value vectors, (N, H, T, D).
        document: Value vectors, (N, H, S, D).
        own: Which tokens are the document's and not the template's, (N, S).
    """
    queries = normalize(query.transpose(1, 2).flatten(2).float(), dim=-1)
    documents = normalize(document.transpose(1, 2).flatten(2).float(), dim=-1)
    best: Tensor = (queries @ documents.mT).masked_fill(~own[:, None], -1).amax(-1)
    return best


def similarity_terms(similarity: Tensor, weights: Tensor | None) -> Tensor:
    """What similarity adds to a score: the cosine term with the bias, then the MaxSim terms.

    Args:
        similarity: (..., 1 + K): the cosine of document and query, then K parts of MaxSim.
        weights: g of the cosine, w of MaxSim, and the bias b, (3,); None for no similarity terms.

    Returns:
        (..., 1 + K). Their sum is g cosine + w MaxSim + b.
    """
    if weights is None:
        return torch.zeros_like(similarity)
    weights = weights.to(similarity.dtype)
    cosine = weights[0] * similarity[..., :1] + weights[2]
    return torch.cat([cosine, weights[1] * similarity[..., 1:]], dim=-1)


def combine(shift_score: Tensor, similarity: Tensor, weights: Tensor | None) -> Tensor:
    """The score, (...), above 0 where a document is relevant.

    Args:
        shift_score: The sum of `shift_terms` over layers and heads, averaged over tokens, (...).
        similarity: As in `similarity_terms`, (..., 1 + K).
        weights: As in `similarity_terms`.
    """
    if weights is None:
        return shift_score
    return shift_score + similarity_terms(similarity, weights).sum(-1)


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
        ValueError: A tensor does not have the shape above.
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

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """B of one backbone layer, (H, P, D), and its head weights, (H,), for `shift_terms`."""
        row = self.layers.index(layer)
        head_weight = None if self.head_weight is None else self.head_weight[row]
        return self.weight[row], head_weight
