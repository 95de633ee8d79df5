"""A trial run of a language model at load: does its cache hold its value vectors, and can it be run in two phases?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BackboneError
from ..method.probe import Recorder

if TYPE_CHECKING:
    from ..method.backbone import Backbone

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache (Qwen2/3, Llama, Mistral, Gemma 1-3, SmolLM3, OLMo, "
    "Phi, ...) or a BERT-like encoder; hybrid, linear-attention, ALiBi and MLA models do not work."
)


LARGEST_TABLE = 1024
"""Positions of an encoder up to which the trial packs more documents into a row than it has positions."""

IDS, CUT, SAMPLE = 9, 6, 64
"""Tokens of the trial, how many of them play the document, and value entries kept as a fingerprint."""


@dataclass(frozen=True)
class Trial:
    """What a trial run found out.

    Attributes:
        causal: Whether tokens see only earlier ones.
        num_heads: KV heads, H.
        head_dim: D.
        sample: Entries of the last read layer's value vectors: they depend on every weight below, so they tell one
            checkpoint from another in just what B reads.
    """

    causal: bool
    num_heads: int
    head_dim: int
    sample: tuple[float, ...]


@torch.no_grad()
def try_out(backbone: Backbone) -> Trial:
    """Run a few tokens and verify what the two phases rely on.

    1. Every layer up to the last one read passes (1, H, T, D) value vectors through the cache.
    2. They are what the layer's value projection put out: slices of a linear map's output.
    3. Document first, query second gives the same value vectors as both at once, beside a longer document too.

    Raises:
        BackboneError: One of these does not hold.
    """
    _check_attention_kinds(backbone)
    vocabulary = backbone.model.get_input_embeddings().weight.shape[0]
    ids = [int(i) for i in torch.linspace(1, vocabulary - 1, IDS)]
    values = _checked_values(backbone, ids)
    # Other tokens at the end: in a causal model the earlier ones cannot know. With the same shapes they come out the
    # same to the bit, except where experts gather other numbers of tokens and round differently.
    other = _recorded(backbone, [*ids[:CUT], *ids[: IDS - CUT]])[-1]
    exact = 1e-2 if any("expert" in name for name in backbone.config.to_dict()) else 1e-5
    backbone.causal = _distance(other[:, :, :CUT], values[-1][:, :, :CUT]) <= exact
    whole = values if backbone.causal else _block_masked_run(backbone, ids)
    read: dict[int, Tensor] = {}
    longer = [*ids[::-1], *ids]
    backbone.query_values([ids[CUT:]], backbone.prefill([ids[:CUT], longer]), read.__setitem__)
    near = _near(backbone)
    for layer, value in enumerate(whole):
        if _distance(read[layer][:1], value[:, :, CUT:]) > near:
            raise BackboneError(
                f"{backbone.name} gives other value vectors in layer {layer} when the document is run before the "
                f"query than when both are run at once, so it cannot be used in two phases. {ADVICE}"
            )
    last = values[-1][0, :, -1].flatten().float()
    sample = last[torch.linspace(0, len(last) - 1, SAMPLE, device=last.device).long()]
    return Trial(backbone.causal, values[0].shape[1], values[0].shape[3], tuple(round(x, 6) for x in sample.tolist()))


@torch.no_grad()
def rows_can_leave(backbone: Backbone) -> bool:
    """Whether the other rows' values stay as they are when one leaves after the first layer, in both kinds of run."""
    vocabulary = backbone.model.get_input_embeddings().weight.shape[0]
    ids = [int(i) for i in torch.linspace(1, vocabulary - 1, IDS)]
    documents, query, stay = [ids[:CUT], ids[::-1], ids[:4]], ids[CUT:], torch.tensor([0, 2], device=backbone.device)

    def read(*, leaving: bool, once: bool) -> list[Tensor]:
        found: list[Tensor] = []

        def consume(layer: int, value: Tensor) -> Tensor | None:
            found.append(value)
            return stay if leaving and layer == 0 else None

        if once:
            backbone.values_in_one_run(documents, query, consume)
        else:
            backbone.query_values([query], backbone.prefill(documents), consume)
        return found

    expected, near = read(leaving=False, once=False), _near(backbone)
    return all(
        len(value) == 2 and _distance(value, whole[stay]) <= near
        for once in (False, True)
        for value, whole in zip(read(leaving=True, once=once)[1:], expected[1:], strict=True)
    )


