"""How `RSRank` is loaded, saved and published."""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import Self

from ..errors import ArtifactError
from ..language_model.check import open_backbone
from ..language_model.linear import rounded
from ..language_model.loading import LoadedModel, load_model
from ..language_model.log_filters import without_progress_bars
from ..language_model.options import LoadOptions, ModelSource
from ..method.backbone import Backbone
from ..method.projection import Projection
from ..method.template import PromptTokenizer, Template
from ..partial_files import replacing
from ..prefixes.settings import Choice
from . import hub
from .config import INSIDE, RSRankConfig, TrainingRecord
from .identity import check_after_run, check_before_run, check_files, describe, folder_of, hashes


class Pretrained(ABC):
    """What is made of an artifact, and can be saved as one."""

    backbone: Backbone
    prompts: PromptTokenizer
    projection: Projection
    config: RSRankConfig
    name: str

    @abstractmethod
    def __init__(self, *parts: Any, **choices: Any) -> None:
        """From an artifact's parts, and those choices of `from_pretrained` that do not concern its loading."""

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "mini",
        *,
        revision: str | None = None,
        backbone: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        load_in_fp8: bool = False,
        max_length: int | None = None,
        token_budget: int | None = None,
        prefix_cache: Choice = True,
        deterministic: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load an artifact and the language model it belongs to.

        Args:
            name: ``"mini"`` (ships with the package), a local folder, or a Hub id.
            revision: Commit, tag or branch of the artifact. The model's own revision stands in the artifact.
            backbone: Where to load the language model from instead, such as a local copy. It is checked.
            device: ``"cuda"``, ``"cpu"``, ...; None for the best one present.
            dtype: None for bfloat16 where it is fast, else on a CPU int8 if the artifact is known to be good enough so,
                else float32. ``"int8"``: documents' linear maps in 8 bits, on a CPU; the rest as by None.
            load_in_8bit: int8 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_4bit: nf4 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_fp8: float8 weights through torchao (needs the ``fp8`` extra).
            max_length: Use at most this many positions; longer documents are cut.
            token_budget: Padded tokens of documents and query in one batch.
            prefix_cache: Where documents' prefixes are kept, so that a document that comes back is not read again.
                True for some of the device's memory, a size such as ``"512MB"`` for so much of it, a folder for that
                and the disk, a `PrefixCache` or its fields for more, or False for nowhere.
            deterministic: Fill small calls up on processors (those with AMX) whose matrix kernels give a token other
                last digits among few others than among many. Elsewhere a CPU's scores never depend on neighbours.
            local_files_only: Use what is already on disk, never the network.
            token: Hub access token.
            cache_dir: Hub cache folder.
            trust_remote_code: Let the model's repository run its own code. Off unless you say so.

        Raises:
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: 8-bit or 4-bit without bitsandbytes, fp8 without torchao, any without accelerate.
        """
        flags: dict[str, Any] = {
            "load_in_8bit": load_in_8bit,
            "load_in_4bit": load_in_4bit,
            "load_in_fp8": load_in_fp8,
        }
        flags |= {"local_files_only": local_files_only, "trust_remote_code": trust_remote_code}
        load = LoadOptions(
            device, dtype, token=token, cache_dir=cache_dir, deterministic=deterministic, **flags
        )
        elsewhere = None if backbone is None else str(backbone)
        return cls.from_source(
            ModelSource(
                str(name), revision, load, elsewhere, max_length, token_budget, prefix_cache
            )
        )

    @classmethod
    def from_source(cls, source: ModelSource) -> Self:
        """As `from_pretrained`, from one object that holds all of its arguments."""
        ranker = cls(
            *open_artifact(source),
            token_budget=source.token_budget,
            prefix_cache=source.prefix_cache,
            deterministic=source.load.deterministic,
        )
        ranker.name = source.name
        return ranker

    @classmethod
    def from_backbone(
        cls,
        name: str | Path,
        projection: Projection,
        *,
        template: Template | None = None,
        fusion_layer: int = 0,
        documents_stay: bool = False,
        revision: str | None = None,
        options: LoadOptions | None = None,
        training: TrainingRecord | None = None,
        license: str | None = None,
    ) -> Self:
        """Join a language model (a local folder or a Hub id) and a B into a new artifact, for `save_pretrained`.

        Args:
            name: Of the language model.
            projection: B, and what else it weighs.
            template: Text around document and query.
            fusion_layer: The first layer in which queries see documents; B reads layers above it. Below it, a query's
                tokens see only ``query_start + query + suffix``.
            documents_stay: Whether documents run no further: the layers from there on see what enters the first.
            revision: The model's revision on the Hub, recorded in the artifact.
            options: How to load the model.
            training: Where B comes from, recorded in the artifact.
            license: SPDX-like identifier for the model card, such as ``"apache-2.0"``.

        Raises:
            BackboneError: The model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        load, template, last_layer = (
            options or LoadOptions(),
            template or Template(),
            projection.layers[-1],
        )
        loaded, int8 = _load(str(name), revision, load, last_layer)
        depth = {"num_layers": loaded.num_layers, "fusion_layer": fusion_layer}
        core = open_backbone(loaded.model, last_layer, **depth, documents_stay=documents_stay)
        prompts = PromptTokenizer(
            loaded.tokenizer, template, max_length=core.max_length, shared_positions=core.causal
        )
        if int8:
            core.for_documents = rounded(core, prompts)
        files = hashes(folder_of(str(name), revision, load.cache_dir))
        config = RSRankConfig(
            backbone=describe(core, prompts, str(name), revision, files),
            layers=projection.layers,
            projection_dim=projection.weight.shape[2],
            fusion_layer=fusion_layer,
            documents_stay=documents_stay,
            template=template,
            training=training or TrainingRecord(),
            license=license,
        )
        if tuple(projection.weight.shape) != config.shape:
            raise ArtifactError(
                f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs (L, H, P, D) = {config.shape}."
            )
        return cls(core, prompts, projection, config)

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact: config.json, projection.safetensors and a model card, all or nothing.

        With ``include_backbone``, and always where it came with its own, the language model and its tokenizer, too:
        without the layers after the last one that B reads, which are not loaded.
        """
        config = self.config
        with replacing(Path(folder)) as new:
            if include_backbone or config.backbone.name == INSIDE:
                with without_progress_bars():
                    self.backbone.model.save_pretrained(new / INSIDE)
                self.prompts.tokenizer.save_pretrained(new / INSIDE)
                inside: dict[str, object] = {
                    "name": INSIDE,
                    "revision": None,
                    "files": hashes(new / INSIDE),
                }
                inside["num_layers"] = self.backbone.loaded_layers
                config = config.model_copy(
                    update={"backbone": config.backbone.model_copy(update=inside)}
                )
            hub.write_artifact(new, config, self.projection, hub.model_card(config))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        include_backbone: bool = False,
        private: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload RSRank projection",
    ) -> str:
        """Publish the artifact on the Hugging Face Hub; gives the commit's address.

        Repository (``owner/name``) and revision (a branch) are made if need be; ``private`` is for a new one.
        ``include_backbone`` is as in `save_pretrained`; the default token is that of ``hf auth login``.

        Raises:
            ArtifactError: The Hub refused, or the artifact names a language model that only this machine has.
        """
        hub.check_shareable(self.config, include_backbone=include_backbone)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, include_backbone=include_backbone)
            return hub.push(
                Path(folder),
                repo_id,
                private=private,
                revision=revision,
                token=token,
                message=commit_message,
            )


def open_artifact(
    source: ModelSource,
) -> tuple[Backbone, PromptTokenizer, Projection, RSRankConfig]:
    """Load an artifact and the language model it belongs to, checked; raises as `RSRank.from_pretrained`."""
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
    depth = {"num_layers": loaded.num_layers, "fusion_layer": config.fusion_layer}
    core = open_backbone(loaded.model, last_layer, **depth, documents_stay=config.documents_stay)
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
    if int8:
        core.for_documents = rounded(core, prompts)
    return core, prompts, projection, config


def _load(
    name: str | Path,
    revision: str | None,
    options: LoadOptions,
    last_layer: int,
    *,
    int8: bool = False,
) -> tuple[LoadedModel, bool]:
    """A language model, and whether it is to read documents in int8: if it is asked for, or ``int8`` is good enough."""
    dtype = options.settled_dtype(int8=int8)
    options = replace(options, dtype=None if dtype == "int8" else dtype)
    return load_model(
        name, revision=revision, options=options, last_layer=last_layer
    ), dtype == "int8"
