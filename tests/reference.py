"""Independent value vectors: whole sequences, eager attention, hooks on the value projection.

This code shares nothing with the package.
"""

import torch
from conftest import HEAD_DIM, KV_HEADS

ENCODERS = ["bert", "roberta"]


def value_modules(model):
    """Each layer's value projection, and a function that cuts (T, H * D) values from its output."""
    actual = []
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in {"v_proj", "value"}:
            actual.append((module, lambda output: output))
        elif kind == "qkv_proj":  # phi3: queries, keys, values one after the other
            actual.append((module, lambda output: output[:, -KV_HEADS * HEAD_DIM :]))
        elif (
            kind == "query_key_value" and "gpt_neox" in type(model).__module__
        ):  # query, key, value of each head
            actual.append(
                (module, lambda output: output.unflatten(-1, (4, 3, HEAD_DIM))[:, :, 2].flatten(1))
            )
        elif kind == "query_key_value":  # falcon: all queries, then the one key and the one value
            actual.append((module, lambda output: output[:, -HEAD_DIM:]))
    return actual


def reference_values(model, document_part, query_part, head_dim=HEAD_DIM):
    """The query part's values in one run over document part + query part: (layers, H, T, D)."""
    ids = torch.tensor([[*document_part, *query_part]])
    inputs = {"input_ids": ids}
    if model.config.model_type in ENCODERS:
        # The document's tokens see the document alone; the query's see all and count positions from
        # 0 again.
        cut, length = len(document_part), ids.shape[1]
        mask = torch.zeros(1, 1, length, length)
        mask[..., :cut, cut:] = torch.finfo(torch.float32).min
        first = 1 if model.config.model_type == "roberta" else 0  # RoBERTa: padding_idx + 1
        positions = [*range(first, first + cut), *range(first, first + length - cut)]
        inputs |= {"attention_mask": mask, "position_ids": torch.tensor([positions])}
    else:
        inputs |= {"attention_mask": torch.ones_like(ids)}
    seen = []
    modules = value_modules(model)
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, cut=cut: seen.append(cut(output[0])))
        for module, cut in modules
    ]
    try:
        model(**inputs, **({} if model.config.model_type in ENCODERS else {"use_cache": False}))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(modules) == model.config.num_hidden_layers
    values = torch.stack(seen)[:, len(document_part) :]
    return values.unflatten(-1, (-1, head_dim)).transpose(1, 2)