@torch.no_grad()
def packed_alike(backbone: Backbone) -> bool:
    """Whether documents leave the same behind in one row as they do in a padded batch."""
    vocabulary = backbone.model.get_input_embeddings().weight.shape[0]
    ids = [int(i) for i in torch.linspace(1, vocabulary - 1, IDS)]
    documents = [ids[:CUT], ids[::-1], ids[:4], ids[:4]]
    if not backbone.causal and backbone.max_length <= LARGEST_TABLE:
        # Such models have a table of positions: the row has to be longer than that.
        documents.append((ids * backbone.max_length)[: backbone.max_length])
    near = _near(backbone)
    padded, packed = (backbone.prefill_as(documents, packed=packed) for packed in (False, True))
    return all(
        _distance(found[row, :, :length], expected[row, :, :length]) <= near
        for found, expected in zip(packed.keys + packed.values, padded.keys + padded.values, strict=True)
        for row, length in enumerate(padded.lengths)
    )


def _check_attention_kinds(backbone: Backbone) -> None:
    """Refuse masks that a short trial could not tell from the ones made here."""
    kinds = set(getattr(backbone.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or "local" in (getattr(backbone.config, "attention_layers", None) or ()):
        raise BackboneError(
            f"{backbone.name} has attention layers of the kind {', '.join(sorted(kinds)) or 'local'}. {ADVICE}"
        )


def _checked_values(backbone: Backbone, ids: list[int]) -> list[Tensor]:
    """Value vectors of every layer, (1, H, T, D), after checks 1 and 2."""
    recorder = Recorder(backbone.last_layer)
    outputs: dict[int, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: _keep(outputs, recorder, output))
        for module in backbone.model.modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    try:
        values = _recorded(backbone, ids, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    shapes = {tuple(v.shape) for v in values}
    count = backbone.last_layer + 1
    if len(values) != count or len(shapes) != 1 or values[0].ndim != 4 or values[0].shape[2] != len(ids):
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
    return values


def _keep(outputs: dict[int, list[Tensor]], recorder: Recorder, output: object) -> None:
    """Remember a linear map's output under the layer whose cache update comes next."""
    if isinstance(output, Tensor):
        outputs.setdefault(len(recorder.keys), []).append(output)


def _recorded(backbone: Backbone, ids: list[int], recorder: Recorder | None = None) -> list[Tensor]:
    """Every layer's values with all tokens run at once, under the model's own mask."""
    recorder = Recorder(backbone.last_layer) if recorder is None else recorder  # an empty cache is falsy
    tokens = torch.tensor([ids], device=backbone.device)
    backbone.run_to_the_end_of(
        recorder, tokens, torch.ones_like(tokens), torch.arange(len(ids), device=backbone.device)[None]
    )
    return recorder.recorded_values


def _block_masked_run(backbone: Backbone, ids: list[int]) -> list[Tensor]:
    """An encoder's reference: one run in which the document's tokens do not see the query's."""
    tokens = torch.tensor([ids], device=backbone.device)
    positions = torch.tensor([[*range(CUT), *range(IDS - CUT)]], device=backbone.device)
    allowed = torch.ones(IDS, IDS, dtype=torch.bool, device=backbone.device)
    allowed[:CUT, CUT:] = False
    recorder = Recorder(backbone.last_layer)
    backbone.run_to_the_end_of(recorder, tokens, backbone.mask(allowed[None]), positions)
    return recorder.recorded_values


def _near(backbone: Backbone) -> float:
    """Rounding stays far below this distance, and a wrong mask or position far above.

    Products with quantised weights round more.
    """
    return 1e-3 if backbone.dtype == torch.float32 and backbone.bits == 16 else 0.1


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the expected values' norm."""
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-6))


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
