"""A trial run of a language model at load: does its cache hold its value vectors, and can it be run in two phases?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BackboneError
from ..method.backbone import ADVICE, Backbone, Findings
from ..method.concurrent_batches import is_out_of_memory
from ..method.probe import Recorder
from .attention import NAME
from .fusion import split_at
from .weights import bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS, CUT, SAMPLE = 9, 6, 64
"""Tokens of the trial, how many of them play the document, and value entries kept as a fingerprint."""

RUN_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ImportError,
    AssertionError,
)
"""What a model may raise that cannot be run as we run it."""

LARGEST_TRIED = 4_000_000  # entries of a weight for which `_batch_invariant_tokens` takes moments
MOST_PADDING = (
    512  # tokens that a run is filled up to at most, so that each comes out as it would among many
)


def open_backbone(
    model: PreTrainedModel,
    last_layer: int | None = None,
    *,
    num_layers: int | None = None,
    fusion_layer: int = 0,
    documents_stay: bool = False,
) -> Backbone:
    """Try a model out and make it ready to be read; see `Backbone`. It is switched to eval mode.

    ``last_layer`` and ``num_layers`` are by default the last one loaded, and as many as are loaded.

    Raises:
        BackboneError: The model's cache does not hold its value vectors, or it cannot be run in two phases, or not
            from the fusion layer on.
    """
    loaded = model.eval().config.get_text_config().num_hidden_layers
    last_layer = loaded - 1 if last_layer is None else last_layer

    unknown = Findings(
        causal=True, num_heads=1, head_dim=1, sample=()
    )  # until the trial has found out
    core = Backbone(model, unknown, last_layer=last_layer, num_layers=num_layers or loaded)
    if not 0 < last_layer < loaded:
        raise BackboneError(f"Layer {last_layer} was asked for; {core.name} has 1..{loaded - 1}.")
    if documents_stay and not fusion_layer:
        raise BackboneError(
            "documents_stay=True needs a fusion_layer, up to which documents are run."
        )
    try:
        core = _try_out(core)
        if fusion_layer:
            core = _fused(core, fusion_layer, documents_stay)
    except RUN_ERRORS as error:
        if is_out_of_memory(error):
            raise BackboneError(
                f"{core.name} does not fit into the memory of {core.device} together with nine tokens. Load it "
                "in 8-bit or 4-bit, or on another device."
            ) from error
        raise BackboneError(
            f"{core.name} failed on a trial run with a KV cache ({type(error).__name__}: {error}). {ADVICE}"
        ) from error
    return core


@torch.no_grad()
def _try_out(core: Backbone) -> Backbone:
    """Run a few tokens and verify what the two phases rely on; the same model with what was found.

    1. Every layer up to the last one read passes (1, H, T, D) value vectors through the cache.
    2. They are what the layer's value projection put out: slices of a linear map's output.
    3. A decoder's positions are rotary: no document moves the first layer's values (Eq. 3 rests on it).
    4. Document first, query second gives the same value vectors as both at once, beside a longer document too.

    Raises:
        BackboneError: One of these does not hold.
    """
    _check_attention_kinds(core)
    ids = _tokens(core)
    values = _checked_values(core, ids)
    # Other tokens at the end: in a causal model the earlier ones cannot know. With the same shapes they come out the
    # same to the bit, except where experts gather other numbers of tokens and round differently.
    other = _values(core, [*ids[:CUT], *ids[: IDS - CUT]])[-1]
    exact = 1e-2 if any("expert" in name for name in core.config.to_dict()) else 1e-5
    causal = _distance(other[:, :, :CUT], values[-1][:, :, :CUT]) <= exact
    last = values[-1][0, :, -1].flatten().float()
    sample = last[
        torch.linspace(0, len(last) - 1, SAMPLE, dtype=torch.float32, device=last.device).long()
    ].tolist()
    if causal:
        _check_rotary(core, ids)
    findings = Findings(
        causal,
        num_heads=values[0].shape[1],
        head_dim=values[0].shape[3],
        sample=tuple(round(x, 6) for x in sample),
        pads_keys=core.device.type == "cpu" and core.config._attn_implementation == NAME,
        batch_invariant_tokens=_batch_invariant_tokens(core),
    )
    checked = Backbone(core.model, findings, last_layer=core.last_layer, num_layers=core.num_layers)
    whole = values if causal else _block_masked_run(checked, ids)
    read: dict[int, Tensor] = {}
    prefixes = checked.prefill([tuple(ids[:CUT]), (*ids[::-1], *ids)], IDS - CUT)
    checked.query_values([tuple(ids[CUT:])], prefixes, read.__setitem__)
    near = _near(core)
    for layer, value in enumerate(whole):
        if _distance(read[layer][:1, :, : IDS - CUT], value[:, :, CUT:]) > near:
            raise BackboneError(
                f"{core.name} gives other value vectors in layer {layer} when the document is run before the "
                f"query than when both are run at once, so it cannot be used in two phases. {ADVICE}"
            )
    return checked


@torch.no_grad()
def _fused(core: Backbone, layer: int, stay: bool) -> Backbone:
    """The same model with a fusion layer; BackboneError if it gives other value vectors when run from there on."""
    if layer >= core.last_layer:
        raise BackboneError(
            f"fusion_layer={layer} was asked for, and no layer above it is read. Choose a lower one."
        )
    ids = tuple(_tokens(core))
    model = split_at(core.model, layer)
    fused = replace(core, model=model, fusion_layer=layer, documents_stay=stay)
    read: dict[int, Tensor] = {}
    fused.query_values([ids], fused.prefill([ids[:CUT]], IDS), read.__setitem__)
    alone = _values(core, list(ids))[
        layer
    ]  # in the fusion layer, they have not seen the document yet
    if min(read) != layer or _distance(read[layer][:, :, :IDS], alone) > _near(core):
        raise BackboneError(
            f"{core.name} cannot be run from layer {layer} on, as fusion_layer={layer} asks. {ADVICE}"
        )
    return fused


def _tokens(core: Backbone) -> list[int]:
    vocabulary = core.model.get_input_embeddings().weight.shape[0]
    return [int(i) for i in torch.linspace(1, vocabulary - 1, IDS, dtype=torch.float32)]


def _check_rotary(core: Backbone, ids: list[int]) -> None:
    """Refuse positions that are added to the embeddings: a document would shift its query by its mere length."""
    first, moved = (_values(core, ids, first=place)[0] for place in (0, 3))
    if _distance(moved, first) > _near(core):
        raise BackboneError(
            f"{core.name} adds positions to its embeddings, so a document would move the query's value vectors by its "
            f"length alone: the shift (Eq. 3 of the paper) needs rotary positions. {ADVICE}"
        )


def _batch_invariant_tokens(core: Backbone) -> int | None:
    """How many tokens a run needs so that each of them comes out the same however many others there are.

    Matrix kernels for few rows sum in another order. Found out for the shapes that the model has: at most
    `MOST_PADDING`. None where that is not enough, for other devices, and for weights that are quantised or large.
    """
    maps = [module for module in core.model.modules() if isinstance(module, torch.nn.Linear)]
    if (
        core.device.type != "cpu"
        or bits_of(core.model) != 16
        or any(m.weight.numel() > LARGEST_TRIED for m in maps)
    ):
        return None
    generator, invariant = torch.Generator().manual_seed(0), 1
    # The first of each shape: of the last layer only the value projection runs, and the rest may be zeros.
    for module in {tuple(module.weight.shape): module for module in reversed(maps)}.values():
        rows = torch.randn(2 * MOST_PADDING, module.in_features, generator=generator).to(core.dtype)
        among_many = module(rows)
        for count in range(MOST_PADDING, 0, -16):
            if not torch.equal(module(rows[:count]), among_many[:count]):
                invariant = max(invariant, count + 16)
                break
    return invariant if invariant <= MOST_PADDING else None


def _check_attention_kinds(core: Backbone) -> None:
    """Refuse masks that a short trial could not tell from the ones made here."""
    kinds = set(getattr(core.config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds or "local" in (getattr(core.config, "attention_layers", None) or ()):
        raise BackboneError(
            f"{core.name} has attention layers of the kind {', '.join(sorted(kinds)) or 'local'}. {ADVICE}"
        )


def _checked_values(core: Backbone, ids: list[int]) -> list[Tensor]:
    """Value vectors of every layer, (1, H, T, D), after checks 1 and 2."""
    recorder = Recorder(core.last_layer, [len(ids)])
    outputs: dict[int, list[Tensor]] = {}

    def keep(_module: object, _inputs: object, output: object) -> None:
        """A linear map's output, under the layer whose cache update comes next."""
        if isinstance(output, Tensor):
            outputs.setdefault(len(recorder.values), []).append(output)

    hooks = [
        module.register_forward_hook(keep)
        for module in core.model.modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    try:
        values = _values(core, ids, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    shapes = {tuple(v.shape) for v in values}
    count = core.last_layer + 1
    if len(values) != count or len(shapes) != 1:
        raise BackboneError(
            f"{core.name} was asked for the value vectors of layers 0..{core.last_layer}; its cache received "
            f"{len(values)} layers with shapes {sorted(map(str, shapes))}. {ADVICE}"
        )
    for layer, value in enumerate(values):
        if not _is_slice_of(value[0], outputs.get(layer, [])):
            raise BackboneError(
                f"In layer {layer} of {core.name} the cache holds something else than the output of a value "
                f"projection (normalised or compressed values?). {ADVICE}"
            )
    return values


def _values(
    core: Backbone, ids: list[int], recorder: Recorder | None = None, *, first: int = 0
) -> list[Tensor]:
    """Every layer's values with all tokens run at once, from position ``first`` on, under the model's own mask."""
    places = torch.arange(first, first + len(ids), device=core.device)
    return _run(
        core, ids, torch.ones(1, len(ids), dtype=torch.long, device=core.device), places, recorder
    )


def _block_masked_run(core: Backbone, ids: list[int]) -> list[Tensor]:
    """An encoder's reference: one run in which the document's tokens do not see the query's."""
    positions = torch.tensor([*range(CUT), *range(IDS - CUT)], device=core.device)
    allowed = torch.ones(IDS, IDS, dtype=torch.bool, device=core.device)
    allowed[:CUT, CUT:] = False
    return _run(core, ids, core.mask(allowed[None]), positions)


def _run(
    core: Backbone,
    ids: list[int],
    mask: Tensor,
    positions: Tensor,
    recorder: Recorder | None = None,
) -> list[Tensor]:
    """Every layer's values, (1, H, T, D)."""
    recorder = (
        Recorder(core.last_layer, [len(ids)]) if recorder is None else recorder
    )  # an empty cache is falsy
    with core.ended_by(recorder):
        core.model(
            **core.inputs(recorder, torch.tensor([ids], device=core.device), mask, positions[None])
        )
    return [
        values[:, :, : len(ids)] for values in recorder.values
    ]  # they are filled up to whole lanes


def _near(core: Backbone) -> float:
    """Rounding stays far below this distance, and a wrong mask or position far above.

    Products with quantised weights round more.
    """
    return 1e-3 if core.dtype == torch.float32 and bits_of(core.model) == 16 else 0.1


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
