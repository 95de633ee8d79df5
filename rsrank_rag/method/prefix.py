"""Prefixes: what documents leave in the model's layers.

Axes: N rows, L layers, H KV heads, S prefix positions, R query slots, D head dimension, C hidden
size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from .formula import Array, namespace

Show = Callable[[int, Array], object]
"""Receives a layer's index and its value vectors, (N, H, T, D)."""

# Attention gets keys in multiples of this number. A kernel sums in vectors of up to 32 numbers. If
# the last vector were cut off, the sum would be taken in another order, and a score would depend on
# the length of a document's neighbours in the batch.
KEY_MULTIPLE = 32


def padded_length(length: int) -> int:
    """A length rounded up to a multiple of `KEY_MULTIPLE`.

    >>> padded_length(1), padded_length(32), padded_length(33)
    (32, 32, 64)
    """
    return -(-length // KEY_MULTIPLE) * KEY_MULTIPLE


def attention_band(tokens: int, keys: int, window: int) -> NDArray[np.bool_]:
    """Which keys the tokens of a document attend to, (tokens, keys): near ones, and the first one.

    Args:
        tokens: Tokens of the longest document.
        keys: Keys, at least as many as tokens.
        window: `LanguageModel.attention_window`. Keys at most half of so many positions away are
            near.

    >>> attention_band(4, 4, 2).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    places = np.arange(keys)
    near = np.abs(places[:tokens, None] - places) <= window // 2
    seen: NDArray[np.bool_] = near | (places == 0)
    return seen


@dataclass(frozen=True)
class Prefix:
    """Keys and values of one document.

    Attributes:
        states: Keys, then values, of the layers in which queries see the document,
            (2, L, H, S, D). Keys have their rotary positions.
        pooled: What enters the fusion layer, `pooled` by similarity window, (W, C) fp32; empty
            without a fusion layer.
    """

    states: Array
    pooled: Array

    def __len__(self) -> int:
        return int(self.states.shape[3])

    @classmethod
    def of_run(
        cls,
        keys: Sequence[Array],
        values: Sequence[Array],
        lengths: Sequence[int],
        pooled: Sequence[Array],
    ) -> list[Self]:
        """Prefixes of N documents that ran in one batch. They are copies, without padding.

        Args:
            keys: Of each layer, (N, H, at least S, D).
            values: As the keys.
            lengths: The number of valid positions of each document.
            pooled: `Prefix.pooled` of each.
        """
        xp = namespace(keys[0])
        prefixes = []
        for row, length in enumerate(lengths):
            layers = [layer[row, :, :length] for layer in (*keys, *values)]
            states = xp.stack(layers).reshape(2, len(keys), *layers[0].shape)
            prefixes.append(cls(states, xp.stack([pooled[row]])[0]))
        return prefixes


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of N prefixes, with query slots in front of each.

    A query's keys and values are written into the slots, so that attention finds both in one piece
    without a copy of the prefix. The slots are in front so that their place does not depend on the
    longest prefix of the batch.

    Attributes:
        keys: Of each layer, (N, H, R + S, D).
        values: Of each layer, (N, H, R + S, D).
        lengths: The number of valid positions of each prefix.
        query_slots: R.
        pooled: `Prefix.pooled` of each.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    lengths: tuple[int, ...]
    query_slots: int
    pooled: Sequence[Array]

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def join(cls, prefixes: Sequence[Prefix], query_slots: int) -> Self:
        """Join single prefixes into one batch, padded at their ends with zeros.

        Query slots and the longest prefix are rounded up to a multiple of `KEY_MULTIPLE`.
        """
        slots = padded_length(query_slots)
        lengths = tuple(len(prefix) for prefix in prefixes)
        first = prefixes[0].states
        _, layers, heads, _, dim = first.shape
        size = (2, layers, len(prefixes), heads, slots + padded_length(max(lengths)), dim)
        xp = namespace(first)
        states = xp.empty(size, dtype=first.dtype, device=first.device)
        # Fresh memory may hold NaN, and a masked NaN is still NaN.
        states[..., :slots, :] = 0
        for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
            end = slots + length
            states[:, :, row, :, slots:end] = prefix.states
            states[:, :, row, :, end:] = 0
        pooled = [prefix.pooled for prefix in prefixes]
        return cls(tuple(states[0]), tuple(states[1]), lengths, slots, pooled)
