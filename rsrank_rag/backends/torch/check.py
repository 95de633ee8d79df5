"""The trial run at load: can the value vectors of a language model be read in two phases?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ...errors import BackboneError
from ...method.batches import Ids, is_out_of_memory
from ...method.prefix import Prefixes
from ..base import TOKENS, sample_of, trial_ids
from .attention import NAME
from .backbone import ADVICE, Backbone
from .fusion import split_at
from .probe import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The first tokens of the trial run, which are the document.
DOCUMENT_TOKENS = 6

MEMORY_ADVICE = "It needs more memory: load it in 8-bit or 4-bit, or on another device."


@torch.no_grad()
def open_backbone(
    model: PreTrainedModel,
    last_layer: int | None = None,
    *,
    num_layers: int | None = None,
    fusion_layer: int = 0,
) -> Backbone:
    """Test a model, and make it a `Backbone`. The model is switched to eval mode.

    Args:
        model: A base model without head.
        last_layer: The last layer to read; None for the last one loaded.
        num_layers: Layers of the checkpoint; None for as many as are loaded.
        fusion_layer: As in `Backbone`.

    Raises:
        BackboneError: The model's cache does not hold its value vectors, or the model cannot run in
            two phases, or not from the fusion layer on.
    """
    loaded = model.eval().config.get_text_config().num_hidden_layers
    last_layer = loaded - 1 if last_layer is None else last_layer
    core = Backbone(model, last_layer=last_layer, num_layers=num_layers or loaded)
    if not 0 < last_layer < loaded:
        raise BackboneError(f"Layer {last_layer} was asked for; {core.name} has 1..{loaded - 1}.")
    try:
        core = _tested(core)
        if fusion_layer:
            core = _with_fusion(core, fusion_layer)
    except BackboneError:
        raise
    except Exception as error:
        advice = MEMORY_ADVICE if is_out_of_memory(error) else ADVICE
        raise BackboneError(
            f"{core.name} failed on a trial run of {TOKENS} tokens with a KV cache "
            f"({type(error).__name__}: {error}). {advice}"
        ) from error
    return core


def _refuse(core: Backbone, problem: str) -> NoReturn:
    raise BackboneError(f"{core.name} {problem} {ADVICE}")


def _tested(core: Backbone) -> Backbone:
    """The same model with what is known of it, after these checks.

    1. Every layer up to the last one read passes (1, H, T, D) value vectors through the cache.
    2. They are slices of the output of a linear map: the layer's value projection.
    3. A decoder's positions are rotary: they do not change the first layer's values (Eq. 3).
    4. Document first, query second gives the same value vectors as both in one run, also next to a
       longer document.

    Raises:
        BackboneError: One of these does not hold.
    """
    _check_attention_kinds(core)
    ids = _trial_ids(core)
    values = _checked_values(core, ids)
    causal = _is_causal(core, ids, values[-1])
    if causal:
        _check_no_added_positions(core, ids, values[0])
    tested = replace(
        core,
        causal=causal,
        num_heads=values[0].shape[1],
        head_dim=values[0].shape[3],
        sample=sample_of(values[-1][0].float()),
        pads_keys=core.device.type == "cpu" and core.config._attn_implementation == NAME,
    )
    _check_two_phases(tested, ids, values if causal else _block_masked_values(tested, ids))
    return tested


def _with_fusion(core: Backbone, layer: int) -> Backbone:
    """The same model with a fusion layer.

    Raises:
        BackboneError: It gives other value vectors when a run begins there.
    """
    if layer >= core.last_layer:
        raise BackboneError(
            f"fusion_layer={layer} was asked for, and no layer above it is read. "
            "Choose a lower one."
        )
    ids = _trial_ids(core)
    fused = replace(core, model=split_at(core.model, layer), fusion_layer=layer)
    read: dict[int, Tensor] = {}
    prefixes = Prefixes.join(fused.prefill([ids[:DOCUMENT_TOKENS]]), TOKENS)
    fused.query_values([ids], prefixes, read.__setitem__)
    # In the fusion layer, the values of queries do not depend on the document yet.
    expected = _run(core, ids)[layer]
    if min(read) != layer or not _distance(read[layer], expected) <= _rounding(core):
        _refuse(core, f"cannot be run from layer {layer} on, as fusion_layer={layer} asks.")
    return fused


def _trial_ids(core: Backbone) -> Ids:
    return trial_ids(core.model.get_input_embeddings().weight.shape[0])


def _is_causal(core: Backbone, ids: Ids, values: Tensor) -> bool:
    """Whether other tokens at the end leave the values of earlier tokens as they are."""
    document = slice(DOCUMENT_TOKENS)
    other = _run(core, ids[document] + ids[: TOKENS - DOCUMENT_TOKENS])[-1]
    # Equal shapes are rounded alike, except where experts get other numbers of tokens.
    has_experts = any("expert" in name for name in core.config.to_dict())
    tolerance = 1e-2 if has_experts else 1e-5
    return _distance(other[:, :, document], values[:, :, document]) <= tolerance


def _check_no_added_positions(core: Backbone, ids: Ids, values: Tensor) -> None:
    """Refuse positions that are added to the embeddings."""
    moved = _run(core, ids, range(3, 3 + TOKENS))[0]
    if _distance(moved, values) > _rounding(core):
        _refuse(
            core,
            "adds positions to its embeddings, so a document would move the query's value vectors "
            "by its length alone: the shift (Eq. 3 of the paper) needs rotary positions.",
        )


def _check_two_phases(core: Backbone, ids: Ids, expected: list[Tensor]) -> None:
    """Compare the query's values in two phases with those of a single run."""
    longer = ids[::-1] + ids
    query = ids[DOCUMENT_TOKENS:]
    read: dict[int, Tensor] = {}
    prefixes = Prefixes.join(core.prefill([ids[:DOCUMENT_TOKENS], longer]), len(query))
    core.query_values([query], prefixes, read.__setitem__)
    for layer, values in enumerate(expected):
        if _distance(read[layer][:1], values[:, :, DOCUMENT_TOKENS:]) > _rounding(core):
            _refuse(
                core,
                f"gives other value vectors in layer {layer} when the document is run before the "
                "query than when both are run at once, so it cannot be used in two phases.",
            )


