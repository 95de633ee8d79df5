"""Reading shifts: the backbone's signal at the query's tokens after a document, minus the same without it.

Scoring and training read through here, so that B sees the same numbers in both.

Axes: N documents, H heads, T scored query tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .backbone import Backbone
from .batching import Ids
from .cache import Consumer, Prefixes
from .config import NullPrefix, Signal
from .prefix_store import PrefixStore
from .shift import representational_shift
from .template import PromptTokenizer, TokenisedQuery

ShiftConsumer = Callable[[int, Tensor], Tensor | None]
"""Receives a read layer's index and its shifts, (N, H, T, D) fp32; may let documents leave, as `cache.Consumer`."""


@dataclass
class NullRun:
    """One query's signal without a document, kept for as long as the query is being scored.

    Attributes:
        query: The query.
        by_length: Layer -> (1, H, T, D), for each length of null prefix that was needed so far.
    """

    query: TokenisedQuery
    by_length: dict[int, dict[int, Tensor]] = field(default_factory=dict)


class ShiftReader:
    """Reads the shifts that B is made for.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        layers: Layers to read.
        signal: Value vectors, keys, or the hidden states that enter a layer (then H = 1 and D is the hidden size).
        null_prefix: What stands for "no document" in the run that is subtracted; see `RSRankConfig`.
        store: Where documents' prefixes are kept; None runs every document anew.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        layers: Sequence[int],
        *,
        signal: Signal = "values",
        null_prefix: NullPrefix = "empty",
        store: PrefixStore | None = None,
    ) -> None:
        self.backbone, self.prompts, self.layers = backbone, prompts, frozenset(layers)
        self.signal, self.null_prefix, self.store = signal, null_prefix, store
        self._empty: Tensor | None = None  # the template without a document: the same for every query

    def prefill(self, documents: Sequence[Ids], room: int = 0) -> Prefixes:
        """Documents' prefixes, from the store where it has them, with room for a query's tokens."""
        if self.store is not None:
            return self.store.prefill(documents, self.run, room)
        return self.run(documents, room)

    def run(self, documents: Sequence[Ids], room: int = 0) -> Prefixes:
        """Run documents, as far as this signal needs them."""
        return self.backbone.prefill(documents, room=room, whole=self.signal == "hidden")

    def read(self, run: NullRun, prefixes: Prefixes, consume: ShiftConsumer) -> None:
        """One query after N prefixes: hand each read layer's shifts over, in ascending order.

        Args:
            run: The query; what is computed for it without a document is kept there.
            prefixes: From `prefill`.
            consume: Called once a layer. It may let documents leave where the null prefix is not "matched".
        """
        self._signal(run.query, prefixes, self._subtracting(run, prefixes.lengths.tolist(), consume))

    def read_in_one_run(self, run: NullRun, documents: Sequence[Ids], consume: ShiftConsumer) -> None:
        """The same for documents of which nothing is kept: one that leaves early saves the work on its own tokens too.

        Args:
            run: The query.
            documents: Token ids of ``instruction + document + separator``.
            consume: Called once a layer.
        """
        subtract = self._subtracting(run, [len(ids) for ids in documents], consume)
        assert self.signal != "hidden"
        self.backbone.values_in_one_run(
            documents, run.query.ids, self._scored_tokens(run.query, subtract), signal=self.signal
        )

    def _subtracting(self, run: NullRun, lengths: list[int], consume: ShiftConsumer) -> Consumer:
        """A consumer of signals that hands shifts on."""
        if self.null_prefix == "none":
            return lambda layer, found: consume(layer, found.float())
        wanted = [length if self.null_prefix == "matched" else 0 for length in lengths]
        missing = sorted(set(wanted) - set(run.by_length))
        if missing:
            found: dict[int, Tensor] = {}
            self._signal(
                run.query,
                self._null_prefixes(missing, len(run.query.ids)),
                lambda layer, value: found.__setitem__(layer, value),
            )
            for row, length in enumerate(missing):
                run.by_length[length] = {layer: value[row : row + 1] for layer, value in found.items()}

        def subtract(layer: int, found: Tensor) -> Tensor | None:
            alone = [run.by_length[length][layer] for length in (wanted if self.null_prefix == "matched" else [0])]
            return consume(layer, representational_shift(found, alone[0] if len(alone) == 1 else torch.cat(alone)))

        return subtract

    def _null_prefixes(self, lengths: Sequence[int], room: int) -> Prefixes:
        """The template before the query with filler up to each length; 0 stands for no document and no filler."""
        if list(lengths) != [0]:
            return self.run([self.prompts.filled_prefix(length) for length in lengths], room)
        if self._empty is None:
            self._empty = self.run([self.prompts.null_prefix]).row(0)
        return Prefixes.of([self._empty], room)

    def _signal(self, query: TokenisedQuery, prefixes: Prefixes, consume: Consumer) -> None:
        self.backbone.query_values([query.ids], prefixes, self._scored_tokens(query, consume), signal=self.signal)

    def _scored_tokens(self, query: TokenisedQuery, consume: Consumer) -> Consumer:
        """Pass on what B reads: its layers, at the tokens that are scored, in fp32."""
        return lambda layer, found: consume(layer, found[:, :, query.scored].float()) if layer in self.layers else None
