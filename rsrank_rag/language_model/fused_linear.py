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
from .weights import bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FusedLinear(nn.Linear):
    """A linear map, (..., in) to (..., out), with the given one's weights; with ``gelu``, its GELU too."""

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias, self.gelu = linear.weight, linear.bias, gelu

    def forward(self, inputs: Tensor) -> Tensor:
        """Torch's own way where gradients are wanted: the other has none."""
        if torch.is_grad_enabled():
            outputs = super().forward(inputs)
            return nn.functional.gelu(outputs) if self.gelu else outputs
        activation = "gelu" if self.gelu else "none"
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, activation, [], "none")
        return fused


def fuse_linear_maps(model: PreTrainedModel) -> None:
    """Replace the linear maps that have a bias, in bfloat16 on a processor that multiplies it; leave all others."""
    plain = model.device.type == "cpu" and model.dtype == torch.bfloat16 and bits_of(model) == 16
    if not plain or not has_fast_bfloat16(model.device):
        return
    try:
        with torch.no_grad():
            FusedLinear(nn.Linear(8, 8, dtype=torch.bfloat16), gelu=True)(torch.ones(1, 8, dtype=torch.bfloat16))
    except (AttributeError, RuntimeError, TypeError):  # of torch for other processors, or an older one: it is private
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.bias is not None:
                # BERT and its kin name the two parts so.
                gelu = name == "dense" and type(getattr(parent, "intermediate_act_fn", None)) is GELUActivation
                setattr(parent, name, FusedLinear(child, gelu=gelu))
                if gelu:
                    parent.intermediate_act_fn = nn.Identity()