def _block_masked_values(core: Backbone, ids: Ids) -> list[Tensor]:
    """The expected values of an encoder: a run in which document tokens do not see the query's."""
    positions = [*range(DOCUMENT_TOKENS), *range(TOKENS - DOCUMENT_TOKENS)]
    allowed = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool, device=core.device)
    allowed[:, :DOCUMENT_TOKENS, DOCUMENT_TOKENS:] = False
    return _run(core, ids, positions, core.mask(allowed))


def _check_attention_kinds(core: Backbone) -> None:
    """Refuse masks that a short trial could not tell from those of `Backbone`."""
    kinds = set(getattr(core.config, "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention"}
    if kinds:
        _refuse(core, f"has attention layers of the kind {', '.join(sorted(kinds))}.")


def _checked_values(core: Backbone, ids: Ids) -> list[Tensor]:
    """Value vectors of every layer, (1, H, T, D), after checks 1 and 2."""
    recorder = Recorder(core.last_layer, [TOKENS])
    # Outputs of linear maps, by the layer whose cache update comes next.
    outputs: dict[int, list[Tensor]] = {}

    def record(_module: object, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.setdefault(len(recorder.values), []).append(output)

    hooks = []
    for module in core.model.modules():
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
            hooks.append(module.register_forward_hook(record))
    try:
        values = _run(core, ids, recorder=recorder)
    finally:
        for hook in hooks:
            hook.remove()
    shapes = sorted({str(tuple(value.shape)) for value in values})
    if len(values) != core.last_layer + 1 or len(shapes) != 1:
        _refuse(
            core,
            f"was asked for the value vectors of layers 0..{core.last_layer}; its cache received "
            f"{len(values)} layers with shapes {shapes}.",
        )
    for layer, value in enumerate(values):
        if not _is_slice_of(value[0], outputs.get(layer, [])):
            _refuse(
                core,
                f"gives the cache of layer {layer} something else than the output of a value "
                "projection (normalised or compressed values?).",
            )
    return values


def _run(
    core: Backbone,
    ids: Ids,
    positions: Sequence[int] = range(TOKENS),
    mask: Tensor | None = None,
    recorder: Recorder | None = None,
) -> list[Tensor]:
    """Every layer's values in one run, (1, H, T, D); without a mask, under the model's own one."""
    # An empty cache is falsy.
    if recorder is None:
        recorder = Recorder(core.last_layer, [TOKENS])
    if mask is None:
        mask = torch.ones(1, TOKENS, dtype=torch.long, device=core.device)
    tokens, places = torch.tensor([[ids], [positions]], device=core.device)
    with core.ended_by(recorder):
        core.model(**core.inputs(recorder, tokens, mask, places))
    # Recorded values are padded.
    return [values[:, :, :TOKENS] for values in recorder.values]


def _rounding(core: Backbone) -> float:
    """A distance far above that of rounding, and far below that of a wrong mask or position.

    Products with quantised weights round more.
    """
    return 1e-3 if core.dtype == torch.float32 and core.bits == 16 else 0.1


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Euclidean distance, relative to the expected values' norm."""
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-6))


def _is_slice_of(value: Tensor, outputs: list[Tensor]) -> bool:
    """Whether the (T, D) values of each head are D adjacent columns of a (1, T, columns) output."""
    heads, tokens, width = value.shape
    for output in outputs:
        if output.shape[-1] < heads * width or output.numel() != tokens * output.shape[-1]:
            continue
        windows = output.reshape(tokens, -1).unfold(1, width, 1)  # (T, offsets, D)
        if all(bool((windows == head[:, None]).all(-1).all(0).any()) for head in value):
            return True
    return False
