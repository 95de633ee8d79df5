"""The KV cache of transformers as a probe: it records prefixes, and shows a query's value vectors.

Attention layers pass every key and value vector through ``Cache.update`` before they attend. The
caches here record a document's keys and values, give attention a recorded prefix, show the query's
value vectors, and end the run at the last layer that is read. Nothing is installed on the model, so
concurrent calls are safe.

Two exceptions are signals:

    Recorder.update  raises StopForward at its last layer   -> Backbone.ended_by catches it
    Entrance.enter   raises StopForward at the fusion layer -> Backbone.ended_by catches it
    Reader.update    raises StopForward at its last layer   -> Backbone.ended_by catches it
    Recorder.update  raises SkipLayer from that layer on    -> fusion.split_at's layer catches it,
                                                               and gives its input as its output

Axes: N rows, L layers, H KV heads, S prefix positions, R query slots, T query tokens, D head
dimension, C hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from ...method.formula import pooled
from ...method.prefix import Prefix, Prefixes, Show, padded_length


class StopForward(Exception):  # noqa: N818 - a signal, not a failure
    """Early exit: ends a forward pass whose remaining layers are not read."""


class SkipLayer(Exception):  # noqa: N818 - a signal, not a failure
    """Ends a layer of which only the keys and values are needed."""


class Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """The base of the caches here: no state of transformers' own, a length, and an early exit.

    Args:
        stop: The last layer that runs, up to its keys and values.
        length: Positions before the tokens of this run.
    """

    entering: Tensor | None = None
    """In a run that begins at the fusion layer, what enters that layer, (N, T, C)."""

    def __init__(self, stop: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.stop = stop
        self.length = length

    def enter(self, hidden: Tensor) -> Tensor:
        """Called at the fusion layer; returns what enters that layer, (N, T, C)."""
        return hidden if self.entering is None else self.entering

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the tokens of this run."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of keys that a mask covers, and the first of them."""
        return self.length + query_length, 0


class Recorder(Probe):
    """Phase 1: records documents' keys and values, from the fusion layer to ``stop`` inclusive.

    Args:
        stop: The last layer.
        lengths: The length of each text; further positions are padding.
        query_slots: Positions to leave free in front of each document.
        extra_rows: Prefixes to add below the documents' rows, none of them longer: null prefixes.
        fusion: The fusion layer; nothing is recorded below it. Documents leave this layer, and
            those above it, as they entered it. 0 for none.
        pads_keys: Whether attention gets keys padded to a multiple of 32.
        window: Positions of a similarity window.
    """

    def __init__(
        self,
        stop: int,
        lengths: Sequence[int],
        query_slots: int = 0,
        extra_rows: Sequence[Prefix] = (),
        *,
        fusion: int = 0,
        pads_keys: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(stop)
        self.lengths = tuple(lengths)
        self.longest = max(lengths)
        self.padded_longest = padded_length(self.longest)
        self.query_slots = padded_length(query_slots)
        self.extra_rows = extra_rows
        self.fusion = fusion
        self.pads_keys = pads_keys
        self.window = window
        self.pooled = list(torch.empty(len(lengths), 0))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def enter(self, hidden: Tensor) -> Tensor:
        """Record what enters the fusion layer, by similarity window."""
        self.pooled = pooled(hidden, self.lengths, self.window)
        return hidden

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Record a layer's keys and values, (N, H, S, D)."""
        if layer_idx < self.fusion:
            if not self.pads_keys:
                return key_states, value_states
            return self._padded(key_states), self._padded(value_states)
        keys = self._with_extra_rows(key_states, 0, layer_idx)
        values = self._with_extra_rows(value_states, 1, layer_idx)
        self.keys.append(keys)
        self.values.append(values)
        if layer_idx == self.stop:
            raise StopForward
        if self.fusion:
            raise SkipLayer
        if not self.pads_keys:
            return key_states, value_states
        rows = len(key_states)
        return keys[:rows, :, self.query_slots :], values[:rows, :, self.query_slots :]

    def _with_extra_rows(self, states: Tensor, part: int, layer: int) -> Tensor:
        extra = [prefix.states[part, layer - self.fusion] for prefix in self.extra_rows]
        return self._padded(states, self.query_slots, extra)

    def _padded(
        self, states: Tensor, query_slots: int = 0, extra_rows: Sequence[Tensor] = ()
    ) -> Tensor:
        """Keys or values (N, H, S, D) with query slots, extra rows and zeros as padding.

        The result has the shape (N + extra rows, H, query slots + padded length, D).
        """
        rows, heads, _, dim = states.shape
        width = query_slots + self.padded_longest
        # Zeros, because fresh memory may hold NaN, and a masked NaN is still NaN.
        padded = states.new_zeros(rows + len(extra_rows), heads, width, dim)
        padded[:rows, :, query_slots : query_slots + self.longest] = states[:, :, : self.longest]
        for row, extra in enumerate(extra_rows, start=rows):
            padded[row, :, query_slots : query_slots + extra.shape[1]] = extra
        return padded

    def prefixes(self) -> Prefixes:
        """The recorded prefixes, and the extra rows below them."""
        lengths = (*self.lengths, *(len(prefix) for prefix in self.extra_rows))
        vectors = [*self.pooled, *(prefix.pooled for prefix in self.extra_rows)]
        return Prefixes(tuple(self.keys), tuple(self.values), lengths, self.query_slots, vectors)


class Entrance(Recorder):
    """Phase 2 below the fusion layer: runs the queries alone, up to what enters that layer."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Record what enters the fusion layer, (N, T, C), and end the run."""
        self.entering = hidden
        raise StopForward


class Reader(Probe):
    """Phase 2: shows the queries' value vectors, then gives attention these and the prefix."""

    def __init__(self, stop: int, prefixes: Prefixes, show: Show) -> None:
        super().__init__(stop, prefixes.keys[0].shape[2])
        self.prefixes = prefixes
        self.show = show
        self.first = stop - len(prefixes.keys)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Show a layer's values, (N, H, T, D); return keys and values of query and prefix."""
        self.show(layer_idx, value_states)
        if layer_idx == self.stop:
            raise StopForward
        keys = self.prefixes.keys[layer_idx - self.first]
        values = self.prefixes.values[layer_idx - self.first]
        count = key_states.shape[2]
        keys[:, :, :count] = key_states
        values[:, :, :count] = value_states
        return keys, values
