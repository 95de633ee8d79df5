"""The paper's training objective (Section 4.3.2): pure functions of scores, B or cosines.

Axes: Q queries, N documents of one query, L layers, H KV heads, P projection dimension, D head
dimension. ``scores`` are those of one query, (N,), or of a batch of queries padded to a common N,
(Q, N). ``relevant`` and ``irrelevant`` are boolean masks of the same shape: they mark the relevant
and the irrelevant documents. ``weight`` is B, (L, H, P, D). Every function returns a scalar tensor,
(); for a batch it is the mean over the queries. A term over an empty class is 0, so that a query
with documents of one class still counts.
"""

import torch
from torch import Tensor


def calibration_loss(
    scores: Tensor, relevant: Tensor, irrelevant: Tensor, irrelevant_weight: float = 1.0
) -> Tensor:
    """How far relevant documents are below zero, and irrelevant ones above (L_cal).

    ``irrelevant_weight`` multiplies the part of the irrelevant documents, which is 1 in the paper.

    >>> relevant = torch.tensor([True, True, False])
    >>> calibration_loss(torch.tensor([-1.0, 3.0, 2.0]), relevant, ~relevant)
    tensor(2.5000)
    """
    below = _mean((-scores).relu(), relevant)
    above = _mean(scores.relu(), irrelevant)
    return (below + irrelevant_weight * above).mean()


def margin_loss(
    scores: Tensor,
    relevant: Tensor,
    irrelevant: Tensor,
    margin: float = 0.5,
    irrelevant_weight: float = 1.0,
) -> Tensor:
    """How much is missing until both classes are beyond the margin (L_margin).

    The third term is what is missing until the lowest score of a relevant document is above the
    highest score of an irrelevant one by the margin. ``irrelevant_weight`` multiplies the second
    term, that of the irrelevant documents; it is 1 in the paper.

    >>> relevant = torch.tensor([True, False])
    >>> margin_loss(torch.tensor([1.0, 0.0]), relevant, ~relevant)
    tensor(0.5000)
    """
    loss = _mean((margin - scores).relu(), relevant)
    loss = loss + irrelevant_weight * _mean((scores + margin).relu(), irrelevant)
    # Without a document of one class this is margin - infinity, which the ReLU makes 0.
    worst = scores.masked_fill(~relevant, torch.inf).amin(-1)
    best = scores.masked_fill(~irrelevant, -torch.inf).amax(-1)
    return (loss + (margin - (worst - best)).relu()).mean()


def orthogonality_loss(weight: Tensor) -> Tensor:
    """Distance of each B[l, h]'s rows from orthonormal (L_ortho).

    >>> orthogonality_loss(torch.eye(2).expand(3, 4, 2, 2))
    tensor(0.)
    """
    rows = weight.shape[-2]
    gram = torch.einsum("lhpd,lhqd->lhpq", weight, weight)
    excess = gram - torch.eye(rows, device=weight.device, dtype=weight.dtype)
    return excess.square().sum((-2, -1)).mean() / rows**2


def alignment_loss(oracle_cosines: Tensor) -> Tensor:
    """One minus the mean cosine of the projected oracle shift and the ones vector (L_align).

    Without an oracle shift it is 0.

    >>> alignment_loss(torch.tensor([1.0, 0.0]))
    tensor(0.5000)
    """
    return (1 - oracle_cosines).sum() / max(oracle_cosines.numel(), 1)


def frobenius_loss(weight: Tensor) -> Tensor:
    """Bound on the norm of B: [||B||_F - sqrt(L H P D) / 2]_+ (L_frob).

    >>> frobenius_loss(torch.ones(1, 1, 2, 2))
    tensor(1.)
    """
    excess: Tensor = torch.linalg.vector_norm(weight) - 0.5 * weight.numel() ** 0.5
    return excess.relu()


def _mean(values: Tensor, members: Tensor) -> Tensor:
    """Mean over the members of a class in each row; 0 where there are none."""
    return values.masked_fill(~members, 0.0).sum(-1) / members.sum(-1).clamp_min(1)
