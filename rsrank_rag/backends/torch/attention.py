"""Scaled dot product attention that does not repeat the keys of grouped queries.

With a mask, transformers copies every key and value once for each query head of its group, in every
layer. For a few query tokens after a long prefix, that copy is most of the work. Here the heads of
a group become rows of queries, so that nothing is copied.

Axes: N rows, H KV heads, G query heads of each, T query tokens, S keys, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The name of this attention in a model's config. It takes the masks that SDPA takes.
NAME = "rsrank_sdpa"

# Arguments of models that need more than a mask and a scale. Transformers' own attention gets them.
SPECIAL = ("position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices")


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' `AttentionInterface` calls it.

    Args:
        module: The attention layer.
        query: (N, H * G, T, D).
        key: (N, H, S, D).
        value: (N, H, S, D).
        attention_mask: (N, 1, T, at most S), boolean or to be added; None for a causal mask. Keys
            that the mask does not cover are padding.
        **options: Scale, dropout, and what only some models use.

    Returns:
        (N, T, H * G, D), and None in place of attention weights.
    """
    if attention_mask is not None:
        attention_mask = _padded(attention_mask, key.shape[2])
    rows, heads, count, dim = query.shape
    groups = heads // key.shape[1]
    special = any(options.get(name) is not None for name in SPECIAL)
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or special:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    mask = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1)
    output = scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups * count, dim),
        key,
        value,
        attn_mask=mask.flatten(2, 3),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return output.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def _padded(mask: Tensor, keys: int) -> Tensor:
    """A mask that hides all keys after those that it covers."""
    missing = keys - mask.shape[-1]
    if not missing:
        return mask
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return pad(mask, (0, missing), value=hidden)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA use `attend`; leave every other model as it is."""
    attention = model.config.get_text_config()._attn_implementation
    if attention == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
