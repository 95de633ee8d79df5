"""The linear maps of a language model as a CPU computes them fastest.

In bfloat16, bias and GELU are added while a product is written: torch's own writes it on top of a copied bias and reads
all of it again for GELU, which in the feed-forward layers of a small encoder takes as long as the product itself.

Where there is no AMX, documents' maps compute in 8 bits (``dtype="int8"``; another thing than ``load_in_8bit``,
which saves memory and costs time here), queries' as ever. A token comes out the same beside any others, as scales are
its own or fixed. An encoder's are: by a trial at load. So bias, GELU and the next rounding are done with the product.

Axes: N rows, T tokens, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .fusion import layers_of
from .options import has_fast_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..method.backbone import Backbone
    from ..method.concurrent_batches import Ids
    from ..method.template import PromptTokenizer


def linear_maps(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear, bool]]:
    """Each linear map's parent, its name there, itself, and whether GELU follows it as BERT and its kin have it."""
    for parent in model.modules():
        activation = type(getattr(parent, "intermediate_act_fn", None)).__name__
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                gelu = (name == "dense" and activation == "GELUActivation") or getattr(
                    child, "gelu", False
                )
                yield parent, name, child, gelu


class FusedLinear(nn.Linear):
    """A linear map, (..., in) to (..., out), with the given one's weights; with ``gelu``, its GELU too."""

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias, self.gelu = linear.weight, linear.bias, gelu

    def forward(self, inputs: Tensor) -> Tensor:
        """Torch's own way for gradients and compilers, which the other is not made for, and for a map moved or cast."""
        fits = inputs.device.type == "cpu" and inputs.dtype == self.weight.dtype == torch.bfloat16
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not fits:
            outputs = super().forward(inputs)
            return nn.functional.gelu(outputs) if self.gelu else outputs
        activation = "gelu" if self.gelu else "none"
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, activation, [], "none"
        )
        return fused


def fuse_linear_maps(model: PreTrainedModel) -> None:
    """Replace linear maps with bias and plain weights, in bfloat16 on a processor that multiplies it; no others."""
    if (
        model.device.type != "cpu"
        or model.dtype != torch.bfloat16
        or not has_fast_bfloat16(model.device)
    ):
        return
    try:
        with torch.no_grad():
            FusedLinear(nn.Linear(8, 8, dtype=torch.bfloat16), gelu=True)(
                torch.ones(1, 8, dtype=torch.bfloat16)
            )
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # of torch for other processors, or an older one: it is private
        return
    for parent, name, child, gelu in list(linear_maps(model)):
        if (
            type(child) is nn.Linear
            and type(child.weight) is nn.Parameter
            and child.bias is not None
        ):
            setattr(parent, name, FusedLinear(child, gelu=gelu))
            if gelu:
                parent.intermediate_act_fn = nn.Identity()


class Steps:
    """How numbers that enter linear maps become whole ones: so many steps of each channel's size above zero's place.

    Args:
        lowest: Of the numbers, for each channel (C,) or for all.
        highest: The same.
        weights: Of all maps that they enter, each (..., C).
    """

    def __init__(self, lowest: Tensor, highest: Tensor, weights: Sequence[Tensor]) -> None:
        # A few channels are ten times larger than others: the weights take over half of that, as SmoothQuant does.
        largest = torch.maximum(-lowest, highest).clamp_min(1e-4)
        even = (
            (largest / torch.cat(list(weights)).abs().amax(0).clamp_min(1e-6)).sqrt()
            if largest.ndim
            else 1.0
        )
        low, high = (lowest / even).min().clamp_max(-1e-6), (highest / even).max().clamp_min(1e-6)
        self.size, self.zero = even * (high - low) / 255, round(float(-low * 255 / (high - low)))
        self._shift, self._rate = torch.tensor(self.zero - 128.0), 1 / self.size

    def __call__(self, numbers: Tensor) -> Tensor:
        """The numbers as codes; what is codes already as it is."""
        return (
            numbers
            if numbers.dtype == torch.uint8
            else codes(torch.addcmul(self._shift, numbers, self._rate))
        )


