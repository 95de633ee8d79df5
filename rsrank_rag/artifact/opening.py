"""An artifact opened: config, B, language model and tokenizer, checked against one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..language_model.check import open_backbone
from ..language_model.files import folder_of
from ..language_model.loading import LoadedModel, load_model
from ..language_model.options import LoadOptions, ModelSource
from ..method.backbone import Backbone
from ..method.projection import Projection
from ..method.template import PromptTokenizer
from . import hub
from .config import INSIDE, RSRankConfig
from .identity import check_after_run, check_before_run, check_files


class Artifact(NamedTuple):
    """What a reranker is made of."""

    backbone: Backbone
    prompts: PromptTokenizer
    projection: Projection
    config: RSRankConfig


def open_artifact(source: ModelSource) -> Artifact:
    """Load an artifact and the language model it belongs to; raises as `RSRank.from_pretrained`."""
    folder = hub.resolve(source.name, source.revision, source.load)
    config = hub.read_config(folder)
    projection = hub.read_projection(folder, config)
    inside = config.backbone.name == INSIDE
    model = source.backbone or (folder / config.backbone.name if inside else config.backbone.name)
    pinned = config.backbone.revision if source.backbone is None and not inside else None
    last_layer = config.layers[-1]
    here, chosen = hub.is_folder(model), source.backbone is not None
    if here:  # before anything of it is read
        check_files(config.backbone, Path(model), chosen=chosen)
    loaded, int8 = load_as_settled(model, pinned, source.load, last_layer, int8=config.int8)
    check_before_run(loaded, config.backbone, str(model))
    core = open_backbone(
        *(loaded.model, last_layer, int8), num_layers=loaded.num_layers, fusion_layer=config.fusion_layer
    )
    check_after_run(core, config.backbone, str(model))
    if not here:  # it has been downloaded
        check_files(config.backbone, folder_of(model, pinned, source.load.cache_dir), chosen=chosen)
    limits = (core.max_length, config.max_length, source.max_length)
    prompts = PromptTokenizer(
        loaded.tokenizer,
        config.template,
        max_length=min(limit for limit in limits if limit is not None),
        shared_positions=core.causal,
    )
    return Artifact(core, prompts, projection, config)


def load_as_settled(
    name: str | Path, revision: str | None, options: LoadOptions, last_layer: int, *, int8: bool = False
) -> tuple[LoadedModel, bool]:
    """A language model, and whether it is to read documents in int8: if it is asked for, or ``int8`` is good enough."""
    dtype = options.settled_dtype(int8=int8)
    options = replace(options, dtype=None if dtype == "int8" else dtype)
    return load_model(name, revision=revision, options=options, last_layer=last_layer), dtype == "int8"
