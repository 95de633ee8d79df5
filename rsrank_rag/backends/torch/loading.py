"""From a name to a frozen language model in memory: device, dtype, int8 and nf4."""

from __future__ import annotations

import copy
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from safetensors import SafetensorError
from transformers.utils import find_adapter_config_file

from ...errors import BackboneError, MissingDependencyError
from ..hub_errors import HUB_ERRORS
from ..options import LoadOptions
from .attention import use_grouped_attention
from .quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# What transformers raises for a model that is absent, damaged or absurd, or that needs a package or
# a device that is not there.
LOAD_ERRORS: tuple[type[Exception], ...] = (
    *HUB_ERRORS,
    SafetensorError,
    ImportError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


class LoadedModel(NamedTuple):
    """A frozen language model in memory.

    Attributes:
        model: The model, without layers after the last one that was requested.
        tokenizer: Its tokenizer.
        num_layers: Number of layers of the whole checkpoint.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    num_layers: int


def load_model(
    name: str | Path,
    *,
    revision: str | None,
    options: LoadOptions,
    last_layer: int | None = None,
) -> LoadedModel:
    """Load a frozen base model and its tokenizer.

    Args:
        name: Local folder or Hub id.
        revision: Commit, tag or branch on the Hub.
        options: Device, dtype, quantisation, access.
        last_layer: The last layer to load, counted from 0; None for all.

    Raises:
        BackboneError: The model is not there or cannot be loaded.
        InputError: There is no such device or dtype.
        MissingDependencyError: bitsandbytes is not installed, and quantisation is requested.
    """
    name = str(name)
    device = options.resolved_device()
    hub = {**options.hub, "revision": revision}
    arguments = {**hub, "dtype": options.resolved_dtype(), **quantisation(options)}
    try:
        _refuse_adapter(name, revision, options)
        config = transformers.AutoConfig.from_pretrained(name, **hub)
        # The tokenizer comes first, so that its errors precede the long download.
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **hub)
        num_layers = config.get_text_config().num_hidden_layers
        if last_layer is not None:
            config = shortened(config, last_layer + 1)
        with quiet_transformers():
            model, report = transformers.AutoModel.from_pretrained(
                name,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **_overrides(config),
                **arguments,
            )
        if options.quantised is None:
            model = model.to(device)
    except LOAD_ERRORS as error:
        raise BackboneError(
            f"The language model {name!r} (revision {revision or 'main'}) could not be loaded: "
            f"{error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise BackboneError(
            f"The language model {name!r} (revision {revision or 'main'}) lacks {len(missing)} "
            f"weights, such as {missing[0]}. Download it again, or choose another model."
        )
    # The text part of a vision-language model.
    model = getattr(model, "language_model", model)
    use_grouped_attention(model)
    return LoadedModel(model.requires_grad_(False), tokenizer, num_layers)


def _refuse_adapter(name: str, revision: str | None, options: LoadOptions) -> None:
    """Refuse a folder with an adapter, which transformers applies only if peft is installed."""
    path = find_adapter_config_file(name, revision=revision, **options.hub)
    if path is not None:
        raise BackboneError(
            f"{name!r} contains {Path(path).name}, and language models with adapters are not "
            "supported. Merge the adapter into the model (peft's merge_and_unload), or remove it."
        )


def _overrides(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that override the model's config, which could name kernels to download and run."""
    attention = None
    # SDPA has no soft cap.
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        attention = "eager"
    overrides: dict[str, Any] = {
        "attn_implementation": attention,
        "experts_implementation": None,
    }
    model_class = transformers.MODEL_MAPPING.get(type(config), None)
    if inspect.isclass(model_class):
        parameters = inspect.signature(model_class.__init__).parameters
        # BERT-like models have a pooler, whose output no layer reads.
        if "add_pooling_layer" in parameters:
            overrides["add_pooling_layer"] = False
    return overrides


def shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of a config that describes the first layers only; the config itself if it has no more.

    Of a vision-language model, the text part is shortened.
    """
    count = config.get_text_config().num_hidden_layers
    if layers >= count:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        # One entry a layer, such as layer_types and no_rope_layers.
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def quantisation(options: LoadOptions) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for quantised weights; empty without quantisation.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
    """
    if options.quantised is None:
        return {}
    if find_spec("bitsandbytes") is None:
        raise MissingDependencyError("Weights in int8 and nf4 need bitsandbytes.", "8bit")
    # The default threshold of 6 picks outlier columns from the whole batch, so that a score would
    # depend on the other documents.
    config = transformers.BitsAndBytesConfig(
        load_in_8bit=options.quantised == "int8",
        load_in_4bit=options.quantised == "nf4",
        llm_int8_threshold=0.0,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=options.resolved_dtype(),
    )
    return {"quantization_config": config, "device_map": {"": options.resolved_device()}}
