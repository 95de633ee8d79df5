"""Documents of different lengths without padding: one behind another in a single row, each attending to itself only.

Axes: N documents, C tokens of all of them together, H KV heads, G query heads of each, D head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILLED = 0.9
"""Documents that fill more of a padded batch than this are not packed: the kernels for equal lengths are faster."""

LARGEST_TABLE = 1024
"""Positions of an encoder up to which `check` packs more documents into a row than it has positions."""


class _Running(threading.local):
    lengths: Sequence[int] | None = None
    causal: bool = False


_RUNNING = _Running()


def is_packed() -> bool:
    """Whether this thread runs a packed row now."""
    return _RUNNING.lengths is not None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attention within each document of the row that runs, (1, C, H * G, D).

    Args:
        query: (1, H * G, C, D).
        key: (1, H, C, D).
        value: (1, H, C, D).
        scale: Of the products; None for 1 / sqrt(D).
    """
    assert _RUNNING.lengths is not None
    run = _by_kernel if query.is_cuda else _one_by_one
    return run(query, key, value, _RUNNING.lengths, causal=_RUNNING.causal, scale=scale)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, causal: bool, scale: float | None
) -> Tensor:
    """FlashAttention's kernel for sequences of different lengths, which comes with torch for CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    tokens, others, theirs = (states[0].transpose(0, 1) for states in (query, key, value))  # (C, heads, D)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device, torch.int32)
    out = varlen_attn(
        tokens,
        others,
        theirs,
        ends,
        ends,
        max(lengths),
        max(lengths),
        scale=scale,
        window_size=(-1, 0 if causal else -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # as nothing else was asked for
    return out[None]


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, causal: bool, scale: float | None
) -> Tensor:
    """SDPA for each document, or each run of documents of one length."""
    found, start = [], 0
    for length, alike in groupby(lengths):
        count = len(list(alike))
        stop = start + length * count
        rows, others, theirs = (
            states[0, :, start:stop].reshape(states.shape[1], count, length, -1).transpose(0, 1)
            for states in (query, key, value)
        )
        part = scaled_dot_product_attention(
            rows, others, theirs, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        found.append(part.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(found)[None]


class RowPacker:
    """What `Backbone` is given to run documents without padding; see `method.backbone.Packer`.

    Args:
        model: A model that attends by `attention.attend`.
        causal: Whether tokens see only earlier ones.
        most: Tokens that a row may have; None for any number.
        longest: Tokens that a document may have: in a packed row, no attention window is kept.
    """

    def __init__(self, model: PreTrainedModel, *, causal: bool, most: int | None, longest: int) -> None:
        self.config, self.causal, self.most, self.longest = model.config.get_text_config(), causal, most, longest
        self.attention = self.config._attn_implementation

    def worth(self, lengths: Sequence[int]) -> bool:
        """Whether so much of a padded batch would be padding, and the row can be run."""
        if self.config._attn_implementation != self.attention or max(lengths) > self.longest:
            return False  # somebody may have set another attention since
        if self.most is not None and sum(lengths) > self.most:
            return False
        return sum(lengths) < FILLED * max(lengths) * len(lengths)

    @contextmanager
    def running(self, lengths: Sequence[int]) -> Iterator[None]:
        """While this lasts, what runs in this thread attends within documents of these lengths."""
        _RUNNING.lengths, _RUNNING.causal = lengths, self.causal
        try:
            yield
        finally:
            _RUNNING.lengths = None
