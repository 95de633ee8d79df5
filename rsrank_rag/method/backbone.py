"""The frozen language model, run in two phases.

1. `Backbone.prefill` runs ``instruction + document + separator`` and keeps its keys and values: they do not
   depend on the query.
2. `Backbone.query_values` runs only the queries' tokens against them and hands out each layer's value vectors.

Causal decoders and BERT-like encoders differ only in mask and positions. With a fusion layer (ours, not the paper's),
queries see documents only from it on: below it, each is run once, by itself.

Axes: N rows, Q queries, H KV heads, S prefix positions, R positions of room, T query tokens, D head dimension, C
hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BackboneError, InputError
from .batching import Ids
from .probe import (
    Entrance,
    LastLayerReached,
    Prefix,
    Prefixes,
    Probe,
    Reader,
    Recorder,
    Show,
    pooled,
    whole_lanes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHEAP = 64  # tokens that any run may be filled up to; more only where somebody asked for it

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache and rotary positions (Qwen2/3, Llama, Mistral, Gemma "
    "1-3, SmolLM3, OLMo, Phi, ...) or a BERT-like encoder; hybrid, linear-attention, ALiBi and MLA models do not work."
)


@dataclass(frozen=True)
class Findings:
    """What a trial run of the model found out; see `language_model.check`."""

    causal: bool  # whether tokens see only earlier ones (a decoder)
    num_heads: int
    head_dim: int
    sample: tuple[float, ...]
    """Entries of the last read layer's value vectors on fixed tokens. They depend on every weight below, so they tell
    one checkpoint from another in just what B reads."""
    aligned: bool = False  # whether attention can be given whole `probe.LANES` of keys
    steady: int | None = None
    """A run of so many tokens gives each the same numbers, however many others there are; None if nobody knows."""


class Backbone:
    """A frozen transformer whose value vectors can be read. `language_model.check.open_backbone` makes one.

    Args:
        model: A base model without head (``AutoModel``), in eval mode.
        findings: What is known of it.
        last_layer: The last layer whose value vectors are read (from 0); later ones never run, nor need be loaded.
        num_layers: Layers of the checkpoint, of which the model may hold only the first ones.
        fusion_layer: The first layer in which queries see documents. Above 0, the model's runs must be able to end
            or begin there, see `language_model.fusion`.
        documents_stay: Whether documents run up to there only: what enters gives the keys and values of all layers
            above.

    Attributes:
        for_documents: The same model with coarser numbers, if documents are to run through that.
        fewest_tokens: A run is filled up to so many, see `Findings.steady`.
    """

    reader: type[Reader] = Reader  # reads queries

    def __init__(
        self,
        model: PreTrainedModel,
        findings: Findings,
        *,
        last_layer: int,
        num_layers: int,
        fusion_layer: int = 0,
        documents_stay: bool = False,
    ) -> None:
        self.model, self.findings = model, findings
        self.fusion_layer, self.documents_stay = fusion_layer, documents_stay
        self.for_documents: PreTrainedModel | None = None
        self.name = f"{type(model).__name__} ({model.name_or_path or 'unnamed'})"  # for messages
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.fewest_tokens = findings.steady if findings.steady and findings.steady <= CHEAP else 1
        self.config = model.config.get_text_config()
        self.last_layer, self.num_layers = last_layer, num_layers
        self.loaded_layers: int = self.config.num_hidden_layers
        self.causal, self.num_heads, self.head_dim = (
            findings.causal,
            findings.num_heads,
            findings.head_dim,
        )
        self._entered: tuple[object, Tensor] | None = None
        self._bool_masks = "sdpa" in self.config._attn_implementation

    def deterministic(self) -> Backbone:
        """The same model, run so that what a token gives never depends on how many others share its run.

        Raises InputError where nobody knows how, for this model on this device.
        """
        if self.findings.steady is None:
            raise InputError(
                f"deterministic=True cannot be promised for {self.name} on {self.device}: only for float32 and "
                "bfloat16 weights of moderate size on a CPU is it known from how many tokens on results stay. Leave it "
                "out."
            )
        core = copy.copy(self)
        core.fewest_tokens = self.findings.steady
        return core

    @property
    def max_length(self) -> int:
        """Positions: of the whole sequence in a decoder, of each of its two parts in an encoder."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond this, the longest sequence of a batch changes the frequencies of all: neighbours would matter.
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
        return limit if self.causal else limit - self._position_offset

    @property
    def bytes_per_token(self) -> int:
        """What the prefix of a document takes for each of its tokens, unpacked."""
        return (
            2
            * (self.last_layer - self.fusion_layer)
            * self.num_heads
            * self.head_dim
            * self.dtype.itemsize
        )

    def prefill(
        self,
        documents: Sequence[Ids],
        room: int = 0,
        behind: Sequence[Prefix] = (),
        *,
        exact: bool = False,
    ) -> Prefixes:
        """Run documents' prefixes and keep keys and values of the layers below ``last_layer``, whose own nobody sees.

        Args:
            documents: Token ids of ``instruction + document + separator``, one sequence a document.
            room: Tokens of the longest query that will be run after them.
            behind: Prefixes of an earlier run to put below them.
            exact: Through the model itself, not through `for_documents`.
        """
        recorder, inputs = self._alone(documents, Recorder, room, behind)
        with self.ended_by(recorder):
            (self.model if exact else self.for_documents or self.model)(**inputs)
        return recorder.prefixes()

    def _alone(
        self,
        texts: Sequence[Ids],
        kind: type[Recorder],
        room: int = 0,
        behind: Sequence[Prefix] = (),
    ) -> tuple[Recorder, dict[str, object]]:
        """A run of texts, each seeing itself only: its cache, which ends it, and what the model is called with."""
        lengths = list(map(len, texts))
        width, longest = self._width(len(texts), max(lengths)), max(lengths)
        columns = torch.arange(width, device=self.device).clamp(max=longest - 1)
        # A single token's causal mask is none at all: it would see the keys that fill the lanes.
        aligned = self.findings.aligned and longest > 1 and not torch.is_grad_enabled()
        mask = None
        if (
            not self.causal
        ):  # there, no real token sees the padding on its right, and the model's own mask is faster
            keys = torch.arange(whole_lanes(longest) if aligned else width, device=self.device)
            mask = self.mask((keys < self._column(lengths))[:, None].expand(-1, width, -1))
        fusion, stay = self.fusion_layer, self.documents_stay
        recorder = kind(
            self.last_layer - 1, lengths, room, behind, fusion=fusion, aligned=aligned, stay=stay
        )
        ids = self._padded(texts, width)
        return recorder, self.inputs(recorder, ids, mask, columns.expand(len(ids), -1))

    def query_values(
        self,
        queries: Sequence[Ids],
        prefixes: Prefixes,
        show: Show,
        which: Sequence[int] | None = None,
    ) -> Tensor:
        """Run queries after prefixes and hand over their value vectors, layer by layer.

        Values are handed over once and not kept, so memory does not grow with depth.

        Args:
            queries: Token ids. A shorter query is padded on its right; T is the longest's.
            prefixes: From `prefill`, with room for T tokens.
            show: Called with each layer's index and values (N, H, T, D), from the fusion layer up to ``last_layer``.
            which: For each prefix, the number of its query; None where there is one for all.

        Returns:
            What `Prefix.pooled` is of each query, (Q, C).

        Raises:
            ValueError: The prefixes have too little room.
        """
        longest = max(map(len, queries))
        if longest > prefixes.room:
            raise ValueError(
                f"The prefixes have room for {prefixes.room} query tokens, and there are {longest}."
            )
        index = torch.tensor([0] * len(prefixes) if which is None else which, device=self.device)
        ids = self._padded(queries, self._width(len(prefixes), longest))[index]
        within = torch.arange(ids.shape[1], device=self.device)
        valid = within < self._column([len(query) for query in queries])[index]  # (N, T)
        start = self._column(prefixes.lengths) if self.causal else torch.zeros_like(index)[:, None]
        # Padding stays at the first position: the model's last one might be nearer than its end.
        positions = (start + within) * valid
        mask = self._query_mask(prefixes, valid, positions)
        reader, embedded = self.reader(self.last_layer, prefixes, show), torch.empty(0)
        if self.fusion_layer:
            entering = self._entering(tuple(queries))
            reader.entering = entering[index, : ids.shape[1]]
            embedded = pooled(entering, list(map(len, queries)))
        with self.ended_by(reader):
            self.model(**self.inputs(reader, ids, mask, positions))
        return embedded

    def _entering(self, queries: tuple[Ids, ...]) -> Tensor:
        """What enters the fusion layer of each query by itself, (Q, T, C); batches of one call ask for it in turn."""
        found, key = self._entered, (queries, self.fewest_tokens, torch.is_grad_enabled())
        if found is None or found[0] != key:
            entrance, inputs = self._alone(queries, Entrance)
            with self.ended_by(entrance):
                self.model(**inputs)
            assert entrance.entering is not None
            found = self._entered = key, entrance.entering  # at once: threads may share this
        return found[1]

    def _query_mask(
        self, prefixes: Prefixes, valid: Tensor, positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Mask (N, 1, T, R + S), one for each kind of attention layer the model has."""
        rows, width = valid.shape
        columns = torch.arange(prefixes.keys[0].shape[2] - prefixes.room, device=self.device)
        within = torch.arange(width, device=self.device)
        document = (columns < self._column(prefixes.lengths))[:, None].expand(
            -1, width, -1
        )  # (N, T, S)
        query = valid[:, None].expand(-1, width, -1)  # (N, T, T)
        if self.causal:
            query = query & (within <= within[:, None])
        query = query[
            :, :, : prefixes.room
        ]  # what stands behind it fills the run up: nobody sees it
        rest = query.new_zeros(rows, width, prefixes.room - query.shape[2])
        full = torch.cat([query, rest, document], dim=2)
        window = self.config.sliding_window if any(self._windows) else None
        if not self.causal or window is None:
            return self.mask(full)
        near_document = document & (positions[..., None] - columns < window)
        near_query = query & (within[:, None] - within < window)[:, : prefixes.room]
        sliding = self.mask(torch.cat([near_query, rest, near_document], dim=2))
        if all(self._windows):
            return sliding
        return {"full_attention": self.mask(full), "sliding_attention": sliding}

    @cached_property
    def _windows(self) -> list[int | None]:
        """How many positions each loaded layer's tokens see, themselves included; None for all."""
        window = getattr(self.config, "sliding_window", None) or None
        kinds = (
            getattr(self.config, "layer_types", None) or ["sliding_attention"] * self.loaded_layers
        )
        return [
            window if kind == "sliding_attention" else None for kind in kinds[: self.loaded_layers]
        ]

    def reach(self, layer: int) -> int | None:
        """How many positions back a token's values at a layer can know of a document; None if there is no limit.

        They have passed all layers from the fusion layer on, each of which carries as far as its window.
        """
        windows = self._windows[self.fusion_layer : layer]
        return (
            sum(window - 1 for window in windows if window)
            if self.causal and all(windows)
            else None
        )

    def _column(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths, device=self.device)[:, None]

    def _padded(self, rows: Sequence[Ids], width: int) -> Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)

    def _width(self, rows: int, longest: int) -> int:
        """Tokens of each row: more than the longest needs where so few would come out differently than among many."""
        return longest if torch.is_grad_enabled() else max(longest, -(-self.fewest_tokens // rows))

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
    ) -> dict[str, object]:
        """What the model is called with: ids (N, T), a mask as it takes them, positions (N, T) counted from 0."""
        places = positions + self._position_offset
        return dict(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )

    @contextmanager
    def ended_by(self, cache: Probe) -> Iterator[None]:
        """Around a forward pass that the cache has to end; BackboneError if its last layer never passed through it."""
        try:
            yield
        except LastLayerReached:
            return
        raise BackboneError(
            f"{self.name} ran without passing layer {cache.stop} through its KV cache. {ADVICE}"
        )
