"""The transformers KV cache as a probe: record what documents leave behind, read what queries make of it.

Attention layers pass every key and value vector through ``Cache.update`` before they attend. A cache of ours can thus
keep a document's, hand a stored prefix to attention, show each value vector of the query to whoever reads it, and end
the run at the last layer that is read. Nothing is installed on the model, so concurrent calls are safe.

Axes: N rows, L layers, H KV heads, S prefix positions, R positions of room, T query tokens, D head dimension.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

Show = Callable[[int, Tensor], object]
"""Receives a layer's index and its value vectors, (N, H, T, D)."""

LARGEST_SCRATCH = 192_000_000
"""Bytes that a thread goes on holding for joined prefixes: a batch's, and what rounding up to `LANES` and the rows
without a document add."""

LANES = 32
"""Keys that attention sees come in multiples of this. A kernel sums in vectors of up to so many numbers: where the last
one is cut off, another sum is taken, and a score would depend on how long a document's neighbours are."""


def whole_lanes(length: int) -> int:
    """A length, rounded up to whole `LANES`.

    >>> whole_lanes(1), whole_lanes(32), whole_lanes(33)
    (32, 32, 64)
    """
    return -(-length // LANES) * LANES


class LastLayerReached(Exception):  # noqa: N818 - a signal, not a failure
    """Ends a forward pass whose remaining layers nobody reads."""


class Scratch(threading.local):
    """A thread's memory for joined prefixes. Fresh memory on a CPU costs as much as filling it does."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape; what was taken before is gone."""
        count = math.prod(shape)
        # Other devices' allocators keep what is given back.
        if like.device.type != "cpu" or count * like.element_size() > LARGEST_SCRATCH:
            return like.new_empty(shape)
        if self.memory is None or len(self.memory) < count or self.memory.dtype != like.dtype:
            self.memory = None
            self.memory = like.new_empty(count)
        return self.memory[:count].view(shape)


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of N prefixes, with room in front of each for a query's.

    A query's keys and values are written into the room, so that attention finds both in one piece without a copy of
    the prefix. They stand in front so that their place does not depend on the longest prefix of the batch.

    Attributes:
        keys: Per layer, (N, H, R + S, D). Rotary positions are already in them.
        values: Per layer, (N, H, R + S, D).
        lengths: Valid positions of each prefix.
        room: R.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    room: int

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Tensor], room: int, scratch: Scratch | None = None) -> Prefixes:
        """Join single prefixes, each (2, L, H, its length, D): keys, then values.

        Args:
            rows: The prefixes.
            room: Tokens of the longest query that will be run after them.
            scratch: Memory to join them in; the result then holds until this thread's next use of it.
        """
        lengths, room = tuple(row.shape[3] for row in rows), whole_lanes(room)
        _, layers, heads, _, dim = rows[0].shape
        width = whole_lanes(max(lengths))
        both = (scratch or Scratch()).take(rows[0], (2, layers, len(rows), heads, room + width, dim))
        both[:, :, :, :, :room] = 0  # whatever lay there might be NaN, and a masked NaN is still NaN
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            both[:, :, number, :, room : room + length] = row
            both[:, :, number, :, room + length :] = 0
        return cls(tuple(both[0]), tuple(both[1]), lengths, room)

    def row(self, number: int) -> Tensor:
        """One prefix without padding, in memory of its own, (2, L, H, its length, D)."""
        end = self.room + self.lengths[number]
        keys, values = ([layer[number, :, self.room : end] for layer in part] for part in (self.keys, self.values))
        return torch.stack([*keys, *values]).view(2, len(keys), *keys[0].shape)

    def take(self, rows: Tensor) -> Prefixes:
        """Some of the rows, in any order and as often as wanted, (their number,) indices."""
        keys, values = (tuple(layer[rows] for layer in part) for part in (self.keys, self.values))
        return Prefixes(keys, values, tuple(self.lengths[row] for row in rows.tolist()), self.room)


class Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """What both caches of ours share: no state of transformers' own, a length, and an end."""

    def __init__(self, stop: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.stop, self.length = stop, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the tokens of this run."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same, as transformers asks for it when it makes masks."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask covers, and where they start."""
        return self.length + query_length, 0


class Recorder(Probe):
    """Phase 1: keep what the documents' tokens leave behind, up to and including layer ``stop``.

    Args:
        stop: The last layer.
        longest: Positions to keep: what stands behind them is padding.
        room: Positions to leave free in front of each document.
        behind: Prefixes to add below the documents' rows, none of them longer: those without a document, each
            (2, L, H, its length, D).
        aligned: Whether attention is given whole `LANES`.
    """

    def __init__(
        self, stop: int, longest: int, room: int = 0, behind: Sequence[Tensor] = (), *, aligned: bool = False
    ) -> None:
        super().__init__(stop)
        self.longest, self.room, self.behind, self.aligned = longest, whole_lanes(room), behind, aligned
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values, (N, H, S, D)."""
        kept = self._kept(key_states, 0, layer_idx), self._kept(value_states, 1, layer_idx)
        self.keys.append(kept[0])
        self.values.append(kept[1])
        if layer_idx == self.stop:
            raise LastLayerReached
        if not self.aligned:
            return key_states, value_states
        rows = len(key_states)
        return kept[0][:rows, :, self.room :], kept[1][:rows, :, self.room :]

    def _kept(self, states: Tensor, part: int, layer: int) -> Tensor:
        rows, heads, _, dim = states.shape
        start, end = self.room, self.room + self.longest
        kept = states.new_empty(rows + len(self.behind), heads, start + whole_lanes(self.longest), dim)
        kept[:rows, :, start:end] = states[:, :, : self.longest]
        kept[:, :, :start] = 0  # whatever lay there might be NaN, and a masked NaN is still NaN
        kept[:rows, :, end:] = 0
        for row, other in enumerate(self.behind, start=rows):
            stop = start + other.shape[3]
            kept[row, :, start:stop] = other[part, layer]
            kept[row, :, stop:] = 0
        return kept

    def prefixes(self, lengths: Sequence[int]) -> Prefixes:
        """What was recorded of documents of these lengths, and those behind them."""
        lengths = (*lengths, *(other.shape[3] for other in self.behind))
        return Prefixes(tuple(self.keys), tuple(self.values), lengths, self.room)


class Reader(Probe):
    """Phase 2: show the queries' value vectors, then let attention see them and the prefix."""

    def __init__(self, stop: int, prefixes: Prefixes, show: Show) -> None:
        super().__init__(stop, prefixes.keys[0].shape[2])
        self.prefixes, self.show = prefixes, show

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Show a layer's values, (N, H, T, D); give attention them and the prefix."""
        self.show(layer_idx, value_states)
        if layer_idx == self.stop:
            raise LastLayerReached
        keys, values = self.prefixes.keys[layer_idx], self.prefixes.values[layer_idx]
        count = min(key_states.shape[2], self.prefixes.room)  # what stands behind it nobody sees
        keys[:, :, :count], values[:, :, :count] = key_states[:, :, :count], value_states[:, :, :count]
        return keys, values
