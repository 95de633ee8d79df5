"""A frozen language model on torch, run in two phases.

Causal decoders and BERT-like encoders differ only in mask and positions. With a fusion layer, which
is not in the paper, queries see documents only from that layer on; below it, each runs alone.

Axes: N rows, Q queries, H KV heads, S prefix positions, R query slots, T query tokens, D head
dimension, C hidden size.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ...errors import BackboneError
from ...method.batches import Ids
from ...method.formula import Weights, pooled
from ...method.prefix import Prefix, Prefixes, Show, attention_band, padded_length
from ..base import LanguageModel
from .probe import Entrance, Probe, Reader, Recorder, StopForward
from .quiet import quiet_products, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The process that imported this module.
_PROCESS = os.getpid()

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache and rotary positions (Qwen2/3, "
    "Llama, Mistral, Gemma 1-3, SmolLM3, OLMo, Phi, ...) or a BERT-like encoder; hybrid, "
    "linear-attention, ALiBi and MLA models do not work."
)


@dataclass(eq=False)
class Backbone(LanguageModel):
    """A frozen transformer whose value vectors can be read; `backends.torch.check` makes one.

    Attributes:
        model: A base model without head (``AutoModel``), in eval mode.
        last_layer: The last layer whose value vectors are read. Later layers never run, nor need be
            loaded.
        num_layers: Layers of the checkpoint, of which the model may hold only the first ones.
        fusion_layer: Above 0, the model's runs must be able to end or begin there, see
            `backends.torch.fusion`.
        similarity_window: As in `LanguageModel`.
        attention_window: As in `LanguageModel`.
        causal: Whether tokens see only earlier ones (a decoder).
        num_heads: H.
        head_dim: D.
        sample: As in `LanguageModel`.
        pads_keys: Whether attention can get keys padded to a multiple of 32.
        reader: The cache that reads queries.
        identity: As in `LanguageModel`.
    """

    model: PreTrainedModel
    last_layer: int
    num_layers: int
    fusion_layer: int = 0
    similarity_window: int | None = None
    attention_window: int | None = None
    causal: bool = True
    num_heads: int = 1
    head_dim: int = 1
    sample: tuple[float, ...] = ()
    pads_keys: bool = False
    reader: type[Reader] = Reader
    identity: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"{type(self.model).__name__} ({self.model.name_or_path or 'unnamed'})"
        self.device: torch.device = next(self.model.parameters()).device
        self.dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        self.config = self.model.config.get_text_config()
        self.loaded_layers: int = self.config.num_hidden_layers
        self.hidden_size = int(self.config.hidden_size)
        self.max_length = self._positions()
        self.reach = self._reach()
        self._bool_masks = "sdpa" in self.config._attn_implementation
        # Releases of transformers before 5.24 call the argument ``past_key_values``.
        arguments = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @property
    def bits(self) -> Literal[4, 8, 16]:
        """Bits of most weights: 4 or 8 where bitsandbytes quantised them, else 16 (also for 32)."""
        if getattr(self.model, "is_loaded_in_4bit", False):
            return 4
        return 8 if getattr(self.model, "is_loaded_in_8bit", False) else 16

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Around runs without gradients."""
        if os.getpid() != _PROCESS:
            # Torch's other threads do not survive a fork, and torch would wait for them for ever.
            torch.set_num_threads(1)
        quiet = quiet_products() if self.bits == 8 else nullcontext()
        with torch.inference_mode(), quiet:
            yield

    def on_device(self, weights: Weights) -> Weights:
        """See `LanguageModel.on_device`."""
        arrays = {}
        for name, array in weights.state_dict().items():
            arrays[name] = torch.asarray(array, device=self.device, copy=True)
        return Weights(layers=weights.layers, **arrays)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """See `LanguageModel.save`. Layers that were not loaded are not written."""
        with quiet_transformers():
            self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _positions(self) -> int:
        """The model's positions, see `LanguageModel.max_length`."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond this, the longest sequence of a batch changes the frequencies of all.
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
        return limit if self.causal else limit - self._position_offset

    def prefill(self, documents: Sequence[Ids]) -> list[Prefix]:
        """See `LanguageModel.prefill`."""
        recorder, inputs = self._alone(documents, Recorder)
        with self.ended_by(recorder):
            self.model(**inputs)
        return recorder.prefixes()

    def _alone(
        self, texts: Sequence[Ids], kind: type[Recorder]
    ) -> tuple[Recorder, dict[str, object]]:
        """The cache of a run in which each text sees itself only, and the model's arguments."""
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        # Transformers makes no causal mask for a single token, and the token would see padded keys.
        pads_keys = self.pads_keys and longest > 1
        mask = None
        # In a decoder, no token sees the padding on its right, and the model's own mask is faster.
        if not self.causal:
            key_count = padded_length(longest) if pads_keys else longest
            keys = torch.arange(key_count, device=self.device)
            seen = (keys < self._column(lengths))[:, None].expand(-1, longest, -1)
            # Queries, whose cache is an `Entrance`, attend to all of their tokens.
            if kind is Recorder and self.attention_window is not None:
                near = attention_band(longest, key_count, self.attention_window)
                seen = seen & torch.from_numpy(near).to(self.device)
            mask = self.mask(seen)
        recorder = kind(
            self.last_layer - 1,
            lengths,
            fusion=self.fusion_layer,
            pads_keys=pads_keys,
            window=self.similarity_window,
        )
        positions = torch.arange(longest, device=self.device).expand(len(texts), -1)
        return recorder, self.inputs(recorder, self._padded(texts), mask, positions)

    def query_values(
        self,
        queries: Sequence[Ids],
        prefixes: Prefixes,
        show: Show,
        query_of_row: Sequence[int] | None = None,
    ) -> Tensor:
        """See `LanguageModel.query_values`."""
        lengths = [len(query) for query in queries]
        longest = max(lengths)
        if longest > prefixes.query_slots:
            raise ValueError(
                f"The prefixes have {prefixes.query_slots} query slots for {longest} query tokens."
            )
        index = torch.tensor(query_of_row or [0] * len(prefixes), device=self.device)
        ids = self._padded(queries)[index]
        positions = torch.arange(longest, device=self.device)
        valid = positions < self._column(lengths)[index]  # (N, T)
        if self.causal:
            positions = positions + self._column(prefixes.lengths)
        # Padding stays at the first position, because it might pass the model's last one.
        positions = positions * valid
        mask = self._query_mask(prefixes, valid, positions)
        reader = self.reader(self.last_layer, prefixes, show)
        embedded = torch.empty(0)
        if self.fusion_layer:
            entering = self._entering(queries)
            reader.entering = entering[index]
            embedded = torch.cat(pooled(entering, lengths))
        with self.ended_by(reader):
            self.model(**self.inputs(reader, ids, mask, positions))
        return embedded

    def _entering(self, queries: Sequence[Ids]) -> Tensor:
        """What enters the fusion layer of each query alone, (Q, T, C)."""
        entrance, inputs = self._alone(queries, Entrance)
        with self.ended_by(entrance):
            self.model(**inputs)
        assert entrance.entering is not None
        return entrance.entering

    def _query_mask(
        self, prefixes: Prefixes, valid: Tensor, positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Mask (N, 1, T, R + S), one for each kind of attention layer the model has."""
        width = valid.shape[1]
        slots = prefixes.query_slots
        lengths = self._column(prefixes.lengths)
        keys = torch.arange(prefixes.keys[0].shape[2], device=self.device)
        document = (keys >= slots) & (keys - slots < lengths)  # (N, R + S)
        query = pad(valid, (0, len(keys) - width))[:, None].expand(-1, width, -1)
        if self.causal:
            query = query & (keys <= keys[:width, None])
        allowed = query | document[:, None]
        full = self.mask(allowed)
        if not self.causal or not any(self._sliding):
            return full
        key_positions = torch.where(keys < slots, lengths + keys, keys - slots)
        near = positions[..., None] - key_positions[:, None] < self.config.sliding_window
        sliding = self.mask(allowed & near)
        if all(self._sliding):
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    @cached_property
    def _sliding(self) -> list[bool]:
        """Whether each loaded layer sees a window of positions only."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        kinds = (kinds or ["sliding_attention"] * self.loaded_layers)[: self.loaded_layers]
        return [bool(window) and kind == "sliding_attention" for kind in kinds]

    def _reach(self) -> dict[int, int]:
        """See `LanguageModel.reach`.

        Each layer from the fusion layer to the one before adds its window, less one position.
        """
        reach: dict[int, int] = {}
        for layer in range(self.fusion_layer + 1, self.last_layer + 1):
            passed = self._sliding[self.fusion_layer : layer]
            if self.causal and all(passed):
                reach[layer] = len(passed) * (int(self.config.sliding_window) - 1)
        return reach

    def _column(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths, device=self.device)[:, None]

    def _padded(self, rows: Sequence[Ids]) -> Tensor:
        """Token ids with zeros after shorter rows, (N, T)."""
        tokens = [torch.tensor(row) for row in rows]
        return pad_sequence(tokens, batch_first=True).to(self.device)

    def mask(self, allowed: Tensor) -> Tensor:
        """(N, T, S) permissions as the (N, 1, T, S) mask that the model's attention takes."""
        if self._bool_masks:
            return allowed[:, None]
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)[:, None]

    @property
    def _position_offset(self) -> int:
        """RoBERTa-like models count positions from ``padding_idx + 1``."""
        table = getattr(getattr(self.model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        return 0 if padding is None else int(padding) + 1

    def inputs(
        self, cache: Probe, ids: Tensor, mask: Tensor | dict[str, Tensor] | None, positions: Tensor
    ) -> dict[str, Any]:
        """The model's arguments: ids (N, T), a mask, and positions (N, T) counted from 0."""
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions + self._position_offset,
            self._cache_argument: cache,
            "use_cache": True,
        }

    @contextmanager
    def ended_by(self, cache: Probe) -> Iterator[None]:
        """Around a forward pass that the cache ends.

        Raises:
            BackboneError: The cache's last layer never passed through it.
        """
        try:
            yield
        except StopForward:
            return
        raise BackboneError(
            f"{self.name} ran without passing layer {cache.stop} through its KV cache. {ADVICE}"
        )
