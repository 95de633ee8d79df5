"""From a name to a frozen language model in memory: device, dtype, int8, nf4 and fp8."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import find_adapter_config_file

from ..errors import BackboneError, MissingDependencyError
from .attention import use_own_attention
from .hub_errors import HUB_ERRORS
from .linear import fuse_linear_maps
from .log_filters import importing_torchao, only, without_progress_bars
from .options import FLAGS, LoadOptions
from .weights import bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How many prepared products oneDNN keeps, 1,024 unless one says so: 64 take 45 MB less beside `mini`, and no more time.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

if hasattr(
    os, "register_at_fork"
):  # OpenMP's threads do not survive a fork; a child would wait for them for ever
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

LOAD_ERRORS: tuple[type[Exception], ...] = (
    *HUB_ERRORS,
    *(SafetensorError, ImportError, TypeError, LookupError, AttributeError, ArithmeticError),
)
"""What transformers raises for a model that is absent, damaged, absurd or in need of a package."""

Head = Literal["causal-lm", "seq2seq-lm"]
_AUTO: dict[Head, Any] = {"causal-lm": AutoModelForCausalLM, "seq2seq-lm": AutoModelForSeq2SeqLM}


def has_fast_fp8(device: torch.device) -> bool:
    """Whether the hardware multiplies float8 matrices: NVIDIA's since Ada and Hopper."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


class LoadedModel(NamedTuple):
    """A frozen language model in memory."""

    model: PreTrainedModel  # without the layers that nobody reads
    tokenizer: PreTrainedTokenizerBase
    num_layers: int  # of the checkpoint


def load_model(
    name: str | Path,
    *,
    revision: str | None,
    options: LoadOptions,
    head: Head | None = None,
    allow_bin: bool = False,
    last_layer: int | None = None,
) -> LoadedModel:
    """Load a frozen model and its tokenizer.

    Args:
        name: Local folder or Hub id.
        revision: Commit, tag or branch on the Hub.
        options: Device, dtype, quantisation, access.
        head: The output layer to load with it; None for the base model alone.
        allow_bin: Where there are no safetensors, read ``pytorch_model.bin`` (through torch's weights-only reader).
        last_layer: The last layer that is read (counted from 0): later ones are left on the disk. None for all.

    Raises:
        BackboneError: Not found, or it cannot be loaded.
        InputError: A device or dtype that there is not.
        MissingDependencyError: 8-bit or 4-bit without bitsandbytes, fp8 without torchao.
    """
    hub = {**options.hub, "revision": revision, "trust_remote_code": options.trust_remote_code}
    device, dtype, quantization = (
        options.resolved_device(),
        options.resolved_dtype(),
        _quantization(options),
    )
    failures = LOAD_ERRORS
    try:
        _refuse_adapter(str(name), revision, options)
        config = AutoConfig.from_pretrained(str(name), **hub)
        tokenizer = AutoTokenizer.from_pretrained(
            str(name), **hub
        )  # first: its errors come before the long download
        num_layers = _depth(config)
        if last_layer is not None:
            config = shortened(config, last_layer + 1)
        text = config.get_text_config()
        # These arguments override the model's config, which could name kernels to download and run.
        extra: dict[str, Any] = {"attn_implementation": None, "experts_implementation": None}
        if getattr(text, "attn_logit_softcapping", None):
            extra["attn_implementation"] = "eager"  # SDPA has no soft cap
        if head is None and _has_pooler(config):
            extra["add_pooling_layer"] = False
        if quantization is not None:
            extra |= {"quantization_config": quantization, "device_map": {"": device}}
            failures = (
                *LOAD_ERRORS,
                RuntimeError,
                AssertionError,
            )  # it is moved and rounded as it is loaded
        safetensors = None if allow_bin else True  # None: where there are any
        # Weights that the checkpoint has and nobody asked for are listed otherwise.
        with (
            only(_says_more_than_unexpected, "transformers.modeling_utils"),
            without_progress_bars(),
        ):
            model = (AutoModel if head is None else _AUTO[head]).from_pretrained(
                str(name), config=config, dtype=dtype, use_safetensors=safetensors, **hub, **extra
            )
    except failures as error:
        raise BackboneError(
            f"The language model {str(name)!r} (revision {revision or 'main'}) could not be loaded: {error}"
        ) from error
    if head is None:
        model = getattr(model, "language_model", model)  # the text part of a vision-language model
    if quantization is None:
        model = _moved(model, device, str(name))
    if options.weights == "fp8":
        _finish_fp8(model, str(name))
    if head is None:
        use_own_attention(model)
        fuse_linear_maps(model)
    return LoadedModel(model.requires_grad_(False), tokenizer, num_layers)


