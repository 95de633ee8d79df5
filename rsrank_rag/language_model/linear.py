"""Linear maps of a language model as a CPU computes them fastest.

`FusedLinear` is for bfloat16: oneDNN adds bias and GELU while it writes a product. Torch's own map
copies the bias first and reads the product again for GELU. In the feed-forward layers of a small
encoder, that takes as long as the product.

`Int8Linear` is for documents where there is no AMX (``dtype="int8"``; ``load_in_8bit`` is another
setting that saves memory and no time). Queries run through the exact model. A token's numbers do
not depend on other tokens, because scales are fixed or are the token's own. The scales of an
encoder are fixed by a calibration run at load, so that bias, GELU and the next rounding happen
while a product is written.

Both call operators of torch that are not documented: checked with torch 2.13, and with a fallback
where an operator is missing.

Axes: N rows, T tokens, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..method.arrays import to_numpy
from .fusion import layers_of
from .options import has_fast_bfloat16
from .quantisation import calibration_ids, fixed_parameters, ranges, rounded_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..method.backbone import Backbone
    from ..method.template import PromptTokenizer


class LinearMap(NamedTuple):
    """A linear map of a model.

    Attributes:
        parent: The module that holds it.
        name: Its name there.
        linear: The map.
        gelu: Whether GELU follows, as in BERT-like models.
    """

    parent: nn.Module
    name: str
    linear: nn.Linear
    gelu: bool


def linear_maps(model: nn.Module) -> Iterator[LinearMap]:
    """All linear maps of a model."""
    for parent in model.modules():
        activation = type(getattr(parent, "intermediate_act_fn", None)).__name__
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                gelu = name == "dense" and activation == "GELUActivation"
                yield LinearMap(parent, name, child, gelu or getattr(child, "gelu", False))


class FusedLinear(nn.Linear):
    """A linear map, (..., in) to (..., out), with the weights of another one.

    Args:
        linear: The map whose weights it shares.
        gelu: Whether to apply GELU to the output.
    """

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.gelu = gelu

    def forward(self, inputs: Tensor) -> Tensor:
        """Use torch's own map for gradients, for compilers, and after a move or a cast."""
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
    """Replace a bfloat16 model's maps that have a bias, on a CPU that multiplies bfloat16."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.bfloat16
    if not on_cpu or not has_fast_bfloat16(model.device):
        return
    try:
        with torch.no_grad():
            # Random weights would advance the process's random numbers.
            linear = nn.Linear(8, 8, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
            FusedLinear(linear, gelu=True)(torch.ones(1, 8, dtype=torch.bfloat16))
    # This torch has no such operator.
    except (AttributeError, RuntimeError, TypeError):
        return
    for parent, name, linear, gelu in list(linear_maps(model)):
        plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
        if plain and linear.bias is not None:
            setattr(parent, name, FusedLinear(linear, gelu=gelu))
            if gelu:
                parent.intermediate_act_fn = nn.Identity()


class QuantisationParameters:
    """Scale and zero point of the numbers that enter linear maps, one scale for each channel.

    A number x becomes round(x / scale + zero_point), clipped to 0..255.

    Args:
        lowest: The smallest numbers, for each channel (C,) or for all ().
        highest: The largest numbers, likewise.
        weights: The weights of all maps that take these numbers, each (..., C).
    """

    def __init__(self, lowest: Tensor, highest: Tensor, weights: Sequence[Tensor]) -> None:
        of_maps = [to_numpy(weight.float()) for weight in weights]
        scale, zero = fixed_parameters(to_numpy(lowest.float()), to_numpy(highest.float()), of_maps)
        self.scale = torch.from_numpy(scale)
        self.zero_point = zero
        self._signed_zero = torch.tensor(self.zero_point - 128.0)
        self._rate = 1 / self.scale

    def quantise(self, numbers: Tensor) -> Tensor:
        """Numbers (..., C) as uint8; uint8 is returned as it is."""
        if numbers.dtype == torch.uint8:
            return numbers
        return as_uint8(torch.addcmul(self._signed_zero, numbers, self._rate))


def as_uint8(numbers: Tensor) -> Tensor:
    """Numbers -128..127, rounded and clipped in place, as uint8 0..255.

    oneDNN is slow with signed inputs.
    """
    return numbers.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8).bitwise_xor_(128)


class Int8Linear(nn.Module):
    """A linear map, (..., in) to (..., out), with weights in int8.

    Args:
        linear: The map whose weights are rounded.
        inputs: Quantisation parameters of its inputs; None for a scale for each token.
        gelu: Whether to apply GELU to the output.
        outputs: Quantisation parameters of the next map's inputs. The output is then uint8.
    """

    def __init__(
        self,
        linear: nn.Linear,
        inputs: QuantisationParameters | None = None,
        *,
        gelu: bool = False,
        outputs: QuantisationParameters | None = None,
    ) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.activation = "gelu" if gelu else "none"
        self.inputs = inputs
        self.outputs = outputs
        weight = linear.weight.detach().float()
        if inputs is not None:
            weight = weight * inputs.scale
        self.weight = _PackedWeight.of(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply in int8, and add up exactly."""
        if self.inputs is not None:
            codes = self.inputs.quantise(inputs)
            return self._product(codes, self.inputs.zero_point, self.bias, self.dtype)
        largest = torch.maximum(inputs.amax(-1, True), -inputs.amin(-1, True))
        scale = (largest.float() / 127).clamp_min_(1e-12)
        sums = self._product(as_uint8(inputs / scale), 128, None, torch.float32).mul_(scale)
        return (sums if self.bias is None else sums.add_(self.bias)).to(inputs.dtype)

    def _product(
        self, codes: Tensor, zero_point: int, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if self.outputs is None:
            return self.weight.product(codes, zero_point, bias, dtype, self.activation)
        return self.weight.product(
            codes,
            zero_point,
            bias,
            torch.uint8,
            self.activation,
            float(self.outputs.scale),
            self.outputs.zero_point,
        )


class _PackedWeight(NamedTuple):
    """An int8 weight as oneDNN reads it, with a scale for each of its rows."""

    packed: Tensor
    scales: Tensor
    zero_points: Tensor

    @classmethod
    def of(cls, weight: Tensor, largest: int | None = None) -> _PackedWeight:
        """Round a weight (out, in) to whole numbers up to ``largest``."""
        codes, scales = rounded_weight(to_numpy(weight), largest or largest_weight())
        packed = torch.ops.onednn.qlinear_prepack(torch.from_numpy(codes), None)
        return cls(packed, torch.from_numpy(scales), torch.zeros(len(weight), dtype=torch.long))

    def product(
        self,
        codes: Tensor,
        zero_point: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: str = "none",
        output_scale: float = 1.0,
        output_zero_point: int = 0,
    ) -> Tensor:
        """The product with uint8 inputs (..., in), as ``dtype`` (..., out)."""
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes,
            1.0,
            zero_point,
            self.packed,
            self.scales,
            self.zero_points,
            bias,
            output_scale,
            output_zero_point,
            dtype,
            activation,
            [],
            "none",
        )
        return result


