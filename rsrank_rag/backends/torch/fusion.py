"""A model whose runs can end or begin at its fusion layer.

layers below the fusion layer  are skipped in a run that begins at the fusion layer
the fusion layer               gives its input to the cache, or takes it from there
layers above it                give their input as their output when documents are run
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...errors import BackboneError
from .probe import Probe, SkipLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
