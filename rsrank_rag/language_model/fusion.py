"""A model whose runs can end or begin at its fusion layer, as `method.backbone` needs for mid-fusion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import BackboneError
from ..method.probe import Probe, SkipLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers: its one list of so many modules; BackboneError if there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BackboneError(
        f"{type(model).__name__} has no list of {count} layers, so they cannot be told apart."
    )


def split_at(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """A model that shares its weights with the given one, and whose runs a `Probe` can end or begin at a layer."""
    layers = layers_of(model)
    below = [_changed(each, _skip) for each in layers[:layer]]
    above = [_changed(each, _pass) for each in layers[layer + 1 :]]
    split = nn.ModuleList([*below, _changed(layers[layer], _enter), *above])
    shared: dict[int, Any] = {id(part): part for part in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, {**shared, id(layers): split})


def _changed(layer: nn.Module, way: Callable[..., Any]) -> nn.Module:
    changed = copy.copy(layer)
    changed.forward = partial(way, layer.forward)
    return changed


def _skip(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Below the fusion layer: a run that begins there passes by."""
    probe = _probe(kwargs)
    return (
        hidden
        if probe is not None and probe.entering is not None
        else forward(hidden, *args, **kwargs)
    )


def _enter(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """At the fusion layer: the cache sees what enters, or says it."""
    probe = _probe(kwargs)
    return _pass(forward, hidden if probe is None else probe.enter(hidden), *args, **kwargs)


def _pass(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """From the fusion layer on: a document may have to leave a layer as it entered it."""
    try:
        return forward(hidden, *args, **kwargs)
    except SkipLayer:
        return hidden


def _probe(kwargs: dict[str, Any]) -> Probe | None:
    """The cache of this run, whatever the model calls it."""
    return next((value for value in kwargs.values() if isinstance(value, Probe)), None)
