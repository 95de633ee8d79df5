"""The transformers KV cache as a probe: record what documents leave behind, read what queries make of it.

Attention layers pass every key and value vector through ``Cache.update`` before they attend. A cache of ours can thus
keep a document's, hand a stored prefix to attention, show each value vector of the query to whoever reads it, and end
the run at the last layer that is read. Nothing is installed on the model, so concurrent calls are safe.

Axes: N documents, L layers, H KV heads, S prefix positions, T query tokens, R positions of room, D head dimension.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..language_model.attention import Packing

Consumer = Callable[[int, Tensor], Tensor | None]
"""Receives a layer's index and its value vectors, (N, H, T, D).

It may give the rows that are still needed, counted among those it received: the others leave the run
(`Backbone.let_rows_leave`).
"""


class LastLayerReached(Exception):  # noqa: N818 - a signal, not a failure
    """Ends a forward pass whose remaining layers nobody reads."""


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of document prefixes, right-padded to a common length, with room for a query behind them.

    A query's keys and values are written into the room, so that attention finds both in one piece without a copy of
    the prefix. Two queries may use the same prefixes one after the other, but not at the same time.

    Attributes:
        keys: Per layer, (N, H, S + R, D). Rotary positions are already in them.
        values: Per layer, (N, H, S + R, D).
        lengths: Valid positions of each prefix.
        width: S.
        nulls: How many of the rows, the last ones, hold no document.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    width: int
    nulls: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Tensor], room: int = 0, scratch: Scratch | None = None, *, nulls: int = 0) -> Prefixes:
        """Join single prefixes, each (2, L, H, its length, D): keys, then values.

        Args:
            rows: The prefixes.
            room: Tokens of the queries that will be run after them.
            scratch: Memory to join them in; the result then holds until this thread's next use of it.
            nulls: How many of them, the last ones, hold no document.
        """
        lengths = tuple(row.shape[3] for row in rows)
        _, layers, heads, _, dim = rows[0].shape
        width = max(lengths)
        both = (scratch or Scratch()).take(rows[0], (2, layers, len(rows), heads, width + room, dim))
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            both[:, :, number, :, :length] = row
            both[:, :, number, :, length:width] = 0  # whatever lay there might be NaN, and a masked NaN is still NaN
        return cls(tuple(both[0]), tuple(both[1]), lengths, width, nulls)

    def row(self, number: int) -> Tensor:
        """One prefix without padding, in memory of its own, (2, L, H, its length, D)."""
        length = self.lengths[number]
        keys, values = ([layer[number, :, :length] for layer in part] for part in (self.keys, self.values))
        return torch.stack([*keys, *values]).view(2, len(keys), *keys[0].shape)

    def with_room(self, room: int) -> Prefixes:
        """These, or a copy of them, with room for so many tokens."""
        if self.keys[0].shape[2] - self.width >= room:
            return self
        both = [tuple(roomy(layer[:, :, : self.width], room) for layer in part) for part in (self.keys, self.values)]
        return Prefixes(both[0], both[1], self.lengths, self.width, self.nulls)


LARGEST_SCRATCH = 128_000_000
"""Bytes that a thread goes on holding for joined prefixes."""


class Scratch(threading.local):
    """A thread's memory for joined prefixes. Fresh memory on a CPU costs as much as filling it does."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape; what was taken before is gone."""
        count = math.prod(shape)
        if like.device.type != "cpu":  # other allocators keep what is given back
            return like.new_empty(shape)
        if count * like.element_size() > LARGEST_SCRATCH:
            return like.new_empty(shape)
        if self.memory is None or len(self.memory) < count or self.memory.dtype != like.dtype:
            self.memory = None
            self.memory = like.new_empty(count)
        return self.memory[:count].view(shape)


