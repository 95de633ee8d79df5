"""From rows to scores: the paper's Section 4.3, as one path.

A batch is N rows, each a document and a query. Each distinct query adds one row without a document, so that the two
runs that are subtracted share a batch. Shift = a row's value vectors minus those of its query's row without a document.

Axes: N rows, H KV heads, T scored query tokens, D head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .backbone import Backbone
from .batching import Ids
from .probe import Prefix, Prefixes
from .projection import Projection, best_matches, representational_shift
from .template import PromptTokenizer, TokenisedQuery

Consume = Callable[[int, Tensor], object]
"""Receives a read layer's index and its shifts, (N, H, T, D) fp32, zero behind queries with fewer than T tokens."""

Prefill = Callable[[Sequence[Ids], int, Sequence[Prefix]], Prefixes]
"""Runs documents, with room for so many query tokens and with other prefixes behind them: `Backbone.prefill`."""


class Keeper(Protocol):
    """Keeps what was computed for documents; see `prefixes.store.PrefixStore`."""

    def prefill(
        self, documents: Sequence[Ids], run: Prefill, room: int, behind: Sequence[Prefix]
    ) -> Prefixes:
        """Prefixes of documents, the same one perhaps several times: kept ones, and the others run by ``run``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A document and a query, as token ids."""

    document: Ids
    query: TokenisedQuery

    def __len__(self) -> int:
        return len(self.document)


class ShiftReader:
    """Reads the shifts that B is made for: scoring and training read through here, so that both see the same.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        layers: Layers to read.
        store: Where documents' prefixes are kept; None runs every document anew.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        layers: Sequence[int],
        store: Keeper | None = None,
    ) -> None:
        self.backbone, self.prompts, self.layers, self.store = (
            backbone,
            prompts,
            frozenset(layers),
            store,
        )
        self._null: Prefix | None = None

    def read(self, rows: Sequence[Row], consume: Consume) -> Tensor:
        """Hand over each read layer's shifts of a batch, in ascending order.

        Gives each row's agreement, (N, 1 + T) float64: of document and query, each by itself, the cosine of what enters
        the fusion layer, pooled, and `best_matches` there, divided by the query's tokens. Zeros where there is none.
        """
        queries = list(dict.fromkeys(row.query for row in rows))
        number = {query: place for place, query in enumerate(queries)}
        which = [number[row.query] for row in rows]
        owner = torch.tensor(which, device=self.backbone.device)
        tokens = _ScoredTokens([row.query for row in rows], queries, self.backbone.device)
        agreement = torch.zeros(
            len(rows), 1 + tokens.width, dtype=torch.float64, device=owner.device
        )

        def subtract(layer: int, values: Tensor) -> None:
            found = tokens.of(values)
            if layer == self.backbone.fusion_layer > 0:
                agreement[:, 1:] = tokens.shared(self._matches(found[: len(rows)], prefixes))
            if layer in self.layers:
                alone = found[len(rows) :]
                # A single query's row is the same for all: no copy of it for each.
                shift = representational_shift(
                    found[: len(rows)], alone if len(queries) == 1 else alone[owner]
                )
                consume(layer, tokens.only_scored(shift, self._reached(layer)))

        documents, room = [row.document for row in rows], max(len(query.ids) for query in queries)
        behind = [self.null_prefix()] * len(queries)
        if self.store is not None:
            prefixes = self.store.prefill(documents, self.backbone.prefill, room, behind)
        else:
            distinct = {ids: place for place, ids in enumerate(dict.fromkeys(documents))}
            prefixes = self.backbone.prefill(list(distinct), room, behind)
            if len(distinct) < len(documents):
                places = [
                    *map(distinct.__getitem__, documents),
                    *range(len(distinct), len(prefixes)),
                ]
                prefixes = prefixes.take(torch.tensor(places, device=owner.device))
        asked = [query.ids for query in queries]
        embedded = self.backbone.query_values(
            asked, prefixes, subtract, [*which, *range(len(queries))]
        )
        if len(embedded):
            agreement[:, 0] = cosine_similarity(
                prefixes.pooled[: len(rows)].double(), embedded[owner].double()
            )
        return agreement

    def null_prefix(self) -> Prefix:
        """The template before the query, without a document: run once."""
        if self._null is None:
            # What is rounded here would move all scores alike.
            self._null = self.backbone.prefill([self.prompts.null_prefix], exact=True).row(0)
        return self._null

    def _matches(self, query: Tensor, prefixes: Prefixes) -> Tensor:
        """How near each scored token, values (N, H, T, D), is to one of its row's document, (N, T)."""
        documents = prefixes.values[0][: len(query), :, prefixes.room :]
        places = torch.arange(documents.shape[2], device=query.device)
        ends = (
            torch.tensor(prefixes.lengths[: len(query)], device=query.device)
            - self.prompts.after_document
        )
        return best_matches(
            query, documents, (places >= len(self.prompts.instruction)) & (places < ends[:, None])
        )

    def _reached(self, layer: int) -> int | None:
        """How many of a query's tokens can know of the document at a layer; None for all.

        Where all layers have windows, others cannot. Their shift is no more than rounding, and the direction of that
        would count as much as any other.
        """
        reach = self.backbone.reach(layer)
        return None if reach is None else max(0, reach - self.prompts.after_document)


