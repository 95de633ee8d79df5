"""Oracle similarity from features (paper, Section 4.2): a document's shift beside that of all relevant ones."""

from __future__ import annotations

import torch

from ..evaluation.systems.oracle import oracle_similarity
from ..training.store import QueryFeatures


def oracle_scores(features: QueryFeatures) -> list[float]:
    """Score a query's documents against its oracle shift.

    The cosines of layers, heads and tokens are put together like the terms of RSRank's score: summed over layers and
    heads, averaged over tokens.

    Returns:
        One score a document, within plus or minus layers x heads; 0 for all where nothing is relevant.
    """
    count, tokens = len(features.relevant), features.tokens
    if not features.oracle:
        return [0.0] * count
    total = torch.zeros(count, dtype=torch.float64)
    for layer in features.shifts:  # (H, M * T, D), one after another: all of them in fp32 would be large
        heads, _, width = layer.shape
        rows = layer.float().reshape(heads, count + 1, tokens, width).transpose(0, 1)  # (M, H, T, D)
        total += oracle_similarity(rows[:-1], rows[-1]).double().mean(-1).sum(-1).cpu()
    return total.tolist()
