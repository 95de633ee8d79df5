"""What scoring needs of a frozen language model, on torch or on ONNX Runtime.

1. `LanguageModel.prefill` runs ``instruction + document + separator`` and records keys and values.
   They do not depend on the query.
2. `LanguageModel.query_values` runs the queries' tokens after these prefixes, and shows each
   layer's value vectors.

Axes: N rows, Q queries, H KV heads, T query tokens, D head dimension, C hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..method.batches import Ids
from ..method.formula import Array, Weights, to_numpy
from ..method.prefix import Prefix, Prefixes, Show

# Null prefixes that are remembered: one for each template in use.
NULL_PREFIXES = 32

# Tokens of a fixed text, whose value vectors identify the weights.
TOKENS = 9

# Entries of the value vectors that are taken.
ENTRIES = 64


class LanguageModel(ABC):
    """A frozen transformer whose value vectors can be read in two phases.

    Attributes:
        name: Its class or kind, and where it came from.
        device: Where it runs.
        dtype: The dtype of keys and values, of torch or of numpy.
        num_heads: H.
        head_dim: D.
        hidden_size: C.
        max_length: Positions: of the whole sequence in a decoder, of each of its two parts in an
            encoder.
        last_layer: The last layer whose value vectors are read (from 0).
        fusion_layer: The first layer in which queries see documents. Above 0, documents run up to
            there only: what enters that layer gives the keys and values of all layers above.
        similarity_window: Positions of a similarity window; None for the whole document only.
        attention_window: Below the fusion layer, a document's token attends to the first token and
            to tokens at most half of so many positions away; None for all.
        documents_in_int8: Whether documents run in 8 bits.
        uses_query_slots: Whether queries are written into slots in front of the prefixes.
        loaded_layers: Layers in memory or in its files, as `save` writes them.
        sample: Entries of the value vectors of the last read layer on fixed tokens. They depend on
            every weight below, so that they identify a checkpoint.
        graphs: Graphs for ONNX Runtime, by the names of their files; empty on torch.
        identity: What prefixes depend on, besides files, template and layers.
        inference: A context manager for runs without gradients.
        reach: Of layers in which a token's value vector depends only on so many positions before
            it: this number. Other layers have no limit.
    """

    name: str
    device: Any
    dtype: Any
    num_heads: int
    head_dim: int
    hidden_size: int
    max_length: int
    last_layer: int
    fusion_layer: int
    similarity_window: int | None = None
    attention_window: int | None = None
    documents_in_int8 = False
    uses_query_slots = True
    loaded_layers: int
    sample: tuple[float, ...]
    graphs: Mapping[str, bytes] = MappingProxyType({})
    identity: dict[str, object]
    inference: Callable[[], AbstractContextManager[object]] = nullcontext
    reach: Mapping[int, int] = MappingProxyType({})

    @abstractmethod
    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write the model and its tokenizer into a new folder.

        Args:
            folder: Where to.
            tokenizer: The tokenizer that was loaded with the model.
        """

    @abstractmethod
    def prefill(self, documents: Sequence[Ids]) -> list[Prefix]:
        """Run documents, and record keys and values of ``fusion_layer`` to ``last_layer`` - 1.

        In ``last_layer`` only the queries' value vectors are read, so the run ends below it.

        Args:
            documents: Token ids of ``instruction + document + separator``.
        """

    @abstractmethod
    def query_values(
        self,
        queries: Sequence[Ids],
        prefixes: Prefixes,
        show: Show,
        query_of_row: Sequence[int] | None = None,
    ) -> Array:
        """Run queries after prefixes and show their value vectors, layer by layer.

        Values are not kept, so that memory does not grow with depth.

        Args:
            queries: Token ids. A shorter query is padded on its right; T is the longest's length.
            prefixes: Prefixes from `prefill`, joined with at least T query slots.
            show: Called with each layer's index and values (N, H, T, D), from the fusion layer to
                ``last_layer``.
            query_of_row: For each prefix, the number of its query; None if there is only one.

        Returns:
            The mean of what enters the fusion layer of each query alone, (Q, C); empty without a
            fusion layer.

        Raises:
            ValueError: The prefixes have too few query slots.
        """

    @cached_property
    def null_prefix(self) -> Callable[[Ids], Prefix]:
        """A function from token ids (S,), the template without a document, to their prefix.

        A prefix is run once, and the last `NULL_PREFIXES` are remembered.
        """
        return lru_cache(NULL_PREFIXES)(self._null_prefix)

    def _null_prefix(self, ids: Ids) -> Prefix:
        return self.prefill([ids])[0]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a prefix for each token of its document, in the model's dtype."""
        layers = self.last_layer - self.fusion_layer
        return 2 * layers * self.num_heads * self.head_dim * int(self.dtype.itemsize)

    def on_device(self, weights: Weights) -> Weights:
        """B on the device. The caller may go on with training the argument."""
        return weights


def trial_ids(vocabulary: int) -> Ids:
    """Token ids that lie evenly in a vocabulary of this size."""
    return tuple(_spread(1, vocabulary - 1, TOKENS))


def sample_of(values: Array) -> tuple[float, ...]:
    """Entries of the last token's value vectors, of values (H, T, D)."""
    last = to_numpy(values)[:, -1].astype(np.float64).flatten()
    places = _spread(0, len(last) - 1, ENTRIES)
    return tuple(round(entry, 6) for entry in last[places].tolist())


def _spread(first: int, last: int, count: int) -> Sequence[int]:
    """Whole numbers at even distances, rounded down as float32 and `torch.linspace` round them."""
    numbers = np.arange(count, dtype=np.float32)
    step = np.float32(last - first) / np.float32(count - 1)
    from_first = first + step * numbers
    from_last = last - step * numbers[::-1]
    places: list[int] = np.where(numbers < count // 2, from_first, from_last).astype(int).tolist()
    return places