def roomy(states: Tensor, room: int) -> Tensor:
    """A copy of (N, H, S, D) states with ``room`` more positions that hold nothing yet."""
    rows, heads, width, dim = states.shape
    copy = states.new_empty(rows, heads, width + room, dim)
    copy[:, :, :width] = states
    return copy


class Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """What all caches of ours share: no state of transformers' own, a length, an end, and rows that leave."""

    def __init__(self, stop: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.stop, self.length = stop, length
        self.rows: Tensor | None = None  # still in the run, of the batch's; None for all
        self._stay: Tensor | None = None  # of these, from the next layer on
        self._batch: int | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the tokens of this run."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same, as transformers asks for it when it makes masks."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask covers, and where they start."""
        return self.length + query_length, 0

    def show(self, consume: Consumer, layer: int, states: Tensor) -> None:
        """Hand a layer's states to their consumer, and remember what it no longer needs.

        Raises:
            LastLayerReached: The run can end here.
        """
        stay = consume(layer, states)
        if layer == self.stop or (stay is not None and len(stay) == 0):
            raise LastLayerReached
        self._stay = stay

    def without_leavers(self, hidden: Tensor, others: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """What enters a layer, less the rows that left before it. To be called for every layer.

        Args:
            hidden: Hidden states, of the rows that were in the layer before.
            others: The layer's other inputs, such as masks and positions: those of the whole batch.
        """
        self._batch = len(hidden) if self._batch is None else self._batch
        if self._stay is not None:
            hidden = hidden[self._stay]
            self.rows = self._stay if self.rows is None else self.rows[self._stay]
            self._stay = None
        return hidden, [self._remaining(other) for other in others]

    def _remaining(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._remaining(part) for part in value)
        if self.rows is None or not isinstance(value, Tensor) or value.ndim < 2 or len(value) != self._batch:
            return value
        return value[self.rows]


class Recorder(Probe):
    """Phase 1: keep what the document's tokens leave behind, up to and including layer ``stop``.

    Args:
        stop: The last layer.
        room: Positions to leave free behind each document.
        packing: Where the documents stand, if all of them are in one row.
    """

    def __init__(self, stop: int, room: int = 0, packing: Packing | None = None) -> None:
        super().__init__(stop)
        self.room, self.packing = room, packing
        self.keys: list[Tensor] = []
        self.recorded_values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values, (N, H, S, D)."""
        self.keys.append(self._kept(key_states))
        self.recorded_values.append(self._kept(value_states))
        if layer_idx == self.stop:
            raise LastLayerReached
        return key_states, value_states

    def _kept(self, states: Tensor) -> Tensor:
        if self.packing is not None:
            return self.packing.spread(states, max(self.packing.lengths) + self.room)
        return roomy(states, self.room) if self.room else states


class Reader(Probe):
    """Phase 2: hand the prefix to attention and the query's value vectors (or keys) to the consumer."""

    def __init__(self, prefixes: Prefixes, consume: Consumer, stop: int, *, keys: bool = False) -> None:
        super().__init__(stop, prefixes.width)
        self.prefixes, self.consume, self.show_keys = prefixes, consume, keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Show the query's values to the consumer; give attention the prefix followed by them."""
        self.show(self.consume, layer_idx, key_states if self.show_keys else value_states)
        keys, values = self.prefixes.keys[layer_idx], self.prefixes.values[layer_idx]
        if self.rows is not None:
            keys, values = keys[self.rows], values[self.rows]
        start, end = self.length, self.length + key_states.shape[2]
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        return keys[:, :, :end], values[:, :, :end]


class Whole(Probe):
    """Both phases in one: show the values of the last T tokens, and keep nothing."""

    def __init__(self, count: int, consume: Consumer, stop: int, *, keys: bool = False) -> None:
        super().__init__(stop)
        self.count, self.consume, self.show_keys = count, consume, keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Show the query's values to the consumer."""
        shown = key_states if self.show_keys else value_states
        self.show(self.consume, layer_idx, shown[:, :, -self.count :])
        return key_states, value_states