@cache
def largest_weight() -> int:
    """The largest whole number that a weight is rounded to: 127 or 63.

    Without VNNI, the processor adds two products of a weight and 255 in 16 bits. A product shows
    which it does, because ``ONEDNN_MAX_CPU_ISA`` may hide the processor's instructions from oneDNN.
    """
    weight = _PackedWeight.of(torch.full((8, 64), 127.0), largest=127)
    sums = weight.product(torch.full((1, 64), 255, dtype=torch.uint8), 0, None, torch.float32)
    return 127 if bool((sums == 64 * 255 * 127).all()) else 63


def int8_copy(core: Backbone, prompts: PromptTokenizer) -> PreTrainedModel:
    """A copy of the model for documents: its layers' linear maps in int8, all else shared.

    In a decoder, single tokens are a thousand times larger than others, so that each token has a
    scale of its own.
    """
    model = core.model
    layers = layers_of(model)
    maps = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    parents = {linear: parent for parent, _, linear, gelu in linear_maps(model) if gelu}
    parameters: dict[nn.Linear, QuantisationParameters | None] = dict.fromkeys(maps)
    if not core.causal:
        parameters = {**_calibrate(core, maps, parents.keys(), calibration_ids(prompts))}
    replaced: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        replaced[id(tensor)] = tensor
    following = [*list(parameters.values())[1:], None]
    for (linear, inputs), outputs in zip(parameters.items(), following, strict=True):
        gelu = linear in parents
        replaced[id(linear)] = Int8Linear(
            linear, inputs, gelu=gelu, outputs=outputs if gelu else None
        )
        if gelu:
            replaced[id(parents[linear].intermediate_act_fn)] = nn.Identity()
    int8_model = copy.deepcopy(model, replaced)
    for module in int8_model.modules():
        _share_quantisation(module)
    return int8_model


def _share_quantisation(module: nn.Module) -> None:
    """Quantise the input of query, key and value maps once, where it enters their parent."""
    inputs = [child.inputs for child in module.children() if isinstance(child, Int8Linear)]
    if len(inputs) > 1 and inputs[0] is not None and len(set(inputs)) == 1:
        module.register_forward_pre_hook(partial(_quantise_first, inputs[0]))


def _quantise_first(
    parameters: QuantisationParameters, _module: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (parameters.quantise(inputs[0]), *inputs[1:]) if inputs else inputs


@torch.no_grad()
def _calibrate(
    core: Backbone,
    maps: Sequence[nn.Linear],
    before_gelu: Collection[nn.Linear],
    texts: Sequence[tuple[int, ...]],
) -> dict[nn.Linear, QuantisationParameters]:
    """Quantisation parameters of the maps that documents run through, in the order of the run.

    Maps that take the same tensor share their parameters.
    """
    inputs: dict[nn.Linear, Tensor] = {}

    def record(linear: nn.Linear, arguments: tuple[Tensor, ...]) -> None:
        inputs[linear] = arguments[0]

    hooks = [linear.register_forward_pre_hook(record) for linear in maps]
    core.prefill(texts, exact=True)
    for hook in hooks:
        hook.remove()
    parameters: dict[nn.Linear, QuantisationParameters] = {}
    previous: nn.Linear | None = None
    for linear, tensor in inputs.items():
        sharing = [other for other in inputs if inputs[other] is tensor]
        if sharing[0] in parameters:
            parameters[linear] = parameters[sharing[0]]
        else:
            weights = [other.weight for other in sharing]
            reached = ranges(to_numpy(tensor.float()), after_gelu=previous in before_gelu)
            lowest, highest = map(torch.as_tensor, reached)
            parameters[linear] = QuantisationParameters(lowest, highest, weights)
        previous = linear
    return parameters
