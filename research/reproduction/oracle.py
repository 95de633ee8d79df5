"""Oracle similarity (paper, Section 4.2) to the shift of all relevant documents together.

It reads the labels, so it is no reranker but a bound on what the shifts hold. The cosines of
layers, heads and tokens are put together like the terms of RSRank's score: summed over layers and
heads, averaged over tokens.
"""

import torch
from torch.nn.functional import cosine_similarity

from rsrank_rag.method.formula import EPSILON
from rsrank_rag.training.store import QueryFeatures


def oracle_scores(features: QueryFeatures) -> list[float]:
    """One score a document, within plus or minus layers x heads; all 0 if none is relevant."""
    count, tokens = len(features.relevant), features.tokens
    if not features.oracle:
        return [0.0] * count
    total = torch.zeros(count, dtype=torch.float64)
    for (
        layer
    ) in features.shifts:  # (H, M * T, D), one after another: all of them in fp32 would be large
        heads, _, width = layer.shape
        rows = (
            layer.float().reshape(heads, count + 1, tokens, width).transpose(0, 1)
        )  # (M, H, T, D)
        cosines = cosine_similarity(
            rows[:-1], rows[-1], dim=-1, eps=EPSILON
        )  # (N, H, T) with the oracle, (H, T, D)
        total += cosines.double().mean(-1).sum(-1).cpu()
    return total.tolist()
