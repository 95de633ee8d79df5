"""The transformers KV cache as a probe: record what documents leave behind, read what queries make of it.

Attention layers pass every key and value vector through ``Cache.update`` before they attend. A cache of ours can thus
keep a document's, hand a stored prefix to attention, show each value vector of the query to whoever reads it, and end
the run at the last layer that is read. Nothing is installed on the model, so concurrent calls are safe.

Axes: N rows, L layers, H KV heads, S prefix positions, R positions of room, T query tokens, D head dimension, C hidden
size.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import Self

Show = Callable[
    [int, Tensor], object
]  # receives a layer's index and its value vectors, (N, H, T, D)

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


class LayerPassed(Exception):  # noqa: N818 - a signal, too
    """Ends a layer that documents leave as they entered it: only their keys and values are wanted."""


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
class Prefix:
    """What one document leaves behind for later queries."""

    states: (
        Tensor  # its keys, then its values, of the layers in which queries see it, (2, L, H, S, D)
    )
    pooled: Tensor  # mean over its tokens of what enters the fusion layer, (C,) fp32; empty without a fusion layer

    def __len__(self) -> int:
        return self.states.shape[3]


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of N prefixes, with room in front of each for a query's.

    A query's keys and values are written into the room, so that attention finds both in one piece without a copy of
    the prefix. They stand in front so that their place does not depend on the longest prefix of the batch.
    """

    keys: tuple[Tensor, ...]  # per layer, (N, H, R + S, D), with rotary positions
    values: tuple[Tensor, ...]  # per layer, (N, H, R + S, D)
    lengths: tuple[int, ...]  # valid positions of each prefix
    room: int  # R
    pooled: Tensor  # `Prefix.pooled` of each, (N, C)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Prefix], room: int, scratch: Scratch | None = None) -> Self:
        """Join single prefixes, with room for so many tokens; in ``scratch`` until this thread's next use of it."""
        lengths, room = tuple(map(len, rows)), whole_lanes(room)
        _, layers, heads, _, dim = rows[0].states.shape
        width = whole_lanes(max(lengths))
        both = (scratch or Scratch()).take(
            rows[0].states, (2, layers, len(rows), heads, room + width, dim)
        )
        both[:, :, :, :, :room] = (
            0  # whatever lay there might be NaN, and a masked NaN is still NaN
        )
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            both[:, :, number, :, room : room + length] = row.states
            both[:, :, number, :, room + length :] = 0
        return cls(
            tuple(both[0]), tuple(both[1]), lengths, room, torch.stack([row.pooled for row in rows])
        )

    def row(self, number: int) -> Prefix:
        """One prefix without padding, in memory of its own."""
        end = self.room + self.lengths[number]
        keys, values = (
            [layer[number, :, self.room : end] for layer in part]
            for part in (self.keys, self.values)
        )
        states = torch.stack([*keys, *values]).view(2, len(keys), *keys[0].shape)
        return Prefix(states, self.pooled[number].clone())

    def take(self, rows: Tensor) -> "Prefixes":
        """Some of the rows, in any order and as often as wanted, (their number,) indices."""
        keys, values = (tuple(layer[rows] for layer in part) for part in (self.keys, self.values))
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        return Prefixes(keys, values, lengths, self.room, self.pooled[rows])


class Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """What all caches of ours share: no state of transformers' own, a length, and an end."""

    entering: Tensor | None = None
    """What enters the fusion layer, (N, T, C), in a run that begins there; None in one from the first layer."""

    def __init__(self, stop: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.stop, self.length = stop, length

    def enter(self, hidden: Tensor) -> Tensor:
        """At the fusion layer: what enters it, (N, T, C)."""
        return hidden if self.entering is None else self.entering

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
    """Phase 1: keep what the documents' tokens leave behind, from the fusion layer up to and including ``stop``.

    Args:
        stop: The last layer.
        lengths: Of each text: what stands behind it is padding.
        room: Positions to leave free in front of each document.
        behind: Prefixes to add below the documents' rows, none of them longer: those without a document.
        fusion: The fusion layer; nothing is kept of those below it.
        aligned: Whether attention is given whole `LANES`.
        stay: Whether documents leave the fusion layer, and those above it, as they entered it.
    """

    def __init__(
        self,
        stop: int,
        lengths: Sequence[int],
        room: int = 0,
        behind: Sequence[Prefix] = (),
        *,
        fusion: int = 0,
        aligned: bool = False,
        stay: bool = False,
    ) -> None:
        super().__init__(stop)
        self.stay = stay
        self.lengths, self.longest, self.fusion, self.aligned = (
            tuple(lengths),
            max(lengths),
            fusion,
            aligned,
        )
        self.room, self.behind = whole_lanes(room), behind
        self.pooled: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def enter(self, hidden: Tensor) -> Tensor:
        """Keep the mean of what enters the fusion layer."""
        self.pooled = pooled(hidden, self.lengths)
        return hidden

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values, (N, H, S, D)."""
        if layer_idx < self.fusion:
            if not self.aligned:
                return key_states, value_states
            return _padded(key_states, self.longest), _padded(value_states, self.longest)
        both, place = (key_states, value_states), layer_idx - self.fusion
        keys, values = (
            _padded(
                states,
                self.longest,
                self.room,
                [other.states[part, place] for other in self.behind],
            )
            for part, states in enumerate(both)
        )
        self.keys.append(keys)
        self.values.append(values)
        if layer_idx == self.stop:
            raise LastLayerReached
        if self.stay:
            raise LayerPassed
        rows = slice(len(key_states))
        return (keys[rows, :, self.room :], values[rows, :, self.room :]) if self.aligned else both

    def prefixes(self) -> Prefixes:
        """What was recorded, and the prefixes behind it."""
        lengths = (*self.lengths, *map(len, self.behind))
        own = (
            torch.empty(len(self.lengths), 0, device=self.keys[0].device)
            if self.pooled is None
            else self.pooled
        )
        every = torch.stack([*own, *(other.pooled for other in self.behind)])
        return Prefixes(tuple(self.keys), tuple(self.values), lengths, self.room, every)


class Entrance(Recorder):
    """Phase 2 below the fusion layer: the queries by themselves, up to what enters it."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Keep what enters the fusion layer, (N, T, C), and end the run."""
        self.entering = hidden
        raise LastLayerReached


class Reader(Probe):
    """Phase 2: show the queries' value vectors, then let attention see them and the prefix."""

    def __init__(self, stop: int, prefixes: Prefixes, show: Show) -> None:
        super().__init__(stop, prefixes.keys[0].shape[2])
        self.prefixes, self.show = prefixes, show
        self.first = stop - len(prefixes.keys)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Show a layer's values, (N, H, T, D); give attention them and the prefix."""
        self.show(layer_idx, value_states)
        if layer_idx == self.stop:
            raise LastLayerReached
        keys, values = (
            self.prefixes.keys[layer_idx - self.first],
            self.prefixes.values[layer_idx - self.first],
        )
        count = min(key_states.shape[2], self.prefixes.room)  # what stands behind it nobody sees
        keys[:, :, :count], values[:, :, :count] = (
            key_states[:, :, :count],
            value_states[:, :, :count],
        )
        return keys, values


def pooled(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean over each text's tokens of hidden states (N, T, C), (N, C) fp32.

    In float64, in which the sum does not depend on how much padding stands behind a text.
    """
    counts = torch.tensor(lengths, device=hidden.device)[:, None]
    valid = torch.arange(hidden.shape[1], device=hidden.device) < counts
    total = hidden.double().masked_fill_(~valid[..., None], 0).sum(1)
    return (total / counts).float()


def _padded(states: Tensor, longest: int, room: int = 0, behind: Sequence[Tensor] = ()) -> Tensor:
    """Keys or values (N, H, S, D) in whole `LANES`, with room in front and others below, (N + behind, H, R + S, D)."""
    rows, heads, _, dim = states.shape
    end = room + longest
    kept = states.new_empty(rows + len(behind), heads, room + whole_lanes(longest), dim)
    kept[:rows, :, room:end] = states[:, :, :longest]
    kept[:, :, :room] = 0  # whatever lay there might be NaN, and a masked NaN is still NaN
    kept[:rows, :, end:] = 0
    for row, other in enumerate(behind, start=rows):
        stop = room + other.shape[1]
        kept[row, :, room:stop] = other
        kept[row, :, stop:] = 0
    return kept
