"""Oracle-similarity ranking (paper, Section 4.2): how much a document's shift resembles that of all relevant ones.

It reads the labels, so it is no reranker but a bound on what the shifts hold, and a scorer of labelled queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ...method.batching import Ids
from ...method.scoring import Row
from ...method.shift import EPSILON
from ...method.template import PromptTokenizer
from ...rsrank import RSRank
from ..datasets import LabelledQuery
from .batched import read_documents


def together(prompts: PromptTokenizer, documents: Sequence[str], query_length: int) -> Ids:
    """One prefix with several documents, a line break between them, for the oracle shift (paper, Section 4.2).

    If they do not fit together, each gets the same number of tokens; what a shorter one leaves goes to the others.
    """
    encoded, seam = prompts.encode(documents), prompts.encode(["\n"])[0]
    most = prompts.room(query_length)
    room = most - len(seam) * (len(encoded) - 1)
    shares = dict.fromkeys(range(len(encoded)), 0)
    for rank, index in enumerate(sorted(shares, key=lambda i: len(encoded[i]))):
        shares[index] = min(len(encoded[index]), max(room, 0) // (len(encoded) - rank))
        room -= shares[index]
    joined: Ids = ()
    for index, ids in enumerate(encoded):
        joined += (*(seam if index else ()), *ids[: shares[index]])
    return (*prompts.instruction, *joined[:most], *prompts.separator)


def oracle_similarity(shift: Tensor, oracle: Tensor) -> Tensor:
    """Cosine between each document's shift and the shift of all relevant documents together.

    It needs the labels, so it is a yardstick and not a reranker (paper, Section 4.2).

    Args:
        shift: (N, H, T, D), one layer's shifts.
        oracle: (H, T, D), the same layer's oracle shift.

    Returns:
        (N, H, T) cosines in [-1, 1].
    """
    return cosine_similarity(shift.float(), oracle.float(), dim=-1, eps=EPSILON)


class OracleSimilarity:
    """Ranks the documents of labelled queries by oracle similarity.

    The cosines of layers, heads and tokens are put together like the terms of RSRank's score: summed over layers and
    heads, averaged over tokens. A score lies within plus or minus layers x heads; all are 0 where nothing is relevant.

    Attributes:
        threshold: None: a document may well be relevant and point away from the others.

    Args:
        ranker: Whose language model, template and layers are read. Its B is not used.
    """

    threshold: float | None = None

    def __init__(self, ranker: RSRank) -> None:
        self._ranker = ranker

    @torch.inference_mode()
    def score_labelled(self, query: LabelledQuery, *, titles: bool = True) -> list[float]:
        """One score a document, in input order.

        Raises:
            InputError: The query is empty or too long.
            ScoringError: A document does not fit into memory even alone.
        """
        ranker, texts = self._ranker, [document.content(titles=titles) for document in query.documents]
        asked = ranker.prompts.query(query.query)
        relevant = [text for text, document in zip(texts, query.documents, strict=True) if document.relevant]
        if not any(map(str.strip, relevant)):
            return [0.0] * len(texts)
        oracle: dict[int, Tensor] = {}  # layer -> (1, H, T, D)
        together_ids = together(ranker.prompts, relevant, len(asked.ids))
        ranker.reader.read([Row(together_ids, asked)], oracle.__setitem__)

        def read(batch: list[Row]) -> list[float]:
            total = torch.zeros(len(batch), dtype=torch.float64)

            def add(layer: int, shift: Tensor) -> None:
                total.add_(oracle_similarity(shift, oracle[layer][0]).double().mean(-1).sum(-1).cpu())

            ranker.reader.read(batch, add)
            found: list[float] = total.tolist()
            return found

        return [score or 0.0 for score in read_documents(ranker, query.query, texts, read)]
