"""The frozen language model, run in two phases and read through its own KV cache.

1. `Backbone.prefill` runs ``instruction + document + separator`` and keeps its keys and values: they do not
   depend on the query.
2. `Backbone.query_values` runs only the query's tokens against them and hands out each layer's value vectors.

A transformers `Cache` of ours does both: attention layers pass every key and value through ``Cache.update``, so
the cache can hand over a stored prefix, see the query's value vectors as they are made, and end the run at the last
layer that is read. Nothing is installed on the model, so concurrent calls are safe. Causal decoders and
BERT-like encoders differ only in mask and positions.

Axes: N documents, H KV heads, S prefix positions, T query tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .errors import BackboneError

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache (Qwen2/3, Llama, Mistral, Gemma 1-3, SmolLM3, OLMo, "
    "Phi, ...) or a BERT-like encoder; hybrid, linear-attention, ALiBi and MLA models do not work."
)

Consumer = Callable[[int, Tensor], None]
"""Receives a layer's index and its value vectors, (N, H, T, D)."""


class _LastLayerReached(Exception):  # noqa: N818 - a signal, not a failure
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

    def select(self, rows: Sequence[int]) -> Prefixes:
        """Some of the prefixes, in the order given."""
        index = torch.tensor(rows, device=self.lengths.device)
        return Prefixes(tuple(k[index] for k in self.keys), tuple(v[index] for v in self.values), self.lengths[index])


class _Probe(Cache):  # type: ignore[misc]  # transformers has no types
    """What all caches of ours share: no state of transformers' own, a length, and an end."""

    def __init__(self, stop: int, length: int = 0) -> None:
        super().__init__(layers=[])
        self.stop, self.length = stop, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


class _Recorder(_Probe):
    """Phase 1: keep what the document's tokens leave behind, up to and including layer ``stop``."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.keys: list[Tensor] = []
        self.recorded_values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(key_states)
        self.recorded_values.append(value_states)
        if layer_idx == self.stop:
            raise _LastLayerReached
        return key_states, value_states


class _Reader(_Probe):
    """Phase 2: hand the prefix to attention and the query's value vectors to the consumer."""

    def __init__(self, prefixes: Prefixes, consume: Consumer, stop: int) -> None:
        super().__init__(stop, prefixes.keys[0].shape[2])
        self.prefixes, self.consume = prefixes, consume

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.consume(layer_idx, value_states)
        if layer_idx == self.stop:
            raise _LastLayerReached
        return (
            torch.cat([self.prefixes.keys[layer_idx], key_states], dim=2),
            torch.cat([self.prefixes.values[layer_idx], value_states], dim=2),
        )


