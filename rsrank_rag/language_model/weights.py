"""What a language model's weights are made of, quantised or not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLE = 1024
"""Entries of a weight that are looked at."""


def plain(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The ordinary tensors that a weight consists of, with their names: itself, or those inside a tensor subclass."""
    if not is_traceable_wrapper_subclass(weight):
        yield name, weight
        return
    for part in weight.__tensor_flatten__()[0]:
        yield from plain(f"{name}.{part}", getattr(weight, part))


def bits_of(model: torch.nn.Module) -> int:
    """Bits of most weights: 4 and 8 where bitsandbytes quantised them, 8 where they are fp8, else 16 (also for 32)."""
    if getattr(model, "is_loaded_in_4bit", False):
        return 4
    return 8 if getattr(model, "is_loaded_in_8bit", False) or is_fp8(model) else 16


def is_fp8(model: torch.nn.Module) -> bool:
    """Whether any weights are fp8."""
    return any(
        part.dtype.is_floating_point and part.dtype.itemsize == 1
        for name, weight in model.named_parameters()
        for _, part in plain(name, weight)
    )


def fingerprint(model: torch.nn.Module) -> str:
    """Hash of evenly spread entries of every weight: it differs for any other checkpoint, dtype or quantisation."""
    digest = hashlib.sha256()
    # Not state_dict(): bitsandbytes repacks its weights when it is asked for one.
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(weight):
            # The rest of a subclass says how it multiplies: fp8 with rounded activations reads documents differently.
            rest = weight.__tensor_flatten__()[1]
            digest.update(f"{name} {type(weight).__name__} {rest}".encode())
        for title, part in plain(name, weight.detach()):
            flat = part.reshape(-1)
            sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].cpu().contiguous()
            digest.update(f"{title} {tuple(part.shape)} {part.dtype}".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
