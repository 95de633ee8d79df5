"""Scores of queries against stored passages, with gradients where they are wanted.

Axes: Q queries, R pairs of a query and a document, H heads, L layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from encode import CHUNK, CLS, QUERY_TOKENS, SEP, inner, padded, scored_tokens
from model import Mini, pooled
from torch import Tensor

ROWS = 6000
"""Padded query tokens that are run behind documents at once."""


class Texts(Protocol):
    """`encode.Stored`, or what is like it."""

    ids: list[list[int]]
    embedded: Tensor

    def states(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token states of texts (N, S, C), and which are none of the padding, (N, S)."""


class Scorer:
    """The model, and how texts become ids.

    Args:
        model: To be scored with.
        ids: Token ids of texts, each with at most so many tokens.
    """

    def __init__(self, model: Mini, ids: Callable[[Iterable[str], int], list[list[int]]]) -> None:
        self.model, self.ids, self.fast = model, ids, torch.bfloat16

    def __call__(
        self, queries: Sequence[str], documents: Sequence[Sequence[int]], stored: Texts
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Scores of each query's documents, with and without the shift; shift terms (N, L, H)."""
        model = self.model
        ids, valid = padded(self.ids(queries, QUERY_TOKENS))
        with torch.no_grad():
            entering = model.below(model.embed(ids).to(self.fast), valid, 0, model.base)
            empty_ids, empty_valid = padded([[CLS, SEP]])
            empty = model.below(model.embed(empty_ids).to(self.fast), empty_valid, 0, model.base)
        embedded, scored = pooled(entering, valid), scored_tokens(valid)
        null = [
            (k.expand(len(ids), -1, -1, -1), v.expand(len(ids), -1, -1, -1))
            for k, v in model.document(empty)
        ]
        alone, own = model.values(entering, valid, null, empty_valid.expand(len(ids), -1))
        bases, terms, pairs = [], [], []
        for chunk, rows in self._chunks(documents, ids.shape[1], stored):
            hidden, seen = stored.states(chunk)
            kept = model.document(hidden.to(self.fast))
            row, query = (torch.tensor([each[part] for each in rows]) for part in (0, 1))
            read, _ = model.values(
                entering[query], valid[query], [(k[row], v[row]) for k, v in kept], seen[row]
            )
            terms.append(
                model.mean_shift_terms(read, [values[query] for values in alone], scored[query])
            )
            cosine = (stored.embedded[chunk].float()[row] * embedded[query]).sum(-1)
            matched = model.maxsim(own[0][query], kept[0][1][row], scored[query], inner(seen)[row])
            bases.append(model.base_score(cosine, matched))
            pairs += [(q, place) for _, q, place in rows]
        index = {pair: number for number, pair in enumerate(pairs)}
        orders = [
            torch.tensor([index[q, place] for place in range(len(of))])
            for q, of in enumerate(documents)
        ]
        base, every = torch.cat(bases), torch.cat(terms)
        total = base + (every * model.shift_weight).sum((1, 2))
        return [total[o] for o in orders], [base[o] for o in orders], [every[o] for o in orders]

    def cosines(self, query: str, documents: Sequence[int], stored: Texts) -> Tensor:
        """MiniLM's own, (documents,)."""
        ids, valid = padded(self.ids([query], QUERY_TOKENS))
        states = self.model.below(self.model.embed(ids).to(self.fast), valid, 0, self.model.base)
        return stored.embedded[list(documents)].float() @ pooled(states, valid)[0]

    def _chunks(
        self, documents: Sequence[Sequence[int]], width: int, stored: Texts
    ) -> Iterator[tuple[list[int], list[tuple[int, int, int]]]]:
        """Documents of similar length, and the (row, query, position) that want them."""
        users: dict[int, list[tuple[int, int]]] = {}
        for q, of in enumerate(documents):
            for position, place in enumerate(of):
                users.setdefault(place, []).append((q, position))
        order = sorted(users, key=lambda place: len(stored.ids[place]))
        while order:
            count, pairs = 1, len(users[order[0]])
            while count < len(order):
                more = pairs + len(users[order[count]])
                if (count + 1) * len(stored.ids[order[count]]) > CHUNK or more * width > ROWS:
                    break
                count, pairs = count + 1, more
            chunk, order = order[:count], order[count:]
            yield (
                chunk,
                [
                    (row, q, position)
                    for row, place in enumerate(chunk)
                    for q, position in users[place]
                ],
            )
