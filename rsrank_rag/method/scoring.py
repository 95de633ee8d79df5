"""From rows to scores: the paper's Section 4.3, as one path.

A batch has N rows, each a document and a query. Each distinct query adds a null row, which has no
document, so that the two runs that are subtracted share a batch and are rounded alike. The shift is
a row's value vectors minus those of the null row of its query.

Axes: N rows, Q distinct queries, L layers, H KV heads, T scored query tokens, D head dimension, W
similarity windows of the longest document.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .batches import Batches, Row, device_kind
from .formula import (
    Array,
    Numbers,
    Weights,
    cast,
    combine,
    cosine,
    maxsim,
    namespace,
    representational_shift,
    shift_terms,
    similarity_terms,
    similarity_windows,
    to_numpy,
    token_mean,
    token_shares,
)
from .prefix import Prefixes, padded_length
from .template import PromptTokenizer, TokenisedQuery

if TYPE_CHECKING:
    from ..backends.base import LanguageModel
    from ..prefixes.cache import CachedPrefixes

# Vectors whose cosines are computed together. Measured: a thousand take twice as long as four times
# 256, because the system gives numpy new memory for each large array.
VECTORS = 256

# As `SIMILAR_LENGTH`, for documents with a cached prefix: their padding costs attention only.
CACHED_SIMILAR_LENGTH = 0.4

# The cached prefixes of one batch have at most so many bytes. On a CPU, glibc takes blocks of more
# than 32 MB from the system anew for each batch, and some batches then take three times as long.
JOINED_BYTES = {"cpu": 25_000_000, "cuda": 4_000_000_000, "mps": 1_000_000_000}

# The cached prefixes of one batch have at most so many times the tokens of the token budget. It is
# more than once, because only the queries of these rows run.
CACHED_BUDGETS = 8

# A call that takes longer is reported in the log.
SLOW_SECONDS = 10

logger = logging.getLogger(__name__)

Consume = Callable[[int, Array], object]
"""Receives a layer's index and its shifts, (N, H, T, D) fp32, 0 after shorter queries."""


@dataclass(eq=False)
class ShiftReader:
    """Reads shifts. Scoring and training both read here, so that B is used as it was trained.

    Attributes:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        layers: The layers to read.
        cache: The prefix cache; None runs the document of every row.
    """

    backbone: LanguageModel
    prompts: PromptTokenizer
    layers: Sequence[int]
    cache: CachedPrefixes | None = None

    def read(self, rows: Sequence[Row], consume: Consume) -> Array:
        """Give the shifts of a batch to ``consume``, one layer after the other.

        Returns:
            Similarity, (N, W, 1 + T) float64, zeros without a fusion layer. Column 0 is the cosine
            of two vectors: the mean of the window's states and the mean of the query's states
            that enter the fusion layer, when each text is run alone. Each other column is for a
            token of the query: its best cosine with a token of the window (`maxsim`), divided
            by the number of query tokens. So these columns add up to MaxSim. A document with fewer
            windows than the longest one has its first window, the whole document, again.
        """
        queries = list(dict.fromkeys(row.query for row in rows))
        # The documents' rows, and a null row for each query below them.
        query_of_row = [queries.index(query) for query in (*(row.query for row in rows), *queries)]
        ids = [query.ids for query in queries]
        slots = max(map(len, ids)) if self.backbone.uses_query_slots else 0
        null_rows = [self.backbone.null_prefix(self.prompts.null_prefix)] * len(queries)
        if self.cache is None:
            documents = self.backbone.prefill([row.document for row in rows])
        else:
            documents = self.cache.prefill(self.backbone, rows)
        prefixes = Prefixes.join([*documents, *null_rows], slots)
        batch = _BatchReader(self, queries, query_of_row, prefixes, consume)
        embedded = self.backbone.query_values(ids, prefixes, batch.show, query_of_row)
        if len(embedded):
            batch.compare(embedded)
        return batch.similarity


