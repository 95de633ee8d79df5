"""The frozen language model, run in two phases.

1. `Backbone.prefill` runs ``instruction + document + separator`` and keeps its keys and values: they do not
   depend on the query.
2. `Backbone.query_values` runs only the query's tokens against them and hands out each layer's value vectors.

Causal decoders and BERT-like encoders differ only in mask and positions.

Axes: N documents, H KV heads, S prefix positions, T query tokens, D head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import ModuleList

from ..artifact.config import Signal
from ..errors import BackboneError
from ..language_model.attention import NAME, Packing, attending
from ..language_model.check import ADVICE, LARGEST_TABLE, packed_alike, rows_can_leave, try_out
from ..language_model.weights import bits_of, fingerprint
from .batching import is_out_of_memory
from .probe import Consumer, LastLayerReached, Prefixes, Probe, Reader, Recorder, Whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FILLED = 0.9
"""Documents that fill more of a padded batch than this are not packed: the kernels for equal lengths are faster."""

NOT_EARLY = "Load it without early_decisions."

_LETTING_LEAVE: WeakSet[torch.nn.Module] = WeakSet()
"""Models that have the hooks of `Backbone.let_rows_leave`."""


class Backbone:
    """A frozen transformer whose value vectors can be read.

    Args:
        model: A base model without head (``AutoModel``). It is switched to eval mode.
        last_layer: The last layer whose value vectors are read (counted from 0); later ones never run, and need not
            be loaded.
        num_layers: Layers of the checkpoint; None if all are loaded.

    Attributes:
        num_layers: Layers of the checkpoint, L + 1 where B reads all but layer 0.
        loaded_layers: How many of them the model holds.
        causal: Whether tokens see only earlier ones (a decoder), found out by running the model.
        num_heads: KV heads, H.
        head_dim: D.
        value_sample: A fingerprint of the checkpoint: entries of the last read layer's value vectors.
        packs: Whether documents of different lengths are run without padding between them.

    Raises:
        BackboneError: The model's cache does not hold its value vectors, or it cannot be run in two phases.
    """

    def __init__(self, model: PreTrainedModel, last_layer: int | None = None, *, num_layers: int | None = None) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.loaded_layers: int = self.config.num_hidden_layers
        self.num_layers = self.loaded_layers if num_layers is None else num_layers
        self.last_layer = self.loaded_layers - 1 if last_layer is None else last_layer
        if not 0 < self.last_layer < self.loaded_layers:
            raise BackboneError(f"Layer {self.last_layer} was asked for; {self.name} has 1..{self.loaded_layers - 1}.")
        self._attend_bool = self.config._attn_implementation in ("sdpa", NAME)
        self.causal, self.packs = True, False  # until the trial has found out
        try:
            trial = try_out(self)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
            if is_out_of_memory(error):
                raise BackboneError(
                    f"{self.name} does not fit into the memory of {self.device} together with nine tokens. Load it "
                    "in 8-bit or 4-bit, or on another device."
                ) from error
            raise BackboneError(
                f"{self.name} failed on a trial run with a KV cache ({type(error).__name__}: {error}). {ADVICE}"
            ) from error
        self.causal, self.num_heads, self.head_dim = trial.causal, trial.num_heads, trial.head_dim
        self.value_sample = trial.sample
        self.packs = self._can_pack()

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
    def bits(self) -> int:
        """Bits of the weights: 4 (nf4), 8 (int8, fp8), else 16 (also for 32)."""
        return bits_of(self.model)

    def fingerprint(self) -> str:
        """Of the weights: it differs for any other checkpoint, dtype or quantisation."""
        return fingerprint(self.model)

    @property
    def max_length(self) -> int:
        """Positions: of the whole sequence in a decoder, of each of its two parts in an encoder."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond this, the longest sequence of a batch changes the frequencies of all: neighbours would matter.
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
        return limit if self.causal else limit - self._position_offset

    def prefill(self, documents: Sequence[Sequence[int]], *, room: int = 0, whole: bool = False) -> Prefixes:
        """Run documents' prefixes and keep their keys and values.

        Documents of different lengths are run in one row without padding, where the model can do that (`packs`).

        Args:
            documents: Token ids of ``instruction + document + separator``, one list a document.
            room: Tokens of the queries that will be run after them, so that these need no copy.
            whole: Keep those of all loaded layers, which hidden states need.

        Returns:
            Keys and values of the layers below ``last_layer``; the last one's are never attended to.
        """
        lengths = [len(ids) for ids in documents]
        worth = sum(lengths) < FILLED * max(lengths) * len(lengths)
        return self.prefill_as(documents, room, whole=whole, packed=worth and self._fit_a_row(lengths))

    def prefill_as(
        self, documents: Sequence[Sequence[int]], room: int = 0, *, packed: bool, whole: bool = False
    ) -> Prefixes:
        """`prefill` in one row without padding, or in a padded batch."""
        lengths = tuple(len(ids) for ids in documents)
        width = max(lengths)
        packing = Packing.of(lengths, self.device, causal=self.causal) if packed else None
        recorder = Recorder(self.loaded_layers - 1 if whole else self.last_layer - 1, room, packing)
        if packing is not None:
            ids = torch.tensor([[i for document in documents for i in document]], device=self.device)
            with attending(packing):
                self.run_to_the_end_of(recorder, ids, None, packing.places[1:])
        else:
            ids = torch.tensor([[*doc, *[0] * (width - len(doc))] for doc in documents], device=self.device)
            columns = torch.arange(width, device=self.device)
            # Right padding: in a causal model no real token sees it, so the model may build its own (faster) mask.
            mask = None if self.causal else (columns < self._column(lengths)).long()
            self.run_to_the_end_of(recorder, ids, mask, columns.expand(len(documents), -1))
        return Prefixes(tuple(recorder.keys), tuple(recorder.recorded_values), lengths, width)

    @cached_property
    def _windows(self) -> list[int | None]:
        """How many positions each loaded layer's tokens see, themselves included; None for all."""
        window = getattr(self.config, "sliding_window", None) or None
        kinds = getattr(self.config, "layer_types", None) or ["sliding_attention"] * self.loaded_layers
        return [window if kind == "sliding_attention" else None for kind in kinds[: self.loaded_layers]]

    def reach(self, layer: int) -> int | None:
        """How many positions back a token's signal at a layer can know of; None if there is no limit.

        It has passed the attention of all layers below, each of which carries as far as its window.
        """
        windows = [window for window in self._windows[:layer] if window is not None]
        return sum(window - 1 for window in windows) if self.causal and len(windows) == layer else None

    def _fit_a_row(self, lengths: Sequence[int]) -> bool:
        """Whether documents of these lengths can be packed."""
        if not self.packs or self.config._attn_implementation != NAME:  # somebody may have set another since
            return False
        if not self.causal and self.max_length > LARGEST_TABLE and sum(lengths) > self.max_length:
            return False
        # In a packed row, no attention window is kept.
        return max(lengths) <= min((window for window in self._windows if window is not None), default=2**31)

    def _can_pack(self) -> bool:
        """Whether a packed row gives what a padded batch gives, tried out: kernels differ from device to device."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        kernels = self.device.type == "cpu" or (self.device.type == "cuda" and half)
        if self.config._attn_implementation != NAME or not kernels:
            return False
        try:
            return packed_alike(self)
        except (
            BackboneError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RuntimeError,
            ImportError,
            AssertionError,
        ) as error:
            logger.info("%s runs documents with padding: %s", self.name, error)
            return False

    def query_values(
        self, queries: Sequence[Sequence[int]], prefixes: Prefixes, consume: Consumer, *, signal: Signal = "values"
    ) -> None:
        """Run queries after every prefix and hand over their value vectors, layer by layer.

        Several queries may be packed into one row: each sees the document and itself only. Values are handed
        over once and not kept, so memory does not grow with depth.

        Args:
            queries: Token ids of ``query + suffix``, one list a query; T is their total length.
            prefixes: From `prefill`.
            consume: Called with each layer's index and values (N, H, T, D), ascending up to ``last_layer``.
            signal: Hand over keys, or hidden states as (N, 1, T, hidden), instead. Hidden states need whole prefixes.
        """
        lengths = torch.tensor([len(ids) for ids in queries], device=self.device)
        owner = torch.repeat_interleave(torch.arange(len(queries), device=self.device), lengths)  # (T,)
        within = torch.cat([torch.arange(len(ids), device=self.device) for ids in queries])  # (T,)
        ids = torch.tensor([[i for query in queries for i in query]], device=self.device).expand(len(prefixes), -1)
        positions = self._start(prefixes) + within  # (N, T)
        mask = self._mask(self._column(prefixes.lengths), prefixes.width, owner, within, positions)
        self._run_queries(ids, mask, positions, prefixes, consume, signal)

    def own_query_values(
        self, queries: Sequence[Sequence[int]], prefixes: Prefixes, consume: Consumer, *, signal: Signal = "values"
    ) -> None:
        """As `query_values`, with a query of its own after each prefix.

        Args:
            queries: Token ids, one list a prefix; T is the longest's length. Behind a shorter one stands padding,
                whose values mean nothing.
            prefixes: From `prefill`.
            consume: As in `query_values`.
            signal: As in `query_values`.
        """
        width = max(map(len, queries))
        within = torch.arange(width, device=self.device)
        real = within < self._column([len(ids) for ids in queries])  # (N, T)
        ids = torch.tensor([[*query, *[0] * (width - len(query))] for query in queries], device=self.device)
        positions = (self._start(prefixes) + within) * real  # padding must not stand behind the model's last position
        mask = self._mask(
            self._column(prefixes.lengths), prefixes.width, torch.zeros_like(within), within, positions, real=real
        )
        self._run_queries(ids, mask, positions, prefixes, consume, signal)

    def _start(self, prefixes: Prefixes) -> Tensor:
        """Position of a query's first token after each prefix, (N, 1)."""
        lengths = self._column(prefixes.lengths)
        return lengths if self.causal else torch.zeros_like(lengths)

    def _column(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths, device=self.device)[:, None]

    def _run_queries(
        self,
        ids: Tensor,
        mask: Tensor | dict[str, Tensor],
        positions: Tensor,
        prefixes: Prefixes,
        consume: Consumer,
        signal: Signal,
    ) -> None:
        prefixes = prefixes.with_room(ids.shape[1])
        if signal != "hidden":
            reader = Reader(prefixes, consume, self.last_layer, keys=signal == "keys")
            self.run_to_the_end_of(reader, ids, mask, positions)
            return
        whole = Reader(prefixes, lambda layer, value: None, self.loaded_layers)
        hidden = self.run(whole, ids, mask, positions, output_hidden_states=True).hidden_states
        for layer in range(self.last_layer + 1):
            consume(layer, hidden[layer][:, None])

    def values_in_one_run(
        self,
        documents: Sequence[Sequence[int]],
        query: Sequence[int],
        consume: Consumer,
        *,
        signal: Literal["values", "keys"] = "values",
    ) -> None:
        """Both phases in one pass, which keeps nothing: what `prefill` and `query_values` give, where rows may leave.

        Args:
            documents: Token ids of ``instruction + document + separator``, one list a document.
            query: Token ids of ``query + suffix``.
            consume: As in `query_values`.
            signal: As in `query_values`.
        """
        lengths = self._column([len(ids) for ids in documents])
        width, count = max(map(len, documents)), len(query)
        ids = torch.tensor([[*doc, *[0] * (width - len(doc)), *query] for doc in documents], device=self.device)
        columns, within = torch.arange(width, device=self.device), torch.arange(count, device=self.device)
        start = lengths if self.causal else torch.zeros_like(lengths)
        positions = torch.cat([columns.expand(len(documents), -1), start + within], dim=1)
        mask = self._mask(lengths, width, torch.zeros_like(within), within, start + within, whole=True)
        cache = Whole(count, consume, self.last_layer, keys=signal == "keys")
        self.run_to_the_end_of(cache, ids, mask, positions)

    def let_rows_leave(self) -> None:
        """Make `query_values` and `values_in_one_run` drop rows that their consumer gives up.

        It needs a hook on each layer of the model, which does nothing for any cache but ours.

        Raises:
            BackboneError: The layers of this model cannot do with fewer rows.
        """
        if self.model in _LETTING_LEAVE:
            return
        stacks = (m for m in self.model.modules() if isinstance(m, ModuleList) and len(m) > self.last_layer)
        layers = next(stacks, ModuleList())
        hooks = [layer.register_forward_pre_hook(_without_leavers, with_kwargs=True) for layer in layers]
        try:
            if not rows_can_leave(self):
                raise BackboneError(f"{self.name} gives other values when rows leave between its layers. {NOT_EARLY}")
            _LETTING_LEAVE.add(self.model)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise BackboneError(f"{self.name} cannot drop rows between its layers ({error}). {NOT_EARLY}") from error
        finally:
            if self.model not in _LETTING_LEAVE:
                for hook in hooks:
                    hook.remove()

    def _mask(
        self,
        lengths: Tensor,
        width: int,
        owner: Tensor,
        within: Tensor,
        positions: Tensor,
        *,
        whole: bool = False,
        real: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Mask (N, 1, T, S + T), or (N, 1, S + T, S + T), one for each kind of attention layer the model has.

        ``real`` says which of a row's query tokens are no padding, (N, T); None if all are.
        """
        columns = torch.arange(width, device=self.device)
        valid = columns < lengths  # (N, S)
        document = valid[:, None].expand(-1, len(owner), -1)  # (N, T, S)
        query = owner[:, None] == owner  # (T, T)
        if self.causal:
            query = query & (within <= within[:, None])
        query = query.expand(len(lengths), -1, -1)
        if real is not None and not self.causal:  # in a causal model nothing sees the padding behind it
            query = query & real[:, None]

        full = torch.cat([document, query], dim=2)
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if not self.causal or not window or kinds == {"full_attention"}:
            return self.mask(self._above(full, valid, None) if whole else full)
        near_document = document & (positions[..., None] - columns < window)
        near_query = query & (within[:, None] - within < window)
        sliding = torch.cat([near_document, near_query], dim=2)
        if whole:
            full, sliding = self._above(full, valid, None), self._above(sliding, valid, int(window))
        if "full_attention" in kinds:
            return {"full_attention": self.mask(full), "sliding_attention": self.mask(sliding)}
        return self.mask(sliding)

    def _above(self, query: Tensor, valid: Tensor, window: int | None) -> Tensor:
        """The mask of the document's tokens, which see no query, above the query's (N, T, S + T)."""
        width = valid.shape[1]
        columns = torch.arange(width, device=self.device)
        if self.causal:  # padding stands behind the document, so no token of it sees any
            before = columns[:, None] - columns
            seen = ((before >= 0) if window is None else (before >= 0) & (before < window)).expand(len(valid), -1, -1)
        else:
            seen = valid[:, None].expand(-1, width, -1)
        nothing = seen.new_zeros(len(valid), width, query.shape[2] - width)
        return torch.cat([torch.cat([seen, nothing], dim=2), query], dim=1)

    def mask(self, allowed: Tensor) -> Tensor:
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

    def run(
        self,
        cache: Probe,
        ids: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        positions: Tensor,
        **outputs: bool,
    ) -> Any:
        """One forward pass through a cache of ours.

        Args:
            cache: Records or reads.
            ids: (N, T).
            mask: As the model takes it.
            positions: (N, T), each part counted from 0.
            **outputs: What else the model should give.

        Returns:
            The model's output; None where the cache ended the run.
        """
        try:
            return self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions + self._position_offset,
                past_key_values=cache,
                use_cache=True,
                **outputs,
            )
        except LastLayerReached:
            return None

    def run_to_the_end_of(
        self, cache: Probe, ids: Tensor, mask: Tensor | dict[str, Tensor] | None, positions: Tensor
    ) -> None:
        """A forward pass that the cache has to end.

        Raises:
            BackboneError: The model never passed the cache's last layer through it.
        """
        if self.run(cache, ids, mask, positions) is not None:
            raise BackboneError(f"{self.name} ran without passing layer {cache.stop} through its KV cache. {ADVICE}")


def _without_leavers(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a layer: what it is called with, less the rows that have left the run."""
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Probe)), None)
    if cache is None:
        return None
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    place = 0 if args else names.index("hidden_states")
    hidden, others = cache.without_leavers(values[place], values[:place] + values[place + 1 :])
    values = [*others[:place], hidden, *others[place:]]
    return tuple(values[: len(args)]), dict(zip(names, values[len(args) :], strict=True))
