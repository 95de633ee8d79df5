"""Documents' linear maps in 8 bits on a CPU, which is faster than float32 where there is no bfloat16: ``dtype="int8"``.

Another thing than ``load_in_8bit`` (bitsandbytes), which saves memory and costs time on a CPU. Each output of a map has
a scale of its own, and each token, so that a token comes out the same beside any others. Queries are computed as ever.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .fusion import layers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 127  # of the whole numbers that inputs and weights become


class RoundedLinear(nn.Module):
    """A linear map, (..., in) to (..., out), whose weights are rounded once and whose inputs are as they come."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, self.bias = linear.weight.detach().float(), linear.bias
        self.gelu = getattr(linear, "gelu", False)  # of a `FusedLinear`
        self.scales = (weight.abs().amax(1) / LARGEST).clamp_min(1e-12)
        self.zeros = torch.zeros(len(weight), dtype=torch.long)
        codes = (weight / self.scales[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Each token's entries become whole numbers up to `LARGEST`; their sums are exact."""
        largest = torch.maximum(inputs.amax(-1, keepdim=True), inputs.amin(-1, keepdim=True).neg_()).float()
        size = largest.div_(LARGEST).clamp_min_(1e-12)
        # Without a sign, for which oneDNN has a fast way on every processor.
        codes = (inputs / size).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        sums = torch.ops.onednn.qlinear_pointwise(
            *(codes, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], "")
        )
        sums = sums.mul_(size) if self.bias is None else torch.addcmul(self.bias, sums, size)
        return (nn.functional.gelu(sums) if self.gelu else sums).to(inputs.dtype)


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares the given one's weights, except that its layers' linear maps are rounded."""
    shared: dict[int, object] = {id(part): part for part in (*model.parameters(), *model.buffers())}
    maps = {id(part): RoundedLinear(part) for part in layers_of(model).modules() if isinstance(part, nn.Linear)}
    return copy.deepcopy(model, {**shared, **maps})


@cache
def is_fast() -> bool:
    """Whether this processor and this torch multiply int8 matrices faster than float32 ones: x86 with VNNI.

    With AVX2 alone, nothing is gained: see docs/benchmarks.md.
    """
    try:
        RoundedLinear(nn.Linear(8, 8))(torch.ones(1, 8))
        has = torch.cpu.get_capabilities()
    except (AttributeError, RuntimeError, TypeError):  # of torch for other processors, or an older one
        return False
    return bool(has.get("avx512_vnni") or has.get("avx_vnni"))