class _BatchReader:
    """Turns the value vectors of one batch into shifts and similarity, layer by layer."""

    def __init__(
        self,
        reader: ShiftReader,
        queries: Sequence[TokenisedQuery],
        query_of_row: Sequence[int],
        prefixes: Prefixes,
        consume: Consume,
    ) -> None:
        self.reader = reader
        self.prefixes = prefixes
        self.consume = consume
        self.xp = namespace(prefixes.keys[0])
        self.array = partial(self.xp.asarray, device=reader.backbone.device)
        # Rows with a document, which stand above the null rows.
        self.count = len(query_of_row) - len(queries)
        longest = max(prefixes.lengths[: self.count])
        self.windows = similarity_windows(longest, reader.backbone.similarity_window)
        self.query_of_row = query_of_row[: self.count]
        self.rows = self.array(np.arange(len(query_of_row)))[:, None]
        # The scored tokens of each row, and which of them are no padding.
        columns = self.array(np.arange(max(query.length for query in queries)))
        last = max(len(query.ids) for query in queries) - 1
        starts = self.array([queries[number].start for number in query_of_row])[:, None]
        self.places = (starts + columns).clip(None, last)
        self.lengths = self.array([queries[number].length for number in self.query_of_row])[:, None]
        self.scored = columns < self.lengths
        size = (self.count, len(self.windows), 1 + len(columns))
        self.similarity: Array = self.array(np.zeros(size))

    def show(self, layer: int, values: Array) -> None:
        """Read one layer's value vectors, (N + Q, H, all tokens, D)."""
        values = values[self.rows, :, self.places].swapaxes(1, 2)
        documents = values[: self.count]
        backbone = self.reader.backbone
        if layer == backbone.fusion_layer > 0:
            self.similarity[:, :, 1:] = self._maxsim(documents)
        if layer not in self.reader.layers:
            return
        alone = values[self.count :]
        # The null row of a single query is broadcast and not copied.
        if len(alone) > 1:
            alone = alone[self.array(self.query_of_row)]
        counted = self.scored
        if layer in backbone.reach:
            # Later tokens cannot know of the document. Their shift is rounding, and its direction
            # would count as much as any other.
            limit = max(0, backbone.reach[layer] - self.reader.prompts.after_document)
            counted = counted & (self.places[: self.count] < limit)
        shifts = representational_shift(documents, alone)
        self.consume(layer, shifts * counted[:, None, :, None])

    def _maxsim(self, queries: Array) -> Array:
        """MaxSim by window of each token, divided by the number of tokens, (N, W, T).

        The queries' values are (N, H, T, D).
        """
        prompts = self.reader.prompts
        documents = self.prefixes.values[0][: self.count, :, self.prefixes.query_slots :]
        places = self.array(np.arange(documents.shape[2]))
        lengths = self.array(self.prefixes.lengths[: self.count])
        ends = (lengths - prompts.after_document)[:, None]
        in_document = (places >= len(prompts.instruction)) & (places < ends)
        best = cast(maxsim(queries, documents, in_document, self.windows), "float64")
        return token_shares(self.xp.where(self.scored[:, None], best, 0), self.lengths[:, None])

    def compare(self, queries: Array) -> None:
        """Compute the cosines of the documents' windows and the queries, both pooled, (Q, C).

        Windows that a document lacks become its first window, the whole document.
        """
        pooled = self.prefixes.pooled[: self.count]
        query_of_window: list[int] = []
        for query, vectors in zip(self.query_of_row, pooled, strict=True):
            query_of_window += [query] * len(vectors)
        windows = self.xp.concatenate(pooled)
        cosines = []
        for start in range(0, len(windows), VECTORS):
            part = slice(start, start + VECTORS)
            cosines.append(cosine(windows[part], queries[query_of_window[part]]))
        counts = self.array([len(vectors) for vectors in pooled])[:, None]
        exists = self.array(np.arange(len(self.windows))) < counts
        self.similarity[..., 0][exists] = self.xp.concatenate(cosines)
        first = self.similarity[:, :1]
        self.similarity = self.xp.where(exists[..., None], self.similarity, first)