class RoundedLinear(nn.Module):
    """A linear map, (..., in) to (..., out), whose weights are rounded once and whose inputs are as they come.

    Args:
        steps: Of its inputs; None for a scale for each token.
        gelu: Whether GELU follows.
        following: Steps of the map that takes what GELU gives, which is rounded at once as that wants it.
    """

    def __init__(
        self,
        linear: nn.Linear,
        steps: Steps | None = None,
        *,
        gelu: bool = False,
        following: Steps | None = None,
    ) -> None:
        super().__init__()
        weight, self.dtype, self.gelu, self.steps = (
            linear.weight.detach().float(),
            linear.weight.dtype,
            gelu,
            steps,
        )
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.leaving = (
            (1.0, 0, None)
            if following is None
            else (float(following.size), following.zero, torch.uint8)
        )
        if steps is not None:
            weight = weight * steps.size
        self.scales = (weight.abs().amax(1) / largest_weight()).clamp_min(1e-12)
        self.zeros = torch.zeros(len(weight), dtype=torch.long)
        self.packed = torch.ops.onednn.qlinear_prepack(
            (weight / self.scales[:, None]).round().to(torch.int8), None
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Sums of products are exact; GELU is taken of what they give."""
        if self.steps is not None:
            return self._product(self.steps(inputs), self.steps.zero, self.bias, self.dtype)
        size = (
            torch.maximum(inputs.amax(-1, True), -inputs.amin(-1, True)).float() / 127
        ).clamp_min_(1e-12)
        sums = self._product(codes(inputs / size), 128, None, torch.float32).mul_(size)
        return (sums if self.bias is None else sums.add_(self.bias)).to(inputs.dtype)

    def _product(
        self, inputs: Tensor, zero: int, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(inputs, 1.0, zero, self.packed, self.scales, self.zeros, bias, *self.leaving[:2]),
            self.leaving[2] or dtype,
            *("gelu" if self.gelu else "none", [], "none"),
        )
        return found


def codes(numbers: Tensor) -> Tensor:
    """Rounded, cut to what int8 holds, and then without a sign, with which oneDNN is slow: uint8, 128 for 0."""
    return numbers.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8).bitwise_xor_(128)


@cache
def largest_weight() -> int:
    """Of the whole numbers that weights become: without VNNI, two of them times 255 have to fit into 16 bits.

    A product says which: oneDNN may be told to do without what the processor has (``ONEDNN_MAX_CPU_ISA``).
    """
    inputs, weights = (
        torch.full((1, 64), 255, dtype=torch.uint8),
        torch.full((8, 64), 127, dtype=torch.int8),
    )
    packed, zeros = (
        torch.ops.onednn.qlinear_prepack(weights, None),
        torch.zeros(8, dtype=torch.long),
    )
    sums = torch.ops.onednn.qlinear_pointwise(
        *(
            inputs,
            1.0,
            0,
            packed,
            torch.ones(8),
            zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "none",
        )
    )
    return 127 if bool((sums == 64 * 255 * 127).all()) else 63


def samples(prompts: PromptTokenizer) -> list[Ids]:
    """Token ids that an encoder is tried out on: pieces of words at random, within the template.

    Ranges come out as good as with 300 passages, see research/docs/speed.md; without the template they would not.
    """
    words = torch.randint(
        len(prompts.tokenizer), (32, 14), generator=torch.Generator().manual_seed(0)
    )
    return [(*prompts.instruction, *row, *prompts.separator) for row in words.tolist()]


def rounded(core: Backbone, prompts: PromptTokenizer) -> PreTrainedModel:
    """A model that shares the given one's weights, except that its layers' linear maps are rounded: for documents.

    What enters an encoder's maps when it reads `samples` gives the scales. In a decoder, where single tokens are a
    thousand times larger than others, each token has its own.
    """
    shared: dict[int, Any] = {
        id(part): part for part in (*core.model.parameters(), *core.model.buffers())
    }
    maps = [part for part in layers_of(core.model).modules() if isinstance(part, nn.Linear)]
    followed = {linear: parent for parent, _, linear, gelu in linear_maps(core.model) if gelu}
    steps = dict.fromkeys(maps) if core.causal else _steps(core, maps, samples(prompts), followed)
    for linear, after in zip(steps, [*list(steps.values())[1:], None], strict=True):
        gelu = linear in followed
        shared[id(linear)] = RoundedLinear(
            linear, steps[linear], gelu=gelu, following=after if gelu else None
        )
        if gelu:
            shared[id(followed[linear].intermediate_act_fn)] = nn.Identity()
    model = copy.deepcopy(core.model, shared)
    for module in model.modules():
        inside = [child.steps for child in module.children() if isinstance(child, RoundedLinear)]
        if (
            len(inside) > 1 and inside[0] is not None and len(set(inside)) == 1
        ):  # keys, values, ...: rounded once
            module.register_forward_pre_hook(partial(_at_the_door, inside[0]))
    return model


def _at_the_door(steps: Steps, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (steps(inputs[0]), *inputs[1:]) if inputs else inputs


@torch.no_grad()
def _steps(
    core: Backbone, maps: Sequence[nn.Linear], texts: Sequence[Ids], followed: Container[nn.Linear]
) -> dict[nn.Linear, Steps]:
    """Of what enters these linear maps when documents are run, in that order; maps that take the same share theirs."""
    entering: dict[nn.Linear, Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, inputs: entering.__setitem__(m, inputs[0]))
        for m in maps
    ]
    core.prefill(texts, exact=True)
    for hook in hooks:
        hook.remove()
    steps: dict[nn.Linear, Steps] = {}
    for before, (linear, seen) in zip([None, *entering], entering.items(), strict=False):
        numbers, takers = (
            seen.flatten(0, -2).float(),
            [taker for taker in entering if entering[taker] is seen],
        )
        lowest, highest = numbers.amin(0), numbers.amax(0)
        if before in followed:  # few tokens are cut, and finer steps are left to all
            lowest, highest = lowest.min(), 0.7 * highest.max()
        steps[linear] = steps.get(takers[0]) or Steps(
            lowest, highest, [taker.weight.float() for taker in takers]
        )
    return steps
