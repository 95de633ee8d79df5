"""Scores of the pairs of a batch by the whole model, with gradients in training.

Axes: R pairs of a query and a text, Q queries, D texts, C hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from encode import QUERY_TOKENS, inner, scored_tokens
from model import Mini, pooled
from torch import Tensor
from typed import Batch

DOCUMENT_TOKENS = 158
CHUNK = 2600
"""Padded tokens of texts that are run at once."""


@dataclass
class Output:
    """What a batch gives.

    Attributes:
        scores: (R,).
        bases: Scores without the shift, (R,).
        maxsims: MaxSim terms, (R,).
        queries: Pooled embeddings of the queries, (Q, C).
        texts: Pooled embeddings of the texts, (D, C).
    """

    scores: Tensor
    bases: Tensor
    maxsims: Tensor
    queries: Tensor
    texts: Tensor


class Entering(Protocol):
    """How texts become ids, and what enters the fusion layer."""

    def ids(self, texts: Iterable[str], most: int) -> list[list[int]]:
        """Token ids of texts, each with at most so many tokens of text."""

    def entering(self, model: Mini, texts: Sequence[str], most: int) -> tuple[Tensor, Tensor]:
        """Token states (N, S, C) that enter the fusion layer; which are no padding, (N, S)."""


def run(model: Mini, encoder: Entering, batch: Batch) -> Output:
    """Run all queries and texts of a batch, with gradients where they are wanted."""
    entering, valid = encoder.entering(model, batch.queries, QUERY_TOKENS)
    empty, empty_valid = encoder.entering(model, [""], QUERY_TOKENS)
    count = len(batch.queries)
    null = [
        (keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1))
        for keys, values in model.document(empty)
    ]
    alone, own = model.values(entering, valid, null, empty_valid.expand(count, -1))
    embedded, scored = pooled(entering, valid), scored_tokens(valid)
    pairs_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (query, text) in enumerate(batch.pairs):
        pairs_of[text].append((number, query))
    text_ids = encoder.ids(batch.texts, DOCUMENT_TOKENS)
    embeddings: list[Tensor] = [torch.empty(0)] * len(text_ids)
    scores, bases, maxsims, numbers = [], [], [], []
    for chunk in _chunks(text_ids):
        texts = [batch.texts[text] for text in chunk]
        hidden, document_valid = encoder.entering(model, texts, DOCUMENT_TOKENS)
        keys_values = model.document(hidden)
        chunk_embeddings = pooled(hidden, document_valid)
        for place, text in enumerate(chunk):
            embeddings[text] = chunk_embeddings[place]
        rows = [(place, *pair) for place, text in enumerate(chunk) for pair in pairs_of[text]]
        if not rows:
            continue
        row, number, query = torch.tensor(rows).unbind(1)
        width = int(valid[query].sum(1).max())
        cut = [(keys[row], values[row]) for keys, values in keys_values]
        read, _ = model.values(
            entering[query, :width], valid[query, :width], cut, document_valid[row]
        )
        terms = model.mean_shift_terms(
            read, [values[query][:, :, :width] for values in alone], scored[query, :width]
        )
        cosine = (chunk_embeddings[row] * embedded[query]).sum(-1)
        maxsim = model.maxsim(
            own[0][query, :, :width],
            keys_values[0][1][row],
            scored[query, :width],
            inner(document_valid)[row],
        )
        base = model.base_score(cosine, maxsim)
        bases.append(base)
        maxsims.append(maxsim)
        scores.append(base + (terms * model.shift_weight).sum((1, 2)))
        numbers.append(number)
    order = torch.cat(numbers).argsort()
    return Output(
        torch.cat(scores)[order],
        torch.cat(bases)[order],
        torch.cat(maxsims)[order],
        embedded,
        torch.stack(embeddings),
    )


def _chunks(text_ids: list[list[int]]) -> list[list[int]]:
    """Positions of texts of similar length, at most `CHUNK` padded tokens together."""
    chunks: list[list[int]] = [[]]
    for text in sorted(range(len(text_ids)), key=lambda place: len(text_ids[place])):
        if chunks[-1] and (len(chunks[-1]) + 1) * len(text_ids[text]) > CHUNK:
            chunks.append([])
        chunks[-1].append(text)
    return chunks
