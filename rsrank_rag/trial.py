"""A trial run of a language model at load: does its cache hold its value vectors, and can it be run in two phases?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import Recorder
from .errors import BackboneError

if TYPE_CHECKING:
    from .backbone import Backbone

ADVICE = (
    "RSRank needs a decoder with an ordinary per-layer KV cache (Qwen2/3, Llama, Mistral, Gemma 1-3, SmolLM3, OLMo, "
    "Phi, ...) or a BERT-like encoder; hybrid, linear-attention, ALiBi and MLA models do not work."
)


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
    recorder = Recorder(backbone.last_layer)
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
    shorter = Recorder(backbone.last_layer)
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


def _keep(outputs: dict[int, list[Tensor]], recorder: Recorder, output: object) -> None:
    """Remember a linear map's output under the layer whose cache update comes next."""
    if isinstance(output, Tensor):
        outputs.setdefault(len(recorder.keys), []).append(output)


def _plain_run(backbone: Backbone, cache: Recorder, ids: list[int]) -> None:
    """All tokens at once, with the model's own mask."""
    tokens = torch.tensor([ids], device=backbone.device)
    backbone.run(cache, tokens, torch.ones_like(tokens), torch.arange(len(ids), device=backbone.device)[None])


def _block_masked_run(backbone: Backbone, ids: list[int], cut: int) -> list[Tensor]:
    """An encoder's reference: one run in which the document's tokens do not see the query's."""
    tokens = torch.tensor([ids], device=backbone.device)
    positions = torch.tensor([[*range(cut), *range(len(ids) - cut)]], device=backbone.device)
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool, device=backbone.device)
    allowed[:cut, cut:] = False
    recorder = Recorder(backbone.last_layer)
    backbone.run(recorder, tokens, backbone.mask(allowed[None]), positions)
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