def score_rows(
    reader: ShiftReader, projection: Weights, rows: Sequence[Row]
) -> tuple[Array, Array, Array]:
    """The scores of a batch (paper, Section 4.3), and what they are made of.

    Returns:
        Scores, (N,), above 0 for relevant documents; shift terms before the mean over tokens,
        (N, L, H, T); similarity, as `ShiftReader.read` returns it. All are float64.
    """
    layers: list[Array] = []

    def add(layer: int, shifts: Array) -> None:
        place = projection.layers.index(layer)
        head_weight = None if projection.head_weight is None else projection.head_weight[place]
        terms = shift_terms(shifts, projection.weight[place], head_weight)
        layers.append(cast(terms, "float64"))

    similarity = reader.read(rows, add)
    lengths = [row.query.length for row in rows]
    xp = namespace(similarity)
    terms = xp.stack(layers, 1)
    shift_scores = token_mean(terms.sum((1, 2)), xp.asarray(lengths, device=similarity.device))
    return combine(shift_scores, similarity, projection.agreement), terms, similarity


class RowTerms(NamedTuple):
    """The score of one row and the terms that add up to it.

    Attributes:
        score: The score.
        shift: Shift terms, each divided by T, (T, L, H).
        similarity: Similarity terms of the best similarity window, (1 + T,).
        window: The number of this window; 0 for the whole document.
    """

    score: float
    shift: Numbers
    similarity: Numbers
    window: int = 0


def row_terms(reader: ShiftReader, projection: Weights, row: Row) -> RowTerms:
    """Score one row, and take its score apart.

    Raises:
        DoesNotFitError: The row does not fit into memory.
    """
    batches = Batches([row], 1)
    for batch in batches:
        with reader.backbone.inference(), batches.attempt():
            scores, terms, similarity = score_rows(reader, projection, batch)
    windows = to_numpy(similarity_terms(similarity[0], projection.agreement))
    best = int(windows.sum(-1).argmax())
    shift = to_numpy(token_shares(terms[0], row.query.length)).transpose(2, 0, 1)
    return RowTerms(float(scores[0]), shift, windows[best], best)


def score_in_batches(
    reader: ShiftReader, projection: Weights, rows: Sequence[Row], token_budget: int
) -> dict[Row, float]:
    """Scores of rows whose queries differ in length, in batches of at most so many padded tokens.

    Raises:
        DoesNotFitError: A row does not fit into memory even alone.
    """
    scores: dict[Row, float] = {}
    slow_at = monotonic() + SLOW_SECONDS
    with reader.backbone.inference():
        for batches in batches_of(reader, rows, token_budget):
            for batch in batches:
                if monotonic() > slow_at:
                    slow_at = math.inf
                    logger.warning(
                        "%d of %d texts are scored after %d seconds. Fewer or shorter documents "
                        "take less time, and so do long_documents='cut' and a smaller "
                        "max_characters.",
                        len(scores),
                        len(rows),
                        SLOW_SECONDS,
                    )
                with batches.attempt():
                    of_batch = score_rows(reader, projection, batch)[0]
                    scores.update(zip(batch, of_batch.tolist(), strict=True))
    return scores


def batches_of(reader: ShiftReader, rows: Sequence[Row], budget: int) -> list[Batches[Row]]:
    """Batches of rows whose queries have about the same length.

    Documents with a cached prefix have batches of their own: only their queries run, so that more
    of them fit into a batch. Of queries of one length, these batches come first, because new
    documents may replace the cached prefixes.
    """
    keys: set[str] = set()
    if reader.cache is not None:
        keys = reader.cache.tiers.cached([row.key for row in rows])
    cached_budget = budget
    if keys:
        backbone = reader.backbone
        joined = JOINED_BYTES.get(device_kind(backbone.device), JOINED_BYTES["cpu"])
        joined //= max(1, backbone.bytes_per_token)
        cached_budget = max(budget, min(joined, CACHED_BUDGETS * budget))
    groups: dict[int, tuple[list[Row], list[Row]]] = {}
    for row in rows:
        new, cached = groups.setdefault(padded_length(len(row.query.ids)), ([], []))
        (cached if row.key in keys else new).append(row)
    batches = []
    for slots, (new, cached) in groups.items():
        batches.append(Batches(cached, cached_budget, slots, CACHED_SIMILAR_LENGTH))
        batches.append(Batches(new, budget, slots))
    return batches
