"""Oracle similarity (paper, Section 4.2) to the shift of all relevant documents together.

The oracle reads the labels, so it is no reranker but a bound on what the shifts hold. The cosines
of layers, heads and tokens are put together like the terms of RSRank's score: summed over layers
and heads, averaged over tokens.

Axes: H heads, N documents, M documents with the oracle, T tokens, D head dimension.
"""

import torch
from torch.nn.functional import cosine_similarity

from rsrank_rag.method.formula import EPSILON
from rsrank_rag.training.store import QueryFeatures


def oracle_scores(features: QueryFeatures) -> list[float]:
    """One score a document, within plus or minus layers x heads; all 0 if none is relevant."""
    count = len(features.relevant)
    tokens = features.tokens
    if not features.oracle:
        return [0.0] * count
    total = torch.zeros(count, dtype=torch.float64)
    # A layer's shifts are (H, M * T, D). All layers in fp32 would be large.
    for layer in features.shifts:
        heads, _, width = layer.shape
        by_document = layer.float().reshape(heads, count + 1, tokens, width)
        # (M, H, T, D)
        rows = by_document.transpose(0, 1)
        # (N, H, T)
        cosines = cosine_similarity(rows[:-1], rows[-1], dim=-1, eps=EPSILON)
        total += cosines.double().mean(-1).sum(-1).cpu()
    return total.tolist()
