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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .fusion import layers_of
from .options import has_fast_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..method.backbone import Backbone
    from ..method.template import PromptTokenizer


def linear_maps(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear, bool]]:
    """Each linear map's parent, its name there, itself, and whether GELU follows it as BERT and its kin have it."""
    for parent in model.modules():
        activation = type(getattr(parent, "intermediate_act_fn", None)).__name__
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                gelu = (name == "dense" and activation == "GELUActivation") or getattr(child, "gelu", False)
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
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, activation, [], "none")
        return fused


def fuse_linear_maps(model: PreTrainedModel) -> None:
    """Replace linear maps with bias and plain weights, in bfloat16 on a processor that multiplies it; no others."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not has_fast_bfloat16(model.device):
        return
    try:
        with torch.no_grad():
            FusedLinear(nn.Linear(8, 8, dtype=torch.bfloat16), gelu=True)(torch.ones(1, 8, dtype=torch.bfloat16))
    except (AttributeError, RuntimeError, TypeError):  # of torch for other processors, or an older one: it is private
        return
    for parent, name, child, gelu in list(linear_maps(model)):
        if type(child) is nn.Linear and type(child.weight) is nn.Parameter and child.bias is not None:
            setattr(parent, name, FusedLinear(child, gelu=gelu))
            if gelu:
                parent.intermediate_act_fn = nn.Identity()


Range = tuple[Tensor, Tensor]  # the lowest and the highest number


class RoundedLinear(nn.Module):
    """A linear map, (..., in) to (..., out), whose weights are rounded once and whose inputs are as they come.

    Args:
        entering: Range of its inputs, for each channel (C,) or for all; None for a scale for each token.
        gelu: Whether GELU follows.
        following: The map that takes what GELU gives, which is rounded at once as that wants it: uint8.
    """

    size: Tensor | None = None
    zero = 128

    def __init__(
        self, linear: nn.Linear, entering: Range | None = None, *, gelu: bool = False, following: Any = None
    ) -> None:
        super().__init__()
        weight, self.dtype, self.gelu = linear.weight.detach().float(), linear.weight.dtype, gelu
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.leaving = (1.0, 0, None) if following is None else (float(following.size), following.zero, torch.uint8)
        if entering is not None:
            # A few channels are ten times larger than others: the weights take over half of that, as SmoothQuant does.
            largest = torch.maximum(-entering[0], entering[1]).clamp_min(1e-4)
            even = (largest / weight.abs().amax(0).clamp_min(1e-6)).sqrt() if largest.ndim else torch.ones(())
            low, high = (entering[0] / even).min().clamp_max(-1e-6), (entering[1] / even).max().clamp_min(1e-6)
            self.size, self.zero = even * (high - low) / 255, round(float(-low * 255 / (high - low)))
            weight = weight * self.size
        self.scales = (weight.abs().amax(1) / largest_weight()).clamp_min(1e-12)
        self.zeros = torch.zeros(len(weight), dtype=torch.long)
        self.packed = torch.ops.onednn.qlinear_prepack((weight / self.scales[:, None]).round().to(torch.int8), None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Sums of products are exact; GELU is taken of what they give."""
        if self.size is None:
            size = (torch.maximum(inputs.amax(-1, True), -inputs.amin(-1, True)).float() / 127).clamp_min_(1e-12)
            sums = self._product(codes(inputs / size), None, torch.float32).mul_(size)
            return (sums if self.bias is None else sums.add_(self.bias)).to(inputs.dtype)
        if inputs.dtype != torch.uint8:
            inputs = codes(torch.addcmul(torch.tensor(self.zero - 128.0), inputs, 1 / self.size))
        return self._product(inputs, self.bias, self.dtype)

    def _product(self, inputs: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(inputs, 1.0, self.zero, self.packed, self.scales, self.zeros, bias, *self.leaving[:2]),
            self.leaving[2] or dtype,
            *("gelu" if self.gelu else "none", [], "none"),
        )
        return found


def codes(numbers: Tensor) -> Tensor:
    """Rounded, cut to what int8 holds, and then without a sign, with which oneDNN is slow: uint8, 128 for 0."""
    return numbers.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8).bitwise_xor_(128)


def largest_weight() -> int:
    """Of the whole numbers that weights become: without VNNI, two of them times 255 have to fit into 16 bits."""
    return 127 if any(map(torch.cpu.get_capabilities().get, ("avx512_vnni", "avx_vnni"))) else 63


def samples(prompts: PromptTokenizer) -> Tensor:
    """Token ids that an encoder is tried out on, (N, T): pieces of words at random, within the template.

    Ranges come out as good as with 300 passages, see docs/benchmarks.md; without the template they would not.
    """
    words = torch.randint(len(prompts.tokenizer), (32, 14), generator=torch.Generator().manual_seed(0))
    return torch.tensor([[*prompts.instruction, *row, *prompts.separator] for row in words.tolist()])


def rounded(core: Backbone, prompts: PromptTokenizer) -> PreTrainedModel:
    """A model that shares the given one's weights, except that its layers' linear maps are rounded: for documents.

    What enters an encoder's maps when it reads `samples` gives the scales. In a decoder, where single tokens are a
    thousand times larger than others, each token has its own.
    """
    shared: dict[int, Any] = {id(part): part for part in (*core.model.parameters(), *core.model.buffers())}
    maps = [part for part in layers_of(core.model).modules() if isinstance(part, nn.Linear)]
    followed = {linear: parent for parent, _, linear, gelu in linear_maps(core.model) if gelu}
    following, ranges = None, dict.fromkeys(maps) if core.causal else _ranges(core.model, maps, samples(prompts))
    for before, linear in reversed(list(zip([None, *ranges], ranges, strict=False))):
        gelu, seen = linear in followed, ranges[linear]
        if seen is not None and before in followed:  # few tokens are cut, and finer steps are left to all
            seen = seen[0].min(), 0.7 * seen[1].max()
        following = RoundedLinear(linear, seen, gelu=gelu, following=following if gelu else None)
        shared[id(linear)] = following
        if gelu:
            shared[id(followed[linear].intermediate_act_fn)] = nn.Identity()
    return copy.deepcopy(core.model, shared)


@torch.no_grad()
def _ranges(model: PreTrainedModel, maps: Sequence[nn.Linear], ids: Tensor) -> dict[nn.Linear, Range]:
    """What enters these linear maps when the model reads tokens (N, T), in the order in which they run."""
    ranges: dict[nn.Linear, Range] = {}

    def see(linear: nn.Linear, inputs: tuple[Tensor]) -> None:
        numbers = inputs[0].flatten(0, -2).float()
        ranges[linear] = (numbers.amin(0), numbers.amax(0))

    hooks = [linear.register_forward_pre_hook(see) for linear in maps]
    model(input_ids=ids.to(model.device))
    for hook in hooks:
        hook.remove()
    return ranges
