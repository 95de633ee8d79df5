"""Properties of a language model's weights, quantised or not."""

from typing import Literal

import torch


def bits_of(model: torch.nn.Module) -> Literal[4, 8, 16]:
    """Bits of most weights: 4 or 8 where bitsandbytes quantised them, else 16 (also for 32)."""
    if getattr(model, "is_loaded_in_4bit", False):
        return 4
    return 8 if getattr(model, "is_loaded_in_8bit", False) else 16
