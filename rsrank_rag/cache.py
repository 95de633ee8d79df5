"""The transformers KV cache as a probe: record what documents leave behind, read what queries make of it.

Attention layers pass every key and value vector through ``Cache.update`` before they attend. A cache of ours can thus
keep a document's, hand a stored prefix to attention, show each value vector of the query to whoever reads it, and end
the run at the last layer that is read. Nothing is installed on the model, so concurrent calls are safe.

Axes: N documents, H KV heads, S prefix positions, T query tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

Consumer = Callable[[int, Tensor], None]
"""Receives a layer's index and its value vectors, (N, H, T, D)."""


class LastLayerReached(Exception):  # noqa: N818 - a signal, not a failure
    """Ends a forward pass whose remaining layers nobody reads."""


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of document prefixes, right-padded to a common length.

    Attributes:
        keys: Per layer, (N, H, S, D). Rotary positions are already in them.
        values: Per layer, (N, H, S, D).
        lengths: Valid positions of each prefix, (N,).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)


class Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """What all caches of ours share: no state of transformers' own, a length, and an end."""

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
    """Phase 1: keep what the document's tokens leave behind, up to and including layer ``stop``."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.keys: list[Tensor] = []
        self.recorded_values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values, (N, H, S, D)."""
        self.keys.append(key_states)
        self.recorded_values.append(value_states)
        if layer_idx == self.stop:
            raise LastLayerReached
        return key_states, value_states


class Reader(Probe):
    """Phase 2: hand the prefix to attention and the query's value vectors (or keys) to the consumer."""

    def __init__(self, prefixes: Prefixes, consume: Consumer, stop: int, *, keys: bool = False) -> None:
        super().__init__(stop, prefixes.keys[0].shape[2])
        self.prefixes, self.consume, self.show_keys = prefixes, consume, keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Show the query's values to the consumer; give attention the prefix followed by them."""
        self.consume(layer_idx, key_states if self.show_keys else value_states)
        if layer_idx == self.stop:
            raise LastLayerReached
        return (
            torch.cat([self.prefixes.keys[layer_idx], key_states], dim=2),
            torch.cat([self.prefixes.values[layer_idx], value_states], dim=2),
        )
