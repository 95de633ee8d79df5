"""How the language model attends in our runs, where transformers' own way does more work than there is.

1. Grouped queries behind a prefix. With a mask, transformers copies every key and value once for each query head of
   its group, in every layer: for a few query tokens after a long prefix that is most of the work. The heads of a group
   may as well stand in a row of queries.
2. Documents of different lengths. Padding is work, too: they can stand one behind another in a single row, where each
   attends to itself only.

Axes: N documents, H KV heads, G query heads of each, T query tokens, S keys, D head dimension, C tokens of all
documents together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .log_filters import importing_torchao

with importing_torchao():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rsrank_sdpa"
"""What this attention is called in a model's config. It takes the masks that SDPA takes."""

SPECIAL = ("position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices")
"""What models ask of attention that is more than a mask and a scale. It goes to transformers' own."""


@dataclass(frozen=True)
class Packing:
    """Sequences that stand one behind another in one row.

    Attributes:
        lengths: Tokens of each.
        ends: Where each starts and the last one ends, (N + 1,) int32.
        places: Each token's sequence and its position there, (2, C).
        causal: Whether a token sees only those before it.
    """

    lengths: tuple[int, ...]
    ends: Tensor
    places: Tensor
    causal: bool

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, *, causal: bool) -> Packing:
        """For sequences of these lengths."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        places = torch.stack([owner, torch.arange(len(owner)) - ends[owner]])
        return cls(tuple(lengths), ends.to(device, torch.int32), places.to(device), causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attention within each sequence, (1, C, H * G, D).

        Args:
            query: (1, H * G, C, D).
            key: (1, H, C, D).
            value: (1, H, C, D).
            scale: Of the products; None for 1 / sqrt(D).
        """
        return (self._by_kernel if query.is_cuda else self._one_by_one)(query, key, value, scale)

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """FlashAttention's kernel for sequences of different lengths, which comes with torch for CUDA."""
        from torch.nn.attention.varlen import varlen_attn

        tokens, others, theirs = (states[0].transpose(0, 1) for states in (query, key, value))  # (C, heads, D)
        longest = max(self.lengths)
        out = varlen_attn(
            tokens,
            others,
            theirs,
            self.ends,
            self.ends,
            longest,
            longest,
            scale=scale,
            window_size=(-1, 0 if self.causal else -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # as nothing else was asked for
        return out[None]

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """SDPA for each sequence, or each run of sequences of one length."""
        found, start = [], 0
        for length, alike in groupby(self.lengths):
            count = len(list(alike))
            stop = start + length * count
            rows, others, theirs = (
                states[0, :, start:stop].reshape(states.shape[1], count, length, -1).transpose(0, 1)
                for states in (query, key, value)
            )
            part = scaled_dot_product_attention(
                rows, others, theirs, is_causal=self.causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            found.append(part.transpose(1, 2).flatten(0, 1))
            start = stop
        return torch.cat(found)[None]

    def spread(self, states: Tensor, width: int) -> Tensor:
        """One row's states (1, H, C, D) as a row for each sequence, (N, H, width, D), 0 behind each."""
        return (self._spread_by_index if states.is_cuda else self._spread_by_slice)(states, width)

    def _spread_by_index(self, states: Tensor, width: int) -> Tensor:
        """One large operation, for devices that start each slowly."""
        found = states.new_zeros(len(self.lengths), width, states.shape[1], states.shape[3])
        found[self.places[0], self.places[1]] = states[0].transpose(0, 1)
        return found.transpose(1, 2).contiguous()

    def _spread_by_slice(self, states: Tensor, width: int) -> Tensor:
        """Many small copies, which on a CPU take half the time."""
        found = states.new_empty(len(self.lengths), states.shape[1], width, states.shape[3])
        start = 0
        for row, length in enumerate(self.lengths):
            found[row, :, :length] = states[0, :, start : start + length]
            found[row, :, length:] = 0
            start += length
        return found


class _Running(threading.local):
    packing: Packing | None = None


_RUNNING = _Running()


@contextmanager
def attending(packing: Packing) -> Iterator[None]:
    """While this lasts, models that run in this thread with our attention attend as ``packing`` says."""
    before, _RUNNING.packing = _RUNNING.packing, packing
    try:
        yield
    finally:
        _RUNNING.packing = before


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Scaled dot product attention of (N, H * G, T, D) queries over (N, H, S, D) keys.

    Args:
        module: The attention layer.
        query: (N, H * G, T, D).
        key: (N, H, S, D).
        value: (N, H, S, D).
        attention_mask: (N, 1, T, S), boolean or to be added; None for a causal one.
        **options: As transformers passes them.

    Returns:
        (N, T, H * G, D), and None for the attention weights.
    """
    special = any(options.get(name) is not None for name in SPECIAL)
    if _RUNNING.packing is not None:
        if special:
            raise ValueError(f"attention with one of {', '.join(SPECIAL)} cannot be packed")
        return _RUNNING.packing.attend(query, key, value, options.get("scaling")), None
    rows, heads, count, dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or special:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    folded = query.reshape(rows, heads // groups, groups * count, dim)
    mask = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # (N, 1, G * T, S)
    out = scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=options.get("dropout", 0.0), scale=options.get("scaling")
    )
    return out.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What a model makes of its inputs: SDPA's mask, or none for a packed row (it would have C x C entries)."""
    mask: Tensor | None = None if _RUNNING.packing is not None else sdpa_mask(*args, **kwargs)
    return mask


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA do it this way; leave every other as it is."""
    if model.config.get_text_config()._attn_implementation == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, _mask)
        model.set_attn_implementation(NAME)
