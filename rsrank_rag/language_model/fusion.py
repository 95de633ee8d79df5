"""A model whose runs can end or begin at its fusion layer.

layers below the fusion layer  are skipped in a run that begins at the fusion layer
the fusion layer               gives its input to the cache, or takes it from there
layers above it                give their input as their output where documents stay
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import BackboneError
from ..method.arrays import Array
from ..method.probe import Probe, SkipLayer
from .attention import use_grouped_attention
from .mpnet import BIAS, MODEL_TYPE, as_bert, position_bias
from .quiet import quiet_transformers
from .weights import bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Sizes that an encoder and a BERT have in common.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers: its first list with as many modules as its config has layers.

    Raises:
        BackboneError: No list has that many modules.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BackboneError(
        f"{type(model).__name__} has no list of {count} layers, so they cannot be told apart."
    )


def with_fusion_layers(
    model: PreTrainedModel, fusion_file: Path
) -> tuple[PreTrainedModel, Callable[[int], Array] | None]:
    """A BERT of an encoder's layers and an artifact's own above them; its `position_bias`.

    Raises:
        BackboneError: The encoder's weights are quantised.
    """
    if bits_of(model) < 16:
        raise BackboneError(
            "An artifact with fusion layers of its own cannot be quantised by bitsandbytes. Leave "
            "out load_in_8bit and load_in_4bit; dtype='bfloat16' halves the memory."
        )
    weights = model.state_dict()
    if model.config.model_type == MODEL_TYPE:
        weights = as_bert(weights)
    table = weights.pop(BIAS, None)
    for name, tensor in load_file(fusion_file).items():
        weights[name] = tensor.to(model.device, model.dtype)
    layers = {int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer.")}
    config = transformers.BertConfig(
        **{name: getattr(model.config, name) for name in SIZES},
        num_hidden_layers=len(layers),
        max_position_embeddings=len(weights["embeddings.position_embeddings.weight"]),
        type_vocab_size=len(weights["embeddings.token_type_embeddings.weight"]),
        name_or_path=model.name_or_path,
        # What the artifact records.
        model_type=model.config.model_type,
    )
    with torch.device("meta"):
        shapes = transformers.BertModel(config, add_pooling_layer=False).state_dict()
    # Of the last layer, the artifact has only the value projection, which is all that is read.
    for name, shape in shapes.items():
        if name not in weights:
            weights[name] = torch.zeros(shape.shape, dtype=model.dtype, device=model.device)
    with quiet_transformers():
        bert = transformers.BertModel.from_pretrained(
            None,
            config=config,
            state_dict={name: weights[name] for name in shapes},
            dtype=model.dtype,
            add_pooling_layer=False,
        )
    use_grouped_attention(bert)
    bias = None if table is None else partial(position_bias, table.float().cpu().numpy())
    return bert.to(model.device).requires_grad_(False), bias


def split_at(model: PreTrainedModel, fusion_layer: int) -> PreTrainedModel:
    """A copy that shares the model's weights, and whose runs a `Probe` can end or begin."""
    layers = layers_of(model)
    split = nn.ModuleList()
    for number, layer in enumerate(layers):
        forward = partial(_forward_above, number == fusion_layer, layer.forward)
        if number < fusion_layer:
            forward = partial(_forward_below, layer.forward)
        changed = copy.copy(layer)
        changed.forward = forward
        split.append(changed)
    replaced: dict[int, Any] = {id(layers): split}
    for tensor in (*model.parameters(), *model.buffers()):
        replaced[id(tensor)] = tensor
    return copy.deepcopy(model, replaced)


def _forward_below(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    probe = _probe(kwargs)
    if probe is not None and probe.entering is not None:
        return hidden
    return forward(hidden, *args, **kwargs)


def _forward_above(
    enters: bool, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    probe = _probe(kwargs) if enters else None
    if probe is not None:
        hidden = probe.enter(hidden)
    try:
        return forward(hidden, *args, **kwargs)
    except SkipLayer:
        return hidden


def _probe(kwargs: dict[str, Any]) -> Probe | None:
    """The cache of this run, under any name."""
    return next((value for value in kwargs.values() if isinstance(value, Probe)), None)
