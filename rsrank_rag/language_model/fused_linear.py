"""Linear maps that add their bias, and apply GELU, while they write the product: for bfloat16 on a CPU.

torch's own writes the product on top of a copied bias and reads all of it again for the activation. Of the feed-forward
layers of a small encoder these two take as long as the product itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from .options import has_fast_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and type(child.weight) is nn.Parameter and child.bias is not None:
                # BERT and its kin name the two parts so.
                gelu = name == "dense" and type(getattr(parent, "intermediate_act_fn", None)) is GELUActivation
                setattr(parent, name, FusedLinear(child, gelu=gelu))
                if gelu:
                    parent.intermediate_act_fn = nn.Identity()
