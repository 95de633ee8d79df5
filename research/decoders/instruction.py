"""A decoder that runs the template's instruction once, and each document after it.

All documents begin with the same instruction. Its keys and values do not depend on what follows, so
this saves the instruction's tokens of each document, a sixth of all tokens where the documents are
sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from typing_extensions import Self

from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.backends.torch.probe import Recorder
from rsrank_rag.method.batches import Ids
from rsrank_rag.method.prefix import Prefix, padded_length


class DocumentRecorder(Recorder):
    """Records documents that run after an instruction, and the instruction before them."""

    def __init__(self, instruction: Prefix, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.instruction = instruction
        self.length = len(instruction)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Record a layer's keys and values of instruction and document, (N, H, S, D)."""
        states = []
        for part, own in enumerate((key_states, value_states)):
            shared = self.instruction.states[part, layer_idx].expand(len(own), -1, -1, -1)
            states.append(torch.cat([shared, own], 2))
        return super().update(states[0], states[1], layer_idx)


@dataclass(eq=False)
class InstructedBackbone(Backbone):
    """A decoder whose documents all begin with one instruction.

    Attributes:
        instruction: The instruction's token ids.
    """

    instruction: Ids = ()

    @classmethod
    def of(cls, core: Backbone, instruction: Ids) -> Self:
        """A backbone that shares another one's model."""
        settings = {field.name: getattr(core, field.name) for field in fields(core)}
        return cls(**settings, instruction=instruction)

    def prefill(self, documents: Sequence[Ids]) -> list[Prefix]:
        """As `Backbone.prefill`."""
        if documents[0] == self.instruction:
            return super().prefill(documents)
        shared = self.null_prefix(self.instruction)
        lengths = [len(document) for document in documents]
        recorder = DocumentRecorder(
            shared,
            self.last_layer - 1,
            lengths,
            pads_keys=self.pads_keys,
        )
        ids = self._padded([document[len(shared) :] for document in documents])
        positions = torch.arange(len(shared), max(lengths), device=self.device).expand(ids.shape)
        width = padded_length(max(lengths)) if self.pads_keys else max(lengths)
        keys = torch.arange(width, device=self.device)
        mask = self.mask(keys <= positions[..., None])
        with self.ended_by(recorder):
            self.model(**self.inputs(recorder, ids, mask, positions))
        return recorder.prefixes()