class _ScoredTokens:
    """Which tokens are scored: of each row's query, and of those of the rows without a document below them."""

    def __init__(
        self, rows: Sequence[TokenisedQuery], nulls: Sequence[TokenisedQuery], device: torch.device
    ) -> None:
        self.width = max(query.length for query in nulls)
        self.starts = torch.tensor([query.start for query in (*rows, *nulls)], device=device)
        self.lengths = torch.tensor([query.length for query in rows], device=device)
        self.columns = torch.arange(self.width, device=device)
        self.alike = len({(query.start, query.length) for query in nulls}) == 1

    def of(self, values: Tensor) -> Tensor:
        """Of value vectors (rows, H, all tokens, D) those of scored tokens, (rows, H, T, D)."""
        if self.alike:
            start = int(self.starts[0])
            return values[:, :, start : start + self.width]
        places = (self.starts[:, None] + self.columns).clamp(max=values.shape[2] - 1)
        return values.gather(
            2, places[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
        )

    def shared(self, each: Tensor) -> Tensor:
        """What each scored token adds to the mean of its row's (N, T) numbers, (N, T) float64."""
        return (
            each.double().masked_fill(self.columns >= self.lengths[:, None], 0)
            / self.lengths[:, None]
        )

    def only_scored(self, shift: Tensor, reached: int | None) -> Tensor:
        """Shifts (N, H, T, D) with zeros behind shorter queries, and where no document reaches."""
        if self.alike and reached is None:
            return shift
        scored = self.columns < self.lengths[:, None]  # (N, T)
        if reached is not None:
            scored = scored & (self.starts[: len(shift), None] + self.columns < reached)
        return shift * scored[:, None, :, None]


def score_rows(reader: ShiftReader, projection: Projection, rows: Sequence[Row]) -> list[float]:
    """The paper's scores: of each layer and head, the mean over the query's tokens of cos(B shift, ones), summed up.

    Above 0 means relevant. Heads that count otherwise than 1, and agreement, are ours.
    """
    lengths = torch.tensor([row.query.length for row in rows], device=reader.backbone.device)
    # In float64, in which a sum does not depend on how many zeros of longer neighbours stand behind it.
    total = torch.zeros(len(rows), dtype=torch.float64, device=reader.backbone.device)

    def add(layer: int, shift: Tensor) -> None:
        total.add_(projection.terms(layer, shift).sum(1, dtype=torch.float64).sum(-1) / lengths)

    agreement = reader.read(rows, add)
    scores: list[float] = (total + projection.beside(agreement).sum(1)).float().tolist()
    return scores


def score_parts(reader: ShiftReader, projection: Projection, row: Row) -> tuple[Tensor, Tensor]:
    """One score's parts: each query token's, layer's and head's, (T, L, H) float64, and agreement's, (1 + T,)."""
    terms: list[Tensor] = []
    agreement = reader.read(
        [row], lambda layer, shift: terms.append(projection.terms(layer, shift)[0].double())
    )
    return torch.stack(terms).permute(2, 0, 1) / row.query.length, projection.beside(agreement)[0]