class Backbone:
    """A frozen transformer whose value vectors can be read.

    Args:
        model: A base model without head (``AutoModel``). It is switched to eval mode.
        last_layer: The last layer whose value vectors are read (counted from 0); later ones never run.

    Attributes:
        causal: Whether tokens see only earlier ones (a decoder), found out by running the model.
        num_heads: KV heads, H.
        head_dim: D.

    Raises:
        BackboneError: The model's cache does not hold its value vectors, or it cannot be run in two phases.
    """

    def __init__(self, model: PreTrainedModel, last_layer: int | None = None) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.last_layer = self.num_layers - 1 if last_layer is None else last_layer
        if not 0 < self.last_layer < self.num_layers:
            raise BackboneError(f"Layer {self.last_layer} was asked for; {self.name} has 1..{self.num_layers - 1}.")
        self._attend_bool = self.config._attn_implementation == "sdpa"
        self.causal = True
        try:
            self.causal, self.num_heads, self.head_dim = check_backbone(self)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
            raise BackboneError(
                f"{self.name} failed on a trial run with a KV cache ({type(error).__name__}: {error}). {ADVICE}"
            ) from error

    @property
    def name(self) -> str:
        """Class and source, for messages."""
        return f"{type(self.model).__name__} ({self.model.name_or_path or 'unnamed'})"

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model computes in."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

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
    def weight_sample(self) -> tuple[float, ...]:
        """Entries of the embedding matrix, spread over it: enough to tell one checkpoint from another."""
        table = self.model.get_input_embeddings().weight
        rows = torch.linspace(0, table.shape[0] - 1, 32).long()
        columns = torch.linspace(0, table.shape[1] - 1, 32).long()
        return tuple(round(float(x), 6) for x in table[rows, columns].float())

    def prefill(self, documents: Sequence[Sequence[int]]) -> Prefixes:
        """Run documents' prefixes and keep their keys and values.

        Args:
            documents: Token ids of ``instruction + document + separator``, one list a document.

        Returns:
            Keys and values of the layers below ``last_layer``; the last one's are never attended to.
        """
        lengths = torch.tensor([len(ids) for ids in documents], device=self.device)
        width = int(lengths.max())
        ids = torch.tensor([[*doc, *[0] * (width - len(doc))] for doc in documents], device=self.device)
        recorder = _Recorder(self.last_layer - 1)
        valid = torch.arange(width, device=self.device) < lengths[:, None]
        # Right padding: in a causal model no real token sees it, so the model may build its own (faster) mask.
        mask = None if self.causal else valid.long()
        positions = torch.arange(width, device=self.device).expand(len(documents), -1)
        self._run(recorder, ids, mask, positions)
        return Prefixes(tuple(recorder.keys), tuple(recorder.recorded_values), lengths)

    def query_values(self, queries: Sequence[Sequence[int]], prefixes: Prefixes, consume: Consumer) -> None:
        """Run queries after every prefix and hand over their value vectors, layer by layer.

        Several queries may be packed into one row: each sees the document and itself only. Values are handed
        over once and not kept, so memory does not grow with depth.

        Args:
            queries: Token ids of ``query + suffix``, one list a query; T is their total length.
            prefixes: From `prefill`.
            consume: Called with each layer's index and values (N, H, T, D), ascending up to ``last_layer``.
        """
        lengths = torch.tensor([len(ids) for ids in queries], device=self.device)
        owner = torch.repeat_interleave(torch.arange(len(queries), device=self.device), lengths)  # (T,)
        within = torch.cat([torch.arange(len(ids), device=self.device) for ids in queries])  # (T,)
        ids = torch.tensor([[i for query in queries for i in query]], device=self.device).expand(len(prefixes), -1)
        start = prefixes.lengths[:, None] if self.causal else torch.zeros_like(prefixes.lengths)[:, None]
        positions = start + within  # (N, T)
        reader = _Reader(prefixes, consume, self.last_layer)
        self._run(reader, ids, self._query_mask(prefixes, owner, within, positions), positions)

    def _query_mask(
        self, prefixes: Prefixes, owner: Tensor, within: Tensor, positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Mask (N, 1, T, S + T), one for each kind of attention layer the model has."""
        width = prefixes.keys[0].shape[2]
        columns = torch.arange(width, device=self.device)
        document = (columns < prefixes.lengths[:, None])[:, None].expand(-1, len(owner), -1)  # (N, T, S)
        query = owner[:, None] == owner  # (T, T)
        if self.causal:
            query = query & (within <= within[:, None])
        query = query.expand(len(prefixes), -1, -1)

        full = torch.cat([document, query], dim=2)
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if not self.causal or not window or kinds == {"full_attention"}:
            return self._mask(full)
        near_document = document & (positions[..., None] - columns < window)
        near_query = query & (within[:, None] - within < window)
        sliding = torch.cat([near_document, near_query], dim=2)
        if "full_attention" in kinds:
            return {"full_attention": self._mask(full), "sliding_attention": self._mask(sliding)}
        return self._mask(sliding)

    def _mask(self, allowed: Tensor) -> Tensor:
        """(N, T, S) permissions as the (N, 1, T, S) mask that the model's attention takes."""
        if self._attend_bool:
            return allowed[:, None]
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)[:, None]

    @property
    def _position_offset(self) -> int:
        """RoBERTa-like models count positions from ``padding_idx + 1``."""
        table = getattr(getattr(self.model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        return 0 if padding is None else int(padding) + 1

    def _run(self, cache: Cache, ids: Tensor, mask: Tensor | dict[str, Tensor] | None, positions: Tensor) -> None:
        try:
            self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions + self._position_offset,
                past_key_values=cache,
                use_cache=True,
            )
        except _LastLayerReached:
            return
        raise BackboneError(f"{self.name} ran without passing layer {self.last_layer} through its KV cache. {ADVICE}")


@torch.no_grad()
def check_backbone(backbone: Backbone) -> tuple[bool, int, int]:
    """Run a few tokens and verify what the two phases rely on.

    1. Every layer up to the last one read passes (1, H, T, D) value vectors through the cache.
    2. They are what the layer's value projection put out: slices of a linear map's output.
    3. Document first, query second gives the same value vectors as both at once.

    Returns:
        Whether the model is causal, its KV heads H and head dimension D.

    Raises:
        BackboneError: One of these does not hold.
    """
    vocabulary = backbone.model.get_input_embeddings().weight.shape[0]
    ids = [int(i) for i in torch.linspace(1, vocabulary - 1, 9)]
    cut = 6
    recorder = _Recorder(backbone.last_layer)
    outputs: dict[int, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: _keep(outputs, recorder, output))
        for module in backbone.model.modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    try:
        _plain_run(backbone, recorder, ids)
    finally:
        for hook in hooks:
            hook.remove()
    values = recorder.recorded_values
    shapes = {tuple(v.shape) for v in values}
    if (
        len(values) != backbone.last_layer + 1
        or len(shapes) != 1
        or values[0].ndim != 4
        or len(ids) != values[0].shape[2]
    ):
        raise BackboneError(
            f"{backbone.name} was asked for the value vectors of layers 0..{backbone.last_layer}; its cache received "
            f"{len(values)} layers with shapes {sorted(map(str, shapes))}. {ADVICE}"
        )
    for layer, value in enumerate(values):
        if not _is_slice_of(value[0], outputs.get(layer, [])):
            raise BackboneError(
                f"In layer {layer} of {backbone.name} the cache holds something else than the output of a value "
                f"projection (normalised or compressed values?). {ADVICE}"
            )
    shorter = _Recorder(backbone.last_layer)
    _plain_run(backbone, shorter, ids[:cut])
    backbone.causal = _close(values[-1][:, :, :cut], shorter.recorded_values[-1], backbone.dtype)
    whole = values if backbone.causal else _block_masked_run(backbone, ids, cut)
    read: dict[int, Tensor] = {}
    backbone.query_values([ids[cut:]], backbone.prefill([ids[:cut]]), read.__setitem__)
    for layer, value in enumerate(whole):
        if not _close(value[:, :, cut:], read[layer], backbone.dtype):
            raise BackboneError(
                f"{backbone.name} gives other value vectors in layer {layer} when the document is run before the "
                f"query than when both are run at once, so it cannot be used in two phases. {ADVICE}"
            )
    return backbone.causal, values[0].shape[1], values[0].shape[3]


def _keep(outputs: dict[int, list[Tensor]], recorder: _Recorder, output: object) -> None:
    """Remember a linear map's output under the layer whose cache update comes next."""
    if isinstance(output, Tensor):
        outputs.setdefault(len(recorder.keys), []).append(output)


def _plain_run(backbone: Backbone, cache: _Recorder, ids: list[int]) -> None:
    """All tokens at once, with the model's own mask."""
    tokens = torch.tensor([ids], device=backbone.device)
    backbone._run(cache, tokens, torch.ones_like(tokens), torch.arange(len(ids), device=backbone.device)[None])


def _block_masked_run(backbone: Backbone, ids: list[int], cut: int) -> list[Tensor]:
    """An encoder's reference: one run in which the document's tokens do not see the query's."""
    tokens = torch.tensor([ids], device=backbone.device)
    positions = torch.tensor([[*range(cut), *range(len(ids) - cut)]], device=backbone.device)
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool, device=backbone.device)
    allowed[:cut, cut:] = False
    recorder = _Recorder(backbone.last_layer)
    backbone._run(recorder, tokens, backbone._mask(allowed[None]), positions)
    return recorder.recorded_values


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to rounding: a wrong mask or position changes values by far more."""
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    return bool((a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-6)


def _is_slice_of(value: Tensor, outputs: list[Tensor]) -> bool:
    """Whether each head's (T, D) values stand as D neighbouring columns in some (1, T, columns) output."""
    heads, tokens, width = value.shape
    for output in outputs:
        if output.shape[-1] < heads * width or output.numel() != tokens * output.shape[-1]:
            continue
        windows = output.reshape(tokens, -1).unfold(1, width, 1)  # (T, offsets, D)
        if all(bool((windows == head[:, None]).all(-1).all(0).any()) for head in value):
            return True
    return False