def _refuse_adapter(name: str, revision: str | None, options: LoadOptions) -> None:
    """Refuse a folder with an adapter: transformers applies it, or not, as peft is installed."""
    path = find_adapter_config_file(name, revision=revision, **options.hub)
    if path is not None:
        raise BackboneError(
            f"{name!r} contains {Path(path).name}, and language models with adapters are not "
            "supported. Merge the adapter into the model (peft's merge_and_unload), or remove it."
        )


def _moved(model: PreTrainedModel, device: torch.device, name: str) -> PreTrainedModel:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise BackboneError(
            f"The language model {name!r} was loaded but could not be moved to {device}: {error} "
            "Choose another device, or load it in 8-bit or 4-bit if it is too large."
        ) from error


def shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of a model's config that describes its first layers alone; the config itself if there are no more.

    Of a vision-language model, the text part is shortened.
    """
    count = _depth(config)
    if layers >= count:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if (
            isinstance(value, (list, tuple)) and len(value) == count
        ):  # one entry a layer: layer_types, no_rope_layers
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def _depth(config: PreTrainedConfig) -> int:
    """Layers of the text model; 0 where a config does not say, as some of models with a head do not."""
    return int(getattr(config.get_text_config(), "num_hidden_layers", 0))


def _says_more_than_unexpected(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "UNEXPECTED" not in text or any(
        word in text for word in ("MISSING", "MISMATCH", "CONVERSION")
    )


def _has_pooler(config: Any) -> bool:
    """Whether the model class takes ``add_pooling_layer`` (the BERT family; nobody reads the pooler here)."""
    model_class = MODEL_MAPPING.get(type(config), None)
    return (
        inspect.isclass(model_class)
        and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    )


def _is_no_cast_notice(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in record.getMessage()


def _quantization(options: LoadOptions) -> Any:
    """What transformers' ``quantization_config`` has to be; None without quantisation."""
    if options.weights is None:
        return None
    flag = next(name for name, weights in FLAGS.items() if weights == options.weights)
    package, extra = ("torchao", "fp8") if options.weights == "fp8" else ("bitsandbytes", "8bit")
    missing = [name for name in (package, "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"{flag} needs {' and '.join(missing)}.", extra)
    return _fp8(options) if options.weights == "fp8" else _bitsandbytes(options)


def _bitsandbytes(options: LoadOptions) -> Any:
    from transformers import BitsAndBytesConfig

    # Otherwise every linear map of every run logs that it casts its input, thousands of lines for one query.
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast_notice)
    # The default threshold of 6 picks outlier columns from the whole batch: scores would depend on neighbours.
    return BitsAndBytesConfig(
        load_in_8bit=options.weights == "int8",
        load_in_4bit=options.weights == "nf4",
        llm_int8_threshold=0.0,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=options.resolved_dtype(),
    )


def _fp8(options: LoadOptions) -> Any:
    """For torchao: a scale for each output row of a weight and, where activations are rounded too, for each token."""
    from transformers import TorchAoConfig
    from transformers.utils import is_torchao_available

    if not is_torchao_available():
        raise MissingDependencyError(
            "load_in_fp8 needs a newer torchao. Install with: pip install --upgrade torchao"
        )
    with importing_torchao():
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Float8WeightOnlyConfig,
            PerRow,
        )
    # set_inductor_config changes the whole process: in older releases even how exactly it multiplies float32 matrices.
    if has_fast_fp8(options.resolved_device()) and options.resolved_dtype() == torch.bfloat16:
        # Without a lower bound, a row of zeros (the embedding of padding) is divided by zero.
        kind = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), activation_value_lb=1e-12, set_inductor_config=False
        )
    else:
        kind = Float8WeightOnlyConfig(set_inductor_config=False)
    return TorchAoConfig(kind)


def _finish_fp8(model: PreTrainedModel, name: str) -> None:
    """Undo what torchao makes of a weight's row of zeros: its scale is zero, and it is divided by it."""
    if bits_of(model) != 8:
        raise BackboneError(
            f"{name!r} has no linear maps that torchao keeps in fp8. Load it without load_in_fp8."
        )
    for weight in model.parameters():
        data, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
        if data is not None and scale is not None:
            data.view(torch.uint8)[(scale == 0).squeeze(-1)] = 0
