"""Oracle-similarity ranking (paper, Section 4.2): how much a document's shift resembles that of all relevant ones.

It reads the labels, so it is no reranker but a bound on what the shifts hold, and a scorer of labelled queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...method.shift import oracle_similarity
from ...rsrank import RSRank
from ...training.features import FeatureExtractor, QueryFeatures
from ..datasets import LabelledQuery


def oracle_scores(features: QueryFeatures) -> list[float]:
    """Score a query's documents against its oracle shift.

    The cosines of layers, heads and tokens are put together like the terms of RSRank's score: summed over layers and
    heads, averaged over tokens.

    Args:
        features: One query's, as extracted or from a store.

    Returns:
        One score a document, within plus or minus layers x heads; 0 for all where nothing is relevant.
    """
    count, tokens = len(features.relevant), features.tokens
    if not features.oracle:
        return [0.0] * count
    total = torch.zeros(count, dtype=torch.float64)
    for layer in features.shifts:  # (H, M * T, D), one after another: all of them in fp32 would be large
        heads, _, width = layer.shape
        rows: Tensor = layer.float().reshape(heads, count + 1, tokens, width).transpose(0, 1)  # (M, H, T, D)
        total += oracle_similarity(rows[:-1], rows[-1]).double().mean(-1).sum(-1).cpu()
    return total.tolist()


class OracleSimilarity:
    """Ranks the documents of labelled queries by oracle similarity.

    Attributes:
        threshold: None: a document may well be relevant and point away from the others.

    Args:
        ranker: Whose language model, template and layers are read. Its B is not used.
    """

    threshold: float | None = None

    def __init__(self, ranker: RSRank) -> None:
        self._extractor = FeatureExtractor(ranker.reader, token_budget=ranker.token_budget)

    def score_labelled(self, query: LabelledQuery, *, titles: bool = True) -> list[float]:
        """One score a document, in input order.

        Args:
            query: With its labels.
            titles: Put a document's title in front of its text.

        Raises:
            InputError: The query is empty or too long.
            ScoringError: A document, or all relevant ones together, do not fit into memory.
        """
        self._extractor.titles = titles
        return oracle_scores(self._extractor.extract(query))
