"""Grouped-query attention behind a prefix without repeated keys.

With a mask, transformers copies every key and value once for each query head of its group, in every layer: for a few
query tokens after a long prefix that is most of the work. The heads of a group may as well stand in a row of queries.

Axes: N documents, H KV heads, G query heads of each, T query tokens, S keys, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rsrank_grouped_sdpa"
"""What this attention is called in a model's config. It takes the masks that SDPA takes."""


def grouped_sdpa(
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
    rows, heads, count, dim = query.shape
    groups = heads // key.shape[1]
    special = options.get("position_bias") is not None or options.get("softcap") is not None
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or special:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    folded = query.reshape(rows, heads // groups, groups * count, dim)
    mask = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)  # (N, 1, G * T, S)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=options.get("dropout", 0.0), scale=options.get("scaling")
    )
    return out.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def use_grouped_sdpa(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA with grouped queries do it this way; leave every other as it is."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config._attn_implementation == "sdpa" and heads != kv_heads:
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
