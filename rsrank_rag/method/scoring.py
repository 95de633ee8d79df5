"""From rows to scores: the paper's Section 4.3, as one path.

A batch has N rows, each a document and a query. Each distinct query adds a null row, which has no
document, so that the two runs that are subtracted share a batch and are rounded alike. The shift is
a row's value vectors minus those of the null row of its query.

Axes: N rows, Q distinct queries, L layers, H KV heads, T scored query tokens, D head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .backbone import Backbone
from .concurrent_batches import Ids
from .probe import Prefix, Prefixes
from .projection import (
    Projection,
    combine,
    maxsim,
    representational_shift,
    shift_terms,
    similarity_terms,
)
from .template import PromptTokenizer, TokenisedQuery

Consume = Callable[[int, Tensor], object]
"""Receives a layer's index and its shifts, (N, H, T, D) fp32, 0 after shorter queries."""


@dataclass(frozen=True, slots=True)
class Row:
    """A document and a query as token ids, and the document's key in the prefix cache.

    The cache computes a key that is empty.
    """

    document: Ids
    query: TokenisedQuery
    key: str = ""

    def __len__(self) -> int:
        return len(self.document)


class PrefixSource(Protocol):
    """Gives documents' prefixes; see `prefixes.cache.CachedPrefixes`."""

    def prefill(
        self,
        backbone: Backbone,
        rows: Sequence[Row],
        query_slots: int,
        extra_rows: Sequence[Prefix],
    ) -> Prefixes:
        """Prefixes of the rows' documents, and the extra rows below them."""


