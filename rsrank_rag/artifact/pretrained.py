"""Load, save and publish `RSRank`."""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import Self

from ..errors import ArtifactError
from ..language_model.check import open_backbone
from ..language_model.linear import int8_copy
from ..language_model.loading import load_model
from ..language_model.options import LoadOptions, ModelSource
from ..language_model.quiet import quiet_transformers
from ..method.backbone import Backbone
from ..method.projection import Projection
from ..method.template import PromptTokenizer, Template
from ..partial_files import replacing
from ..prefixes.settings import Choice
from . import hub
from .config import INSIDE, BackboneSpec, RSRankConfig, TrainingRecord
from .identity import check_after_run, check_before_run, check_files, describe, folder_of, hashes


class Pretrained(ABC):
    """A reranker that is loaded from an artifact and can be saved as one."""

    backbone: Backbone
    prompts: PromptTokenizer
    projection: Projection
    config: RSRankConfig
    name: str

    @abstractmethod
    def __init__(self, *parts: Any, **choices: Any) -> None:
        """Take an artifact's parts, and the arguments of `from_pretrained` for scoring."""

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
            revision: Commit, tag or branch of the artifact. The artifact names the language
                model's own revision.
            backbone: Another place to load the language model from, such as a local copy. The
                model there is checked.
            device: ``"cuda"``, ``"cpu"``, ...; None for the best one present.
            dtype: None for bfloat16 where it is fast, else on a CPU int8 if the artifact allows
                it, else float32. ``"int8"``: on a CPU, documents' linear maps are computed in 8
                bits, and everything else as with None.
            load_in_8bit: int8 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_4bit: nf4 weights through bitsandbytes (needs the ``8bit`` extra).
            max_length: Use at most this many positions; longer documents are cut.
            token_budget: Padded tokens of documents and query in one batch.
            prefix_cache: Where documents' prefixes are cached, so that a document that was scored
                before is not run again. True for a share of the device's memory, a size such as
                ``"512MB"``, a folder for memory and disk, a `PrefixCache` or its fields, or False.
            deterministic: Pad small batches on processors with AMX, whose matrix kernels give a
                token other last digits in a small batch than in a large one.
            local_files_only: Use files on the disk only, never the network.
            token: Hub access token.
            cache_dir: Hub cache folder.
            trust_remote_code: Let the model's repository run its own code.

        Raises:
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: Quantised weights need bitsandbytes, which is not installed.
        """
        load = LoadOptions(
            device,
            dtype,
            local_files_only=local_files_only,
            token=token,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            deterministic=deterministic,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
        )
        source = ModelSource(
            str(name),
            revision,
            load,
            None if backbone is None else str(backbone),
            max_length,
            token_budget,
            prefix_cache,
        )
        return cls.from_source(source)

    @classmethod
    def from_source(cls, source: ModelSource) -> Self:
        """As `from_pretrained`, with all of its arguments in one object."""
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
        """Join a language model and a B into a new artifact.

        Args:
            name: Local folder or Hub id of the language model.
            projection: B and its optional weights.
            template: Text around document and query.
            fusion_layer: The first layer in which queries see documents. B reads layers above it.
                Below it, a query's tokens see only ``query_start + query + suffix``.
            documents_stay: Run documents up to ``fusion_layer`` only; this layer and all above it
                see the documents' states that enter ``fusion_layer``.
            revision: The language model's revision on the Hub, recorded in the artifact.
            options: How to load the language model.
            training: The data and settings B was trained with, recorded in the artifact.
            license: SPDX-like identifier for the model card, such as ``"apache-2.0"``.

        Raises:
            BackboneError: The language model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        load = options or LoadOptions()
        template = template or Template()
        core, prompts = _open_model(
            str(name),
            revision,
            load,
            last_layer=projection.layers[-1],
            template=template,
            fusion_layer=fusion_layer,
            documents_stay=documents_stay,
        )
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
                f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs "
                f"(L, H, P, D) = {config.shape}."
            )
        return cls(core, prompts, projection, config)

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact completely or not at all: config, B and a model card.

        With ``include_backbone``, the language model and its tokenizer are saved, too, without the
        layers after the last one that B reads. An artifact that contains its language model is
        always saved with it.
        """
        config = self.config
        with replacing(Path(folder)) as new:
            if include_backbone or config.backbone.name == INSIDE:
                with quiet_transformers():
                    self.backbone.model.save_pretrained(new / INSIDE)
                self.prompts.tokenizer.save_pretrained(new / INSIDE)
                update = {
                    "name": INSIDE,
                    "revision": None,
                    "files": hashes(new / INSIDE),
                    "num_layers": self.backbone.loaded_layers,
                }
                backbone = config.backbone.model_copy(update=update)
                config = config.model_copy(update={"backbone": backbone})
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

        Args:
            repo_id: ``owner/name``. The repository is made if it does not exist.
            include_backbone: As in `save_pretrained`.
            private: Whether a new repository is private.
            revision: A branch, which is made if it does not exist.
            token: Access token; None for that of ``hf auth login``.
            commit_message: Subject of the commit.

        Raises:
            ArtifactError: The Hub refused, or the language model is a local folder.
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
    """Load an artifact and its language model, and check that they belong together.

    Errors are those of `RSRank.from_pretrained`.

    Returns:
        The language model, its tokenizer with the artifact's template, B, and the config.
    """
    folder = hub.resolve(source.name, source.revision, source.load)
    config = hub.read_config(folder)
    projection = hub.read_projection(folder, config)
    spec = config.backbone
    strict = source.backbone is None
    revision = None
    if source.backbone is not None:
        name = source.backbone
    elif spec.name == INSIDE:
        name = str(folder / INSIDE)
    else:
        name = spec.name
        revision = spec.revision
    local = hub.is_folder(name)
    # A local folder is checked before transformers reads it, the cache after the download.
    if local:
        check_files(spec, Path(name), in_cache=False, strict=strict)
    core, prompts = _open_model(
        name,
        revision,
        source.load,
        last_layer=config.layers[-1],
        template=config.template,
        fusion_layer=config.fusion_layer,
        documents_stay=config.documents_stay,
        max_lengths=(config.max_length, source.max_length),
        int8=config.int8,
        spec=spec,
    )
    folder_in_cache = None if local else folder_of(name, revision, source.load.cache_dir)
    if folder_in_cache is not None:
        check_files(spec, folder_in_cache, in_cache=True, strict=strict)
    return core, prompts, projection, config


def _open_model(
    name: str,
    revision: str | None,
    options: LoadOptions,
    *,
    last_layer: int,
    template: Template,
    fusion_layer: int,
    documents_stay: bool,
    max_lengths: tuple[int | None, ...] = (),
    int8: bool = False,
    spec: BackboneSpec | None = None,
) -> tuple[Backbone, PromptTokenizer]:
    """Load a language model and its tokenizer, and compare them with ``spec``.

    Documents run in int8 if the options say so, or if ``int8`` allows it and nothing is faster.
    """
    dtype = options.settled_dtype(int8=int8)
    options = replace(options, dtype=None if dtype == "int8" else dtype)
    loaded = load_model(name, revision=revision, options=options, last_layer=last_layer)
    if spec is not None:
        check_before_run(loaded, spec, name)
    core = open_backbone(
        loaded.model,
        last_layer,
        num_layers=loaded.num_layers,
        fusion_layer=fusion_layer,
        documents_stay=documents_stay,
    )
    if spec is not None:
        check_after_run(core, spec, name)
    limits = [limit for limit in max_lengths if limit is not None]
    prompts = PromptTokenizer(
        loaded.tokenizer,
        template,
        max_length=min([core.max_length, *limits]),
        shared_positions=core.causal,
    )
    if dtype == "int8":
        core = replace(core, document_model=int8_copy(core, prompts))
    return core, prompts
