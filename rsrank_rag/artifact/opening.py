"""Open an artifact with its language model, or make a new one of a language model and a B."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from ..backends.options import LoadOptions, ModelSource
from ..errors import ArtifactError, BackboneError, RSRankError, needs_torch, problems_of
from ..method.formula import Weights
from ..method.template import PromptTokenizer, Template
from . import hub
from .config import INSIDE, BackboneSpec, RSRankConfig
from .graphs import encoder_graphs, read_graphs
from .identity import check_files, check_model, describe, folder_of, hashes, largest_id

if TYPE_CHECKING:
    from ..backends.base import LanguageModel
    from ..backends.torch.backbone import Backbone
    from ..backends.torch.projection import Projection


class Parts(NamedTuple):
    """The parts of an artifact in memory: the arguments of `RSRank`."""

    backbone: "LanguageModel"
    prompts: PromptTokenizer
    projection: Weights
    config: RSRankConfig


def open_artifact(source: ModelSource, on_onnx: bool | None = None) -> Parts:
    """Load an artifact and the language model it belongs to; errors as `RSRank.from_pretrained`.

    Args:
        source: What to load, and how.
        on_onnx: Whether on ONNX Runtime or on torch; None for what ``source.on_onnx`` says.
    """
    try:
        folder = hub.resolve(source.name, source.revision, source)
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
    if on_onnx is None:
        on_onnx = source.on_onnx(kind)
    opened: Any = open_on_onnx if on_onnx else open_on_torch
    with _defects(source.name):
        backbone, prompts, projection = opened(source, folder, config)
    return Parts(backbone, prompts, projection, config)


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
) -> "tuple[Backbone, PromptTokenizer, Weights]":
    """The language model on torch, its tokenizer with the artifact's template, and B."""
    weights = hub.read_weights(folder, config)
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
        source,
        last_layer=config.layers[-1],
        template=config.template,
        fusion_layer=config.fusion_layer,
        similarity_window=config.similarity_window,
        attention_window=config.attention_window,
        max_lengths=(config.max_length, source.max_length),
        spec=spec,
    )
    folder_in_cache = None if local else folder_of(name, revision, source.cache_dir)
    if folder_in_cache is not None:
        files = check_files(spec, folder_in_cache, in_cache=True, strict=strict)
    if not strict or not spec.files:
        core.identity["files"] = files
    return core, prompts, weights


def _backbone_of(source: ModelSource, folder: Path, spec: BackboneSpec) -> tuple[str, str | None]:
    """Folder or Hub id of an artifact's language model, and its revision on the Hub."""
    if source.backbone is not None:
        return source.backbone, None
    if spec.name == INSIDE:
        return str(folder / INSIDE), None
    return spec.name, spec.revision


def open_on_onnx(
    source: ModelSource, folder: Path, config: RSRankConfig
) -> "tuple[LanguageModel, PromptTokenizer, Weights]":
    """As `open_on_torch`, on ONNX Runtime: the files must be those that the artifact records."""
    from tokenizers import Tokenizer

    from ..backends.onnx.session import OnnxBackbone, check_kind, read_encoder_config

    spec = config.backbone
    check_kind(spec.model_type, source.name)
    name, revision = _backbone_of(source, folder, spec)
    dtype = source.onnx_dtype(int8=config.int8)
    local = hub.is_folder(name)
    place = Path(name) if local else hub.download(name, revision, source)
    check_files(spec, place, in_cache=not local, strict=True)
    encoder = read_encoder_config(place)
    if largest_id(place / "tokenizer.json") >= encoder["vocab_size"]:
        raise ArtifactError(f"{place}: the tokenizer has ids for which there are no embeddings.")
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
        read_graphs(folder, config) or encoder_graphs(place, prompts, config),
        last_layer=config.layers[-1],
        fusion_layer=config.fusion_layer,
        similarity_window=config.similarity_window,
        attention_window=config.attention_window,
        int8=dtype == "int8",
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
    loaded = load_model(name, revision=revision, options=options, last_layer=last_layer)
    core = open_backbone(
        loaded.model,
        last_layer,
        num_layers=loaded.num_layers,
        fusion_layer=fusion_layer,
    )
    if spec is not None:
        check_model(core.sample, loaded.tokenizer, spec, name, core.bits)
    core.similarity_window = similarity_window
    if attention_window is not None and core.causal:
        raise BackboneError(f"{core.name} is a decoder, and attention_window is for encoders.")
    core.attention_window = attention_window
    core.identity["bits"] = core.bits
    limits = (core.max_length, *max_lengths)
    prompts = PromptTokenizer(
        loaded.tokenizer,
        template,
        max_length=min(limit for limit in limits if limit is not None),
        shared_positions=core.causal,
    )
    return core, prompts


def new_artifact(
    name: str,
    projection: "Projection | Weights",
    revision: str | None,
    options: LoadOptions | None,
    fields: dict[str, Any],
) -> Parts:
    """Join a language model and a B; see `RSRank.from_backbone`."""
    options = options or LoadOptions()
    template = fields.pop("template", None) or Template()
    core, prompts = open_model(
        name,
        revision,
        options,
        last_layer=projection.layers[-1],
        template=template,
        fusion_layer=fields.get("fusion_layer", 0),
        similarity_window=fields.get("similarity_window"),
        attention_window=fields.get("attention_window"),
    )
    files = hashes(folder_of(name, revision, options.cache_dir))
    try:
        config = RSRankConfig(
            backbone=describe(core, prompts, name, revision, files),
            layers=projection.layers,
            projection_dim=projection.weight.shape[2],
            template=template,
            **fields,
        )
    except ValidationError as error:
        raise ArtifactError(f"B does not fit {name}: {problems_of(error)}.") from None
    if tuple(projection.weight.shape) != config.shape:
        raise ArtifactError(
            f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs "
            f"(L, H, P, D) = {config.shape}."
        )
    weights = Weights(layers=projection.layers, **projection.state_dict())
    return Parts(core, prompts, weights, config)
