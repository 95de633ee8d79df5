"""Signals and null prefixes to compare with the method's own (paper, Appendix B.1 and B.2).

They are read row by row: slow, and as plain as can be. Axes: N rows, H heads, T scored query
tokens, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.backends.torch.fusion import layers_of
from rsrank_rag.backends.torch.probe import Reader
from rsrank_rag.method.batches import Ids
from rsrank_rag.method.prefix import Prefixes, Show
from rsrank_rag.method.scoring import Consume, Row, ShiftReader
from rsrank_rag.method.template import PromptTokenizer, private_copy

Signal = Literal["values", "keys", "hidden"]
"""Value vectors (the paper's choice), keys, or hidden states entering a layer (Appendix B.2)."""

Null = Literal["empty", "matched", "none"]
"""The query's vectors to subtract: after no document ("empty", Eq. 3), after filler of the
document's length ("matched", Eq. 2), or none (raw representations, Appendix B.1)."""

FILLER = "."  # fills a null prefix up to a document's length


ReaderOf = Callable[[Backbone, PromptTokenizer, Sequence[int]], ShiftReader]
"""Makes a reader of a model's layers."""


def reader_of(signal: Signal, null: Null) -> ReaderOf:
    """What reads a signal and subtracts a null prefix; the method's own reader for its own."""
    if (signal, null) == ("values", "empty"):
        return ShiftReader
    return partial(SignalReader, signal=signal, null=null)


class SignalReader(ShiftReader):
    """Reads another signal, or subtracts something else.

    `signal`: value vectors, keys, or the hidden states that enter a layer (then H = 1 and D is the
    hidden size). `null`: what stands for "no document". Keys hold their position, which a document
    moves: they are compared at the same positions ("matched") or not at all ("none").
    """

    backbone: Backbone

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        layers: Sequence[int],
        *,
        signal: Signal,
        null: Null,
    ) -> None:
        super().__init__(backbone, prompts, layers)
        self.signal, self.null = signal, null

    def read(self, rows: Sequence[Row], consume: Consume) -> Tensor:
        """As `ShiftReader.read`; the paper's score knows no agreement."""
        alone: dict[
            tuple[Ids, Ids], dict[int, Tensor]
        ] = {}  # rows of one query share what is subtracted
        found = [self._difference(row, alone) for row in rows]
        width = max(row.query.length for row in rows)
        for layer in sorted(self.layers):
            shifts = [
                pad(shift[layer], (0, 0, 0, width - shift[layer].shape[2])) for shift in found
            ]
            consume(layer, torch.cat(shifts))
        return torch.zeros(len(rows), 1, 1, dtype=torch.float64)

    def _difference(
        self, row: Row, alone: dict[tuple[Ids, Ids], dict[int, Tensor]]
    ) -> dict[int, Tensor]:
        """Layer -> (1, H, T, D) fp32 of one row."""
        found = self._signal(row.document, row)
        if self.null == "none":
            return found
        prefix = (
            self.filled(len(row.document)) if self.null == "matched" else self.prompts.null_prefix
        )
        if (prefix, row.query.ids) not in alone:
            alone[prefix, row.query.ids] = self._signal(prefix, row)
        return {
            layer: value - alone[prefix, row.query.ids][layer] for layer, value in found.items()
        }

    def filled(self, length: int) -> Ids:
        """A null prefix of a document's length: filler in the document's place (paper, Eq. 2)."""
        filler = (
            private_copy(self.prompts.tokenizer, special_tokens=False)
            .encode(FILLER, add_special_tokens=False)
            .ids
        )
        bare, after = self.prompts.null_prefix, self.prompts.after_document
        room = length - len(bare)
        return (*bare[: len(bare) - after], *(filler * room)[:room], *bare[len(bare) - after :])

    def _signal(self, prefix: Ids, row: Row) -> dict[int, Tensor]:
        """Layer -> (1, H, T, D) fp32 of the scored tokens of a query after a prefix."""
        found: dict[int, Tensor] = {}

        def keep(layer: int, states: Tensor) -> None:
            if layer in self.layers:
                found[layer] = states[:, :, row.query.start : row.query.stop].float()

        prefixes = self.backbone.prefill([prefix], len(row.query.ids))
        if self.signal == "hidden":
            hooks = [
                layer.register_forward_pre_hook(
                    partial(_show_input, number, keep), with_kwargs=True
                )
                for number, layer in enumerate(layers_of(self.backbone.model))
            ]
            try:
                self.backbone.query_values([row.query.ids], prefixes, lambda layer, values: None)
            finally:
                for hook in hooks:
                    hook.remove()
        else:
            reader = Reader if self.signal == "values" else _KeyReader
            core = replace(self.backbone, reader=reader)
            core.query_values([row.query.ids], prefixes, keep)
        return found


class _KeyReader(Reader):
    """Shows keys where `Reader` shows values."""

    def __init__(self, stop: int, prefixes: Prefixes, show: Show) -> None:
        super().__init__(stop, prefixes, lambda layer, values: None)
        self.show_keys = show

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        self.show_keys(layer_idx, key_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _show_input(
    number: int, show: Show, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> None:
    """A hook before a layer: pass on the hidden states entering it, (N, T, hidden), as one head."""
    show(number, (args[0] if args else kwargs["hidden_states"])[:, None])
