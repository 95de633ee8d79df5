"""Load, save and publish `RSRank`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from typing_extensions import Self

from ..backends.options import LoadOptions, ModelSource
from ..errors import ArtifactError, BackboneError, InputError, RSRankError, needs_torch, problems_of
from ..method.template import PromptTokenizer, Template
from ..partial_files import replacing
from ..prefixes.settings import cache_settings
from ..ranking.rule import Fallback
from . import hub
from .card import UNNAMED, is_hub_id, model_card
from .config import INSIDE, BackboneSpec, RSRankConfig, TrainingRecord
from .identity import check_files, check_model, describe, folder_of, hashes

if TYPE_CHECKING:
    import torch

    from ..backends.base import LanguageModel
    from ..backends.torch.backbone import Backbone
    from ..backends.torch.projection import Projection
    from ..method.formula import Weights


class Pretrained(ABC):
    """A reranker that is loaded from an artifact and can be saved as one."""

    backbone: "LanguageModel"
    prompts: PromptTokenizer
    projection: "Projection | Weights"
    config: RSRankConfig
    name: str
    threshold: float | None
    max_gap: float | None
    fallback: Fallback | None

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
        device: "str | torch.device | None" = None,
        dtype: "str | torch.dtype | None" = None,
        runtime: str | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        max_length: int | None = None,
        token_budget: int | None = None,
        cache_size: int | str | None = None,
        cache_folder: str | Path | None = None,
        deterministic: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load an artifact and the language model it belongs to.

        Args:
            name: Name of an artifact that ships with the package, such as ``"mini"``, a local
                folder, or a Hub id.
            revision: Commit, tag or branch of the artifact. The artifact names the language
                model's own revision.
            backbone: Another place to load the language model from, such as a local copy. The
                model there is checked.
            device: ``"cuda"``, ``"cpu"``, ...; None for the CPU where ONNX Runtime runs the model,
                else the best one present.
            dtype: None for the fastest one: on torch bfloat16 where the device multiplies it, else
                float32; on ONNX Runtime int8 if the artifact allows it, else float32.
                ``"int8"``: documents' linear maps are computed in 8 bits, everything else in
                float32.
            runtime: ``"torch"`` or ``"onnx"``. None for ONNX Runtime where torch is not installed,
                and for encoders of BERT's kind unless another device or dtype than the CPU, int8
                or float32 is named.
            load_in_8bit: int8 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_4bit: nf4 weights through bitsandbytes (needs the ``8bit`` extra).
            max_length: Use at most this many positions; longer documents are cut.
            token_budget: The most padded tokens of documents and queries in one batch; None for a
                number that suits the device (`TOKEN_BUDGET`).
            cache_size: The most bytes of cached documents' prefixes, a number or a text such as
                ``"512MB"``, so that a document that was scored before is not run again. 0: none.
                None: 10 GB in a folder, else a share of the device's memory.
            cache_folder: A folder for prefixes in 8 bits, which later processes use, too. A share
                of the device's memory, but at most ``cache_size``, holds prefixes in front of it.
                None: prefixes are cached in memory only.
            deterministic: Give a pair the same bits whatever else is scored: each document runs
                alone, which is slower.
            local_files_only: Use files on the disk only, never the network.
            token: Hub access token.
            cache_dir: Hub cache folder.
            trust_remote_code: Let the model's repository run its own code.

        Raises:
            InputError: An argument is out of range, or arguments exclude each other.
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: Quantised weights need bitsandbytes, or the language model
                needs torch, which is not installed.
        """
        load = LoadOptions(
            device=device,
            dtype=dtype,
            runtime=runtime,
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
            **cache_settings(cache_size, cache_folder).model_dump(),
        )
        return cls.from_source(source)

    @classmethod
    def from_source(cls, source: ModelSource) -> Self:
        """As `from_pretrained`, with all of its arguments in one object."""
        try:
            folder = hub.resolve(source.name, source.revision, source.load)
            config = hub.read_config(folder)
        except ArtifactError as error:
            if source.name in hub.builtin_names():
                raise
            raise ArtifactError(
                f"{error} If it is a reranker of another kind, adapters and commands take it as "
                f"cross-encoder:{source.name} or bi-encoder:{source.name}."
            ) from error
        # A model that the user named is checked by a run, which only torch makes.
        kind = config.backbone.model_type if source.backbone is None else ""
        opened: Any = open_on_torch
        if source.load.runtime_for(kind) == "onnx":
            opened = _open_encoder
        with _defects(source.name):
            parts = opened(source, folder, config)
        ranker = cls(
            *parts,
            config,
            token_budget=source.token_budget,
            cache_size=source.cache_size,
            cache_folder=source.cache_folder,
            deterministic=source.load.deterministic,
        )
        ranker.name = source.name
        return ranker

    @classmethod
    def from_backbone(
        cls,
        name: str | Path,
        projection: "Projection",
        *,
        template: Template | None = None,
        fusion_layer: int = 0,
        similarity_window: int | None = None,
        attention_window: int | None = None,
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
                Below it, a query's tokens see only ``query_start + query + suffix``. Documents run
                up to this layer only: this layer and all above it see the states that enter it.
            similarity_window: Positions of a similarity window; None for the whole document only.
            attention_window: Below the fusion layer, a document's token attends to the first token
                and to tokens at most half of so many positions away; None for all. Encoders only.
            revision: The language model's revision on the Hub, recorded in the artifact.
            options: How to load the language model.
            training: The data and settings B was trained with, recorded in the artifact.
            license: SPDX-like identifier for the model card, such as ``"apache-2.0"``.

        Raises:
            BackboneError: The language model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        name = str(name)
        load = options or LoadOptions()
        template = template or Template()
        core, prompts = open_model(
            name,
            revision,
            load,
            last_layer=projection.layers[-1],
            template=template,
            fusion_layer=fusion_layer,
            similarity_window=similarity_window,
            attention_window=attention_window,
        )
        files = hashes(folder_of(name, revision, load.cache_dir))
        try:
            config = RSRankConfig(
                backbone=describe(core, prompts, name, revision, files),
                layers=projection.layers,
                projection_dim=projection.weight.shape[2],
                fusion_layer=fusion_layer,
                similarity_window=similarity_window,
                attention_window=attention_window,
                template=template,
                training=training or TrainingRecord(),
                license=license,
            )
        except ValidationError as error:
            raise ArtifactError(f"B does not fit {name}: {problems_of(error)}.") from None
        if tuple(projection.weight.shape) != config.shape:
            raise ArtifactError(
                f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs "
                f"(L, H, P, D) = {config.shape}."
            )
        return cls(core, prompts, projection, config)

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact completely or not at all: config, B and a model card.

        Args:
            folder: Where to. The folder is made if it does not exist. Its other files stay.
            include_backbone: Save the language model and its tokenizer, too: with torch without the
                layers after the last one that B reads, with ONNX Runtime as they are. An artifact
                that contains its language model is always saved with the language model.

        Raises:
            InputError: ``threshold`` was set to something else than a finite number, or
                ``max_gap`` or ``fallback`` to something that a config cannot hold.
            OSError: The folder cannot be written.
        """
        config = self._saved_config()
        with replacing(Path(folder)) as new:
            if include_backbone or config.backbone.name == INSIDE:
                from ..backends.onnx.session import OnnxBackbone

                core: Any = self.backbone
                num_layers = config.backbone.num_layers
                if isinstance(core, OnnxBackbone):
                    core.save(new / INSIDE)
                else:
                    from ..backends.torch.loading import save_model

                    save_model(core.model, self.prompts.tokenizer, new / INSIDE)
                    num_layers = core.loaded_layers
                update = {
                    "name": INSIDE,
                    "revision": None,
                    "files": hashes(new / INSIDE),
                    "num_layers": num_layers,
                }
                backbone = config.backbone.model_copy(update=update)
                config = config.model_copy(update={"backbone": backbone})
            hub.write_artifact(new, config, self.projection, model_card(config))

    def _saved_config(self) -> RSRankConfig:
        """The config with the rule that is set."""
        rule = {
            "threshold": self.threshold,
            "max_gap": self.max_gap,
            "fallback": self.fallback,
        }
        try:
            return RSRankConfig.model_validate({**self.config.model_dump(), **rule})
        except ValidationError as error:
            raise InputError(f"{problems_of(error)}.") from None

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
        from huggingface_hub import HfApi

        from ..backends.hub_errors import HUB_ERRORS

        source = self.config.backbone.name
        if not include_backbone and source != INSIDE and not is_hub_id(source):
            raise ArtifactError(
                f"The artifact's language model is the local folder {source!r}, which nobody else "
                "could load. Make the artifact with the model's Hub id, or pass "
                "include_backbone=True to upload the model with it."
            )
        api = HfApi(token=token)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, include_backbone=include_backbone)
            card = Path(folder, hub.CARD)
            named = card.read_text(encoding="utf-8").replace(UNNAMED, repo_id)
            card.write_text(named, encoding="utf-8")
            try:
                api.create_repo(repo_id, private=private, exist_ok=True)
                if revision is not None:
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
                commit = api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    revision=revision,
                    commit_message=commit_message,
                )
            except HUB_ERRORS as error:
                raise ArtifactError(
                    f"Pushing to {repo_id!r} failed: {hub.reason(error)} Check the name "
                    "(owner/name) and that you are logged in with write access ('hf auth login')."
                ) from error
        return str(commit.commit_url)


@contextmanager
def _defects(name: str) -> Iterator[None]:
    """Turn what damaged files raise in the libraries that read them into ArtifactError."""
    try:
        yield
    except (RSRankError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    # The error of code in Rust that panics is no Exception.
    except BaseException as error:
        raise ArtifactError(
            f"{name!r} cannot be loaded ({type(error).__name__}: {error}). If its files are "
            "damaged, download or copy it again."
        ) from error


def open_on_torch(
    source: ModelSource, folder: Path, config: RSRankConfig
) -> "tuple[Backbone, PromptTokenizer, Projection]":
    """The language model on torch, its tokenizer with the artifact's template, and B.

    Errors are those of `RSRank.from_pretrained`.
    """
    with needs_torch():
        projection = hub.read_projection(folder, config)
    spec = config.backbone
    strict = source.backbone is None
    name, revision = _backbone_of(source, folder, spec)
    local = hub.is_folder(name)
    # A local folder is checked before transformers reads it, the cache after the download.
    files: dict[str, str] = {}
    if local:
        files = check_files(spec, Path(name), in_cache=False, strict=strict)
    core, prompts = open_model(
        name,
        revision,
        source.load,
        last_layer=config.layers[-1],
        template=config.template,
        fusion_layer=config.fusion_layer,
        similarity_window=config.similarity_window,
        attention_window=config.attention_window,
        max_lengths=(config.max_length, source.max_length),
        spec=spec,
    )
    folder_in_cache = None if local else folder_of(name, revision, source.load.cache_dir)
    if folder_in_cache is not None:
        files = check_files(spec, folder_in_cache, in_cache=True, strict=strict)
    if not strict or not spec.files:
        core.identity["files"] = files
    return core, prompts, projection


def _backbone_of(source: ModelSource, folder: Path, spec: BackboneSpec) -> tuple[str, str | None]:
    """Folder or Hub id of an artifact's language model, and its revision on the Hub."""
    if source.backbone is not None:
        return source.backbone, None
    if spec.name == INSIDE:
        return str(folder / INSIDE), None
    return spec.name, spec.revision


def _open_encoder(
    source: ModelSource, folder: Path, config: RSRankConfig
) -> "tuple[LanguageModel, PromptTokenizer, Weights]":
    """As `open_on_torch`, on ONNX Runtime: the files must be those that the artifact records."""
    from tokenizers import Tokenizer

    from ..backends.onnx.quantisation import calibration_ids
    from ..backends.onnx.session import OnnxBackbone, check_kind, read_encoder_config

    spec = config.backbone
    check_kind(spec.model_type, source.name)
    name, revision = _backbone_of(source, folder, spec)
    dtype = source.load.onnx_dtype(int8=config.int8)
    local = hub.is_folder(name)
    place = Path(name) if local else hub.download(name, revision, source.load)
    check_files(spec, place, in_cache=not local, strict=True)
    encoder = read_encoder_config(place)
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    limits = (encoder["max_position_embeddings"], config.max_length, source.max_length)
    prompts = PromptTokenizer(
        tokenizer,
        config.template,
        max_length=min(limit for limit in limits if limit is not None),
        shared_positions=False,
    )
    core = OnnxBackbone(
        place,
        encoder,
        last_layer=config.layers[-1],
        fusion_layer=config.fusion_layer,
        similarity_window=config.similarity_window,
        attention_window=config.attention_window,
        calibration=calibration_ids(prompts) if dtype == "int8" else (),
    )
    check_model(core.sample, tokenizer, spec, str(place))
    return core, prompts, hub.read_weights(folder, config)


def open_model(
    name: str,
    revision: str | None,
    options: LoadOptions,
    *,
    last_layer: int | None,
    template: Template,
    fusion_layer: int = 0,
    similarity_window: int | None = None,
    attention_window: int | None = None,
    max_lengths: tuple[int | None, ...] = (),
    spec: BackboneSpec | None = None,
) -> "tuple[Backbone, PromptTokenizer]":
    """Load a language model and its tokenizer on torch, and compare them with ``spec``."""
    with needs_torch():
        from ..backends.torch.check import open_backbone
        from ..backends.torch.loading import load_model
        from ..backends.torch.weights import bits_of
    loaded = load_model(name, revision=revision, options=options, last_layer=last_layer)
    core = open_backbone(
        loaded.model,
        last_layer,
        num_layers=loaded.num_layers,
        fusion_layer=fusion_layer,
    )
    if spec is not None:
        check_model(core.sample, loaded.tokenizer, spec, name, bits_of(core.model))
    core.similarity_window = similarity_window
    if attention_window is not None and core.causal:
        raise BackboneError(f"{core.name} is a decoder, and attention_window is for encoders.")
    core.attention_window = attention_window
    core.identity["bits"] = bits_of(core.model)
    limits = (core.max_length, *max_lengths)
    prompts = PromptTokenizer(
        loaded.tokenizer,
        template,
        max_length=min(limit for limit in limits if limit is not None),
        shared_positions=core.causal,
    )
    return core, prompts
