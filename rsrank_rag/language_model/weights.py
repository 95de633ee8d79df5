"""What a language model's weights are made of, quantised or not."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
    """sha256 of every entry of every weight: it differs for any other checkpoint, dtype or quantisation."""
    # Not state_dict(): bitsandbytes repacks its weights when it is asked for one.
    named = (*model.named_parameters(), *model.named_buffers())
    with ThreadPoolExecutor(
        4
    ) as threads:  # hashing lets other threads work; each holds a weight's copy
        return hashlib.sha256("".join(threads.map(_digest, named)).encode()).hexdigest()


def _digest(named: tuple[str, Tensor]) -> str:
    name, weight = named
    digest = hashlib.sha256(f"{name} {type(weight).__name__}".encode())
    if is_traceable_wrapper_subclass(weight):
        # The rest of a subclass says how it multiplies: fp8 with rounded activations reads documents differently.
        digest.update(repr(weight.__tensor_flatten__()[1]).encode())
    scales = (
        getattr(weight, "SCB", None),
        getattr(getattr(weight, "quant_state", None), "absmax", None),
    )
    parts = [
        *plain(name, weight.detach()),
        *((f"{name}.scale", part) for part in scales if part is not None),
    ]
    for title, part in parts:
        digest.update(f"{title} {tuple(part.shape)} {part.dtype}".encode())
        digest.update(part.reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