class ShiftReader:
    """Reads shifts. Scoring and training both read here, so that B is used as it was trained.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        layers: The layers to read.
        cache: The prefix cache; None runs the document of every row.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        layers: Sequence[int],
        cache: PrefixSource | None = None,
    ) -> None:
        self.backbone = backbone
        self.prompts = prompts
        self.layers = frozenset(layers)
        self.cache = cache

    def read(self, rows: Sequence[Row], consume: Consume) -> Tensor:
        """Give the shifts of a batch to ``consume``, one layer after the other.

        Returns:
            Similarity, (N, 1 + T) float64: the cosine of document and query, each alone, of what
            enters the fusion layer, pooled; then the `maxsim` of each query token there, divided
            by the number of tokens. Zeros without a fusion layer.
        """
        queries = list(dict.fromkeys(row.query for row in rows))
        number = {query: place for place, query in enumerate(queries)}
        query_of_row = [number[row.query] for row in rows]
        # The documents' prefixes, and a null prefix for each query below them.
        slots = max(len(query.ids) for query in queries)
        null_rows = [self.backbone.null_prefix(self.prompts.null_prefix)] * len(queries)
        if self.cache is None:
            documents = [row.document for row in rows]
            prefixes = self.backbone.prefill(documents, slots, null_rows)
        else:
            prefixes = self.cache.prefill(self.backbone, rows, slots, null_rows)
        batch = _BatchReader(self, rows, queries, query_of_row, prefixes, consume)
        every = [*query_of_row, *range(len(queries))]
        embedded = self.backbone.query_values(
            [query.ids for query in queries], prefixes, batch.show, every
        )
        if len(embedded):
            pooled = prefixes.pooled[: len(rows)].double()
            cosines = cosine_similarity(pooled, embedded[batch.null_row].double())
            batch.similarity[:, 0] = cosines
        return batch.similarity


class _BatchReader:
    """Turns the value vectors of one batch into shifts and similarity, layer by layer."""

    def __init__(
        self,
        reader: ShiftReader,
        rows: Sequence[Row],
        queries: Sequence[TokenisedQuery],
        query_of_row: Sequence[int],
        prefixes: Prefixes,
        consume: Consume,
    ) -> None:
        device = reader.backbone.device
        self.reader = reader
        self.count = len(rows)
        self.prefixes = prefixes
        self.consume = consume
        self.null_row = torch.tensor(query_of_row, device=device)
        starts = [queries[place].start for place in query_of_row]
        starts += [query.start for query in queries]
        self.starts = torch.tensor(starts, device=device)[:, None]
        self.lengths = torch.tensor([row.query.length for row in rows], device=device)[:, None]
        self.width = max(query.length for query in queries)
        self.same_span = len({(query.start, query.length) for query in queries}) == 1
        if reader.backbone.is_deterministic:
            # Shapes must not depend on the other queries of the batch.
            self.width = prefixes.query_slots
            self.same_span = False
        self.columns = torch.arange(self.width, device=device)
        size = (self.count, 1 + self.width)
        self.similarity = torch.zeros(size, dtype=torch.float64, device=device)

    def show(self, layer: int, values: Tensor) -> None:
        """Read one layer's value vectors, (N + Q, H, all tokens, D)."""
        values = self._scored(values)
        documents = values[: self.count]
        if layer == self.reader.backbone.fusion_layer > 0:
            self.similarity[:, 1:] = self._maxsim(documents)
        if layer in self.reader.layers:
            alone = values[self.count :]
            # The null row of a single query is broadcast and not copied.
            if len(alone) > 1:
                alone = alone[self.null_row]
            shifts = representational_shift(documents, alone)
            self.consume(layer, self._without_padding(layer, shifts))

    def _scored(self, values: Tensor) -> Tensor:
        """Of value vectors (rows, H, all tokens, D) those of scored tokens, (rows, H, T, D)."""
        if self.same_span:
            start = int(self.starts[0])
            return values[:, :, start : start + self.width]
        places = (self.starts + self.columns).clamp(max=values.shape[2] - 1)
        return values.take_along_dim(places[:, None, :, None], dim=2)

    def _maxsim(self, queries: Tensor) -> Tensor:
        """MaxSim of each token, values (N, H, T, D), divided by the number of tokens, (N, T)."""
        prompts = self.reader.prompts
        documents = self.prefixes.values[0][: self.count, :, self.prefixes.query_slots :]
        places = torch.arange(documents.shape[2], device=queries.device)
        lengths = torch.tensor(self.prefixes.lengths[: self.count], device=queries.device)
        ends = (lengths - prompts.after_document)[:, None]
        own = (places >= len(prompts.instruction)) & (places < ends)
        best = maxsim(queries, documents, own).double()
        return best.masked_fill(self.columns >= self.lengths, 0) / self.lengths

    def _without_padding(self, layer: int, shifts: Tensor) -> Tensor:
        """Shifts (N, H, T, D), with zeros after shorter queries and where no document reaches.

        In a model whose layers all have sliding windows, late tokens cannot know of the document.
        Their shift is rounding, and its direction would count as much as any other.
        """
        reach = self.reader.backbone.reach(layer)
        if self.same_span and reach is None:
            return shifts
        scored = self.columns < self.lengths  # (N, T)
        if reach is not None:
            limit = max(0, reach - self.reader.prompts.after_document)
            scored = scored & (self.starts[: self.count] + self.columns < limit)
        return shifts * scored[:, None, :, None]


def score_rows(reader: ShiftReader, projection: Projection, rows: Sequence[Row]) -> list[float]:
    """The scores of a batch: above 0 means relevant (paper, Section 4.3)."""
    lengths = torch.tensor([row.query.length for row in rows], device=reader.backbone.device)
    # In float64, in which a sum does not depend on the zeros after a shorter query.
    total = torch.zeros(len(rows), dtype=torch.float64, device=reader.backbone.device)

    def add(layer: int, shifts: Tensor) -> None:
        terms = shift_terms(shifts.float(), *projection.of_layer(layer))
        total.add_(terms.sum(1, dtype=torch.float64).sum(-1) / lengths)

    similarity = reader.read(rows, add)
    scores: list[float] = combine(total, similarity, projection.agreement).float().tolist()
    return scores


def score_parts(
    reader: ShiftReader, projection: Projection, row: Row
) -> tuple[float, Tensor, Tensor]:
    """One score, its shift terms (T, L, H) divided by T, and its similarity terms (1 + T,).

    Both tensors are float64, and their sum is the score.
    """
    layers: list[Tensor] = []

    def add(layer: int, shifts: Tensor) -> None:
        terms = shift_terms(shifts.float(), *projection.of_layer(layer))
        layers.append(terms[0].double())

    similarity = reader.read([row], add)[0]
    terms = torch.stack(layers).permute(2, 0, 1) / row.query.length
    score = combine(terms.sum(), similarity, projection.agreement)
    return float(score), terms, similarity_terms(similarity, projection.agreement)
