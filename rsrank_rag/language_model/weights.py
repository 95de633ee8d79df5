"""Properties of a language model's weights, quantised or not."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def bits_of(model: torch.nn.Module) -> int:
    """Bits of most weights: 4 or 8 where bitsandbytes quantised them, else 16 (also for 32)."""
    if getattr(model, "is_loaded_in_4bit", False):
        return 4
    return 8 if getattr(model, "is_loaded_in_8bit", False) else 16


def fingerprint(model: torch.nn.Module) -> str:
    """sha256 of all weights, which differs for any other checkpoint, dtype or quantisation."""
    # bitsandbytes repacks its weights for state_dict(), so that is not used.
    weights = (*model.named_parameters(), *model.named_buffers())
    # hashlib releases the interpreter's lock. Each of the four threads holds a copy of a weight.
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(_digest, weights)
        return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(named: tuple[str, Tensor]) -> str:
    name, weight = named
    digest = hashlib.sha256(f"{name} {type(weight).__name__}".encode())
    # bitsandbytes keeps scales as attributes: SCB of int8 weights, quant_state of nf4 weights.
    scales = [
        getattr(weight, "SCB", None),
        getattr(getattr(weight, "quant_state", None), "absmax", None),
    ]
    for tensor in (weight.detach(), *scales):
        if tensor is not None:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.reshape(-1).cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
