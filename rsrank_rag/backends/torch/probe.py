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
from torch.nn.functional import pad
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
        fusion: The fusion layer; nothing is recorded below it. Documents leave this layer, and
            those above it, as they entered it. 0 for none.
        pads_keys: Whether attention gets keys padded to a multiple of 32.
        window: Positions of a similarity window.
    """

    def __init__(
        self,
        stop: int,
        lengths: Sequence[int],
        *,
        fusion: int = 0,
        pads_keys: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(stop)
        self.lengths = tuple(lengths)
        longest = max(lengths)
        self.padding = padded_length(longest) - longest if pads_keys else 0
        self.fusion = fusion
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
        # Copies, also without padding: a slice would keep the output of a fused projection.
        key_states = pad(key_states, (0, 0, 0, self.padding))
        value_states = pad(value_states, (0, 0, 0, self.padding))
        if layer_idx >= self.fusion:
            self.keys.append(key_states)
            self.values.append(value_states)
            if layer_idx == self.stop:
                raise StopForward
            if self.fusion:
                raise SkipLayer
        return key_states, value_states

    def prefixes(self) -> list[Prefix]:
        """The recorded prefixes."""
        return Prefix.of_run(self.keys, self.values, self.lengths, self.pooled)


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
