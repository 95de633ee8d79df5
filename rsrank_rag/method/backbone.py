"""The frozen language model, run in two phases.

1. `Backbone.prefill` runs ``instruction + document + separator`` and records keys and values. They
   do not depend on the query.
2. `Backbone.query_values` runs the queries' tokens after these prefixes, and shows each layer's
   value vectors.

Causal decoders and BERT-like encoders differ only in mask and positions. With a fusion layer, which
is not in the paper, queries see documents only from that layer on; below it, each runs alone.

Axes: N rows, Q queries, H KV heads, S prefix positions, R query slots, T query tokens, D head
dimension, C hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import BackboneError, InputError
from .concurrent_batches import Ids, concurrent_count, torch_threads, use_one_thread_after_fork
from .prefix import Prefix, Prefixes, Show, padded_length
from .probe import Entrance, Probe, Reader, Recorder, StopForward, pooled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .formula import Weights
    from .projection import Projection

# Any run may be padded to so many tokens: measured on `mini`, it costs no time that can be seen.
# More padding is only for ``deterministic=True``.
CHEAP_PADDING = 64

# Null prefixes that a backbone remembers: one for each instruction in use.
NULL_PREFIXES = 32

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache and rotary positions (Qwen2/3, "
    "Llama, Mistral, Gemma 1-3, SmolLM3, OLMo, Phi, ...) or a BERT-like encoder; hybrid, "
    "linear-attention, ALiBi and MLA models do not work."
)


@dataclass(frozen=True)
class Findings:
    """What a trial run of the model measured; see `language_model.check`.

    Attributes:
        causal: Whether tokens see only earlier ones (a decoder).
        num_heads: H.
        head_dim: D.
        sample: Entries of the last read layer's value vectors on fixed tokens. They depend on every
            weight below, so that they identify a checkpoint.
        pads_keys: Whether attention can get keys padded to a multiple of 32.
        batch_invariant_tokens: A run of so many tokens gives each token the same numbers, however
            many others there are; None if that is not known.
    """

    causal: bool
    num_heads: int
    head_dim: int
    sample: tuple[float, ...]
    pads_keys: bool = False
    batch_invariant_tokens: int | None = None


@dataclass(eq=False)
class Backbone:
    """A frozen transformer whose value vectors can be read; `language_model.check` makes one.

    Attributes:
        model: A base model without head (``AutoModel``), in eval mode.
        findings: What is known of the model.
        last_layer: The last layer whose value vectors are read (from 0). Later layers never run,
            nor need be loaded.
        num_layers: Layers of the checkpoint, of which the model may hold only the first ones.
        fusion_layer: The first layer in which queries see documents. Above 0, the model's runs must
            be able to end or begin there, see `language_model.fusion`.
        documents_stay: Whether documents run up to there only: what enters that layer gives the
            keys and values of all layers above.
        document_model: The same model in int8, through which documents run.
        is_deterministic: Whether runs are padded so that a token's numbers do not depend on the
            number of others.
        reader: The cache that reads queries.
        identity: What prefixes depend on, where that is not computed from the model.
    """

    model: PreTrainedModel
    findings: Findings
    last_layer: int
    num_layers: int
    fusion_layer: int = 0
    documents_stay: bool = False
    document_model: PreTrainedModel | None = None
    is_deterministic: bool = False
    reader: type[Reader] = Reader
    identity: Mapping[str, object] | None = None
    _null_prefixes: dict[Ids, Prefix] = field(default_factory=dict, init=False, repr=False)
    _last_entering: tuple[object, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = f"{type(self.model).__name__} ({self.model.name_or_path or 'unnamed'})"
        self.device: torch.device = next(self.model.parameters()).device
        self.dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        self.config = self.model.config.get_text_config()
        self.loaded_layers: int = self.config.num_hidden_layers
        self.causal = self.findings.causal
        self.num_heads = self.findings.num_heads
        self.head_dim = self.findings.head_dim
        self._bool_masks = "sdpa" in self.config._attn_implementation

    def deterministic(self) -> Backbone:
        """The same model, whose runs are padded to the batch-invariant minimum.

        Raises:
            InputError: The minimum is not known for this model on this device.
        """
        if self.findings.batch_invariant_tokens is None:
            raise InputError(
                f"deterministic=True cannot be promised for {self.name} on {self.device}: the "
                "number of tokens from which results stay the same is known only for float32 and "
                "bfloat16 weights of moderate size on a CPU. Leave it out."
            )
        return replace(self, is_deterministic=True)

    @property
    def hidden_size(self) -> int:
        """C."""
        return int(self.config.hidden_size)

    @property
    def concurrent(self) -> int:
        """How many batches may run at once."""
        # In deterministic mode, the number of threads of a batch must not depend on the others.
        if self.device.type != "cpu" or self.is_deterministic:
            return 1
        return concurrent_count(torch_threads())

    def slots_for(self, longest: int) -> int:
        """Query slots for queries of at most so many tokens."""
        return longest

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Around runs without gradients."""
        use_one_thread_after_fork()
        with torch.inference_mode():
            yield

    def frozen(self, projection: Any) -> Projection | Weights:
        """B on the device, without gradients: a copy, unless it is so already.

        The caller may be training the original.
        """
        frozen: Projection = projection
        parameters = frozen.parameters()
        if any(part.requires_grad or part.device != self.device for part in parameters):
            frozen = copy.deepcopy(frozen).to(self.device).requires_grad_(False)
        return frozen

    @property
    def _minimum_tokens(self) -> int:
        """Tokens to which a run is padded."""
        invariant = self.findings.batch_invariant_tokens or 1
        return invariant if self.is_deterministic or invariant <= CHEAP_PADDING else 1

    @property
    def max_length(self) -> int:
        """Positions: of the whole sequence in a decoder, of each of its two parts in an encoder."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond this, the longest sequence of a batch changes the frequencies of all.
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
        return limit if self.causal else limit - self._position_offset

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a prefix for each token of its document, in the model's dtype."""
        layers = self.last_layer - self.fusion_layer
        return 2 * layers * self.num_heads * self.head_dim * self.dtype.itemsize

    def prefill(
        self,
        documents: Sequence[Ids],
        query_slots: int = 0,
        extra_rows: Sequence[Prefix] = (),
        *,
        exact: bool = False,
    ) -> Prefixes:
        """Run documents, and record keys and values of the layers below ``last_layer``.

        Args:
            documents: Token ids of ``instruction + document + separator``.
            query_slots: Tokens of the longest query that will run after them.
            extra_rows: Prefixes of an earlier run to add below them.
            exact: Run the model itself, not `document_model`.
        """
        recorder, inputs = self._alone(documents, Recorder, query_slots, extra_rows)
        model = self.model if exact or self.document_model is None else self.document_model
        with self.ended_by(recorder):
            model(**inputs)
        return recorder.prefixes()

    def null_prefix(self, ids: Ids) -> Prefix:
        """The prefix of the template without a document, token ids ``ids``. It is run once.

        It is run exactly: its rounding would move all scores alike.
        """
        prefix = self._null_prefixes.get(ids)
        if prefix is None:
            prefix = self.prefill([ids], exact=True).row(0)
            if len(self._null_prefixes) >= NULL_PREFIXES:
                self._null_prefixes.clear()
            self._null_prefixes[ids] = prefix
        return prefix

    def _alone(
        self,
        texts: Sequence[Ids],
        kind: type[Recorder],
        query_slots: int = 0,
        extra_rows: Sequence[Prefix] = (),
    ) -> tuple[Recorder, dict[str, object]]:
        """The cache of a run in which each text sees itself only, and the model's arguments."""
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        width = self._width(len(texts), longest)
        columns = torch.arange(width, device=self.device).clamp(max=longest - 1)
        # The causal mask of a single token is none at all, so that it would see padded keys.
        pads_keys = self.findings.pads_keys and longest > 1 and not torch.is_grad_enabled()
        mask = None
        # In a decoder, no token sees the padding on its right, and the model's own mask is faster.
        if not self.causal:
            key_count = padded_length(longest) if pads_keys else width
            keys = torch.arange(key_count, device=self.device)
            mask = self.mask((keys < self._column(lengths))[:, None].expand(-1, width, -1))
        recorder = kind(
            self.last_layer - 1,
            lengths,
            query_slots,
            extra_rows,
            fusion=self.fusion_layer,
            pads_keys=pads_keys,
            stay=self.documents_stay,
        )
        ids = self._padded(texts, width)
        return recorder, self.inputs(recorder, ids, mask, columns.expand(len(ids), -1))

    def query_values(
        self,
        queries: Sequence[Ids],
        prefixes: Prefixes,
        show: Show,
        query_of_row: Sequence[int] | None = None,
    ) -> Tensor:
        """Run queries after prefixes and show their value vectors, layer by layer.

        Values are not kept, so that memory does not grow with depth.

        Args:
            queries: Token ids. A shorter query is padded on its right; T is the longest's length.
            prefixes: From `prefill`, with at least T query slots.
            show: Called with each layer's index and values (N, H, T, D), from the fusion layer to
                ``last_layer``.
            query_of_row: For each prefix, the number of its query; None if there is only one.

        Returns:
            `Prefix.pooled` of each query, (Q, C).

        Raises:
            ValueError: The prefixes have too few query slots.
        """
        longest = max(len(query) for query in queries)
        if longest > prefixes.query_slots:
            raise ValueError(
                f"The prefixes have {prefixes.query_slots} query slots for {longest} query tokens."
            )
        index = torch.tensor(query_of_row or [0] * len(prefixes), device=self.device)
        ids = self._padded(queries, self._width(len(prefixes), longest))[index]
        within = torch.arange(ids.shape[1], device=self.device)
        lengths = [len(query) for query in queries]
        valid = within < self._column(lengths)[index]  # (N, T)
        start = torch.zeros_like(index)[:, None]
        if self.causal:
            start = self._column(prefixes.lengths)
        # Padding stays at the first position, because it might pass the model's last one.
        positions = (start + within) * valid
        mask = self._query_mask(prefixes, valid, positions)
        reader = self.reader(self.last_layer, prefixes, show)
        embedded = torch.empty(0)
        if self.fusion_layer:
            entering = self._entering(tuple(queries))
            reader.entering = entering[index, : ids.shape[1]]
            embedded = pooled(entering, lengths)
        with self.ended_by(reader):
            self.model(**self.inputs(reader, ids, mask, positions))
        return embedded

    def _entering(self, queries: tuple[Ids, ...]) -> Tensor:
        """What enters the fusion layer of each query alone, (Q, T, C).

        The batches of one call have the same queries, so the last result is remembered.
        """
        key = (queries, torch.is_grad_enabled())
        last = self._last_entering
        if last is not None and last[0] == key:
            return last[1]
        entrance, inputs = self._alone(queries, Entrance)
        with self.ended_by(entrance):
            self.model(**inputs)
        assert entrance.entering is not None
        self._last_entering = (key, entrance.entering)
        return entrance.entering

    def _query_mask(
        self, prefixes: Prefixes, valid: Tensor, positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Mask (N, 1, T, R + S), one for each kind of attention layer the model has."""
        rows, width = valid.shape
        slots = prefixes.query_slots
        columns = torch.arange(prefixes.keys[0].shape[2] - slots, device=self.device)
        within = torch.arange(width, device=self.device)
        document = columns < self._column(prefixes.lengths)
        document = document[:, None].expand(-1, width, -1)  # (N, T, S)
        query = valid[:, None].expand(-1, width, -1)  # (N, T, T)
        if self.causal:
            query = query & (within <= within[:, None])
        # Tokens beyond the slots only pad the run.
        query = query[:, :, :slots]
        free = query.new_zeros(rows, width, slots - query.shape[2])
        full = torch.cat([query, free, document], dim=2)
        window = self.config.sliding_window if any(self._windows) else None
        if not self.causal or window is None:
            return self.mask(full)
        near_document = document & (positions[..., None] - columns < window)
        near_query = query & (within[:, None] - within < window)[:, :slots]
        sliding = self.mask(torch.cat([near_query, free, near_document], dim=2))
        if all(self._windows):
            return sliding
        return {"full_attention": self.mask(full), "sliding_attention": sliding}

    @cached_property
    def _windows(self) -> list[int | None]:
        """How many positions the tokens of each loaded layer see; None for all."""
        window = getattr(self.config, "sliding_window", None) or None
        every = ["sliding_attention"] * self.loaded_layers
        kinds = getattr(self.config, "layer_types", None) or every
        sliding = [kind == "sliding_attention" for kind in kinds[: self.loaded_layers]]
        return [window if slides else None for slides in sliding]

    def reach(self, layer: int) -> int | None:
        """How many positions back a token's values at a layer can know of a document.

        None if there is no limit. Values have passed all layers from the fusion layer on, each of
        which carries as far as its window.
        """
        windows = self._windows[self.fusion_layer : layer]
        if not self.causal or not all(windows):
            return None
        return sum(window - 1 for window in windows if window)

    def _column(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths, device=self.device)[:, None]

    def _padded(self, rows: Sequence[Ids], width: int) -> Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)

    def _width(self, rows: int, longest: int) -> int:
        """Tokens of each row, padded so that the run has the batch-invariant minimum.

        In deterministic mode, the width is a multiple of 32 as the number of keys is. Attention
        kernels take queries in blocks, and round differently by the size of the last one: in int8,
        a score moved by 0.016 with the width.
        """
        if torch.is_grad_enabled():
            return longest
        if self.is_deterministic:
            longest = padded_length(longest)
        return max(longest, -(-self._minimum_tokens // rows))

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
            "past_key_values": cache,
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
