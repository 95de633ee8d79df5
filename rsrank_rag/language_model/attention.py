"""How the language model attends in our runs, where transformers' own way does more work than there is.

With a mask, transformers copies every key and value once for each query head of its group, in every layer: for a few
query tokens after a long prefix that is most of the work. The heads of a group may as well stand in a row of queries.

Axes: N rows, H KV heads, G query heads of each, T query tokens, S keys, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .log_filters import importing_torchao
from .options import leaves_instructions_unused

with importing_torchao():
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

NAME = "rsrank_sdpa"  # what this attention is called in a model's config; it takes the masks that SDPA takes

SPECIAL = ("position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices")
"""What models ask of attention that is more than a mask and a scale. It goes to transformers' own."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention of (N, H * G, T, D) queries over (N, H, S, D) keys and values, as transformers asks.

    The mask is (N, 1, T, about S), boolean or to be added; None for a causal one. Keys that it does not cover only fill
    `probe.LANES` and are not seen. Gives (N, T, H * G, D), and None for the attention weights.
    """
    special = any(options.get(name) is not None for name in SPECIAL)
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        nothing = (
            False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
        )
        attention_mask = pad(
            attention_mask, (0, key.shape[2] - attention_mask.shape[-1]), value=nothing
        )
    rows, heads, count, dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or special:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return found
    folded = query.reshape(rows, heads // groups, groups * count, dim)
    mask = (
        attention_mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    )  # (N, 1, G * T, S)
    out = scaled_dot_product_attention(
        folded,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return out.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA do it this way; leave every other as it is."""
    if leaves_instructions_unused() and model.dtype != torch.float32:
        torch.backends.cuda.enable_flash_sdp(False)  # for CPUs as well, whatever its name
    if (
        model.config.get_text_config()._attn_implementation == "sdpa"
        and model._supports_attention_backend
    ):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
