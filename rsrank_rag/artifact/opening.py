"""An artifact opened: config, B, language model and tokenizer, checked against one another; and written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import ArtifactError
from ..language_model.check import open_backbone
from ..language_model.files import folder_of, hashes
from ..language_model.loading import LoadedModel, load_model
from ..language_model.options import LoadOptions, ModelSource
from ..method.backbone import Backbone
from ..method.projection import Projection
from ..method.template import PromptTokenizer, Template
from ..partial_files import replacing
from . import hub
from .config import INSIDE, RSRankConfig, TrainingRecord
from .identity import check_after_run, check_before_run, check_files, describe


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
    loaded, int8 = _load(model, pinned, source.load, last_layer, int8=config.int8)
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


def new_artifact(
    source: ModelSource,
    projection: Projection,
    template: Template,
    training: TrainingRecord,
    *,
    license: str | None = None,
    fusion_layer: int = 0,
) -> Artifact:
    """Join a language model and a B for it; raises as `RSRank.from_backbone`."""
    last_layer = projection.layers[-1]
    loaded, int8 = _load(source.name, source.revision, source.load, last_layer)
    core = open_backbone(loaded.model, last_layer, int8, num_layers=loaded.num_layers, fusion_layer=fusion_layer)
    prompts = PromptTokenizer(loaded.tokenizer, template, max_length=core.max_length, shared_positions=core.causal)
    files = hashes(folder_of(source.name, source.revision, source.load.cache_dir))
    config = RSRankConfig(
        backbone=describe(core, prompts, source.name, source.revision, files),
        layers=projection.layers,
        projection_dim=projection.weight.shape[2],
        fusion_layer=fusion_layer,
        template=template,
        training=training,
        license=license,
    )
    if tuple(projection.weight.shape) != config.shape:
        raise ArtifactError(
            f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs (L, H, P, D) = {config.shape}."
        )
    return Artifact(core, prompts, projection, config)


def _load(
    name: str | Path, revision: str | None, options: LoadOptions, last_layer: int, *, int8: bool = False
) -> tuple[LoadedModel, bool]:
    """A language model, and whether it is to read documents in int8: if it is asked for, or ``int8`` is good enough."""
    dtype = options.settled_dtype(int8=int8)
    options = replace(options, dtype=None if dtype == "int8" else dtype)
    return load_model(name, revision=revision, options=options, last_layer=last_layer), dtype == "int8"


def save_artifact(folder: Path, artifact: Artifact, *, include_backbone: bool) -> None:
    """Write config, B and model card, and the language model if it is wanted or came with them: all or nothing."""
    config = artifact.config
    with replacing(folder) as new:
        if include_backbone or config.backbone.name == INSIDE:
            artifact.backbone.model.save_pretrained(new / INSIDE)
            artifact.prompts.tokenizer.save_pretrained(new / INSIDE)
            inside: dict[str, object] = {"name": INSIDE, "revision": None, "files": hashes(new / INSIDE)}
            inside["num_layers"] = artifact.backbone.loaded_layers
            config = config.model_copy(update={"backbone": config.backbone.model_copy(update=inside)})
        hub.write_artifact(new, config, artifact.projection, hub.model_card(config))
