"""Options for loading a language model, shared by the library, adapters, commands and training.

This module imports torch only where a device or a dtype is needed, because adapters and commands
are made before anything is loaded.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, pip_install, problems_of

if TYPE_CHECKING:
    import torch


ONNX_DTYPES = (None, "float32", "int8")

# Weights that bitsandbytes quantises.
QUANTISED = ("int8", "nf4")

QUANTISED_ARGUMENTS = {"load_in_8bit": "int8", "load_in_4bit": "nf4"}
"""Arguments of transformers that stand for a dtype."""

# An encoder's files. Torch reads the last one; without it, the tokenizer is that of the model type.
ENCODER_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]

_SIZE = TypeAdapter[ByteSize](Annotated[ByteSize, Field(ge=0)])


def as_bytes(size: Any) -> int:
    """Bytes of a size: a whole number, or a text such as ``"512MB"``, ``"1.5 GB"`` or ``"2GiB"``.

    Raises:
        InputError: It is no size.

    >>> as_bytes("512MB"), as_bytes("2g"), as_bytes(5000)
    (512000000, 2000000000, 5000)
    """
    try:
        if isinstance(size, (bool, float)):
            raise TypeError
        return int(_SIZE.validate_python(size))
    except (ValidationError, TypeError):
        raise InputError(f"{size!r} is no size. Write bytes, or such as '512MB'.") from None


def _as_name(value: Any) -> Any:
    # A device or a dtype, for whose check torch need not be imported.
    if type(value).__module__.partition(".")[0] == "torch":
        return str(value).removeprefix("torch.")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# A text that users may also pass as a path, a device or a dtype.
Name = Annotated[str, BeforeValidator(_as_name)]
Size = Annotated[int, BeforeValidator(as_bytes)]
Folder = Annotated[Name, Field(min_length=1), AfterValidator(os.path.expanduser)]


class CacheSettings(BaseModel, use_attribute_docstrings=True):
    """Where prefixes are cached, for adapters and commands."""

    cache_size: Size | None = None
    """Most bytes of cached prefixes, such as 512MB; 0: no cache. Default: 10GB in a folder, else a
    share of the memory."""
    cache_folder: Folder | None = None
    """Folder for cached prefixes, in 8 bits. Default: they are cached in memory only."""

    @model_validator(mode="after")
    def _a_folder_needs_bytes(self) -> Self:
        if self.cache_folder is not None and self.cache_size == 0:
            raise InputError(
                "cache_size=0 switches the cache off, so cache_folder would have no effect. "
                "Leave one of the two out."
            )
        return self


class DeviceSettings(BaseModel, use_attribute_docstrings=True):
    """Where a language model runs, and in which numbers."""

    device: Name | None = None
    """cuda, cuda:1, mps, cpu. Default: cpu for encoders of BERT's kind, else the best one
    present."""
    dtype: Name | None = None
    """float32, bfloat16, float16; int8: documents of encoders on a CPU in 8 bits, or else the
    weights; nf4: weights in 4 bits (int8 and nf4 weights need the 8bit extra). Default: the fastest
    one that is precise enough. ``load_in_8bit=True`` and ``load_in_4bit=True`` stand for int8 and
    nf4."""

    @model_validator(mode="before")
    @classmethod
    def _read_quantised_arguments(cls, settings: Any) -> Any:
        """Settings in which ``load_in_8bit=True`` and ``load_in_4bit=True`` are a ``dtype``."""
        if not isinstance(settings, dict):
            return settings
        changed = dict(settings)
        for name, dtype in QUANTISED_ARGUMENTS.items():
            if not changed.pop(name, False):
                continue
            if changed.get("dtype") is not None:
                raise InputError(
                    f"{name} means dtype={dtype!r}, and dtype is {changed['dtype']!r}. "
                    "Set one of them."
                )
            changed["dtype"] = dtype
        return changed


class LoadSettings(DeviceSettings):
    """How a language model is loaded, for commands and training recipes."""

    local_files_only: bool = False
    """Never ask the Hub."""
    deterministic: bool = False
    """The same bits whatever else is scored: one row a batch (slower)."""

    def load_options(self) -> LoadOptions:
        """These settings as `LoadOptions`."""
        settings = {name: value for name, value in self if name in LoadSettings.model_fields}
        return LoadOptions(**settings)


class LoadOptions(LoadSettings):
    """Where and how a language model is loaded.

    Raises:
        InputError: A value is out of range, or there is no such option.
    """

    # Not keywords of the class: mypy takes those for a dataclass's, whose base must be frozen, too.
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str | bool | None = Field(default=None, repr=False)
    """Hub access token."""
    cache_dir: Name | None = None
    """Hub cache folder."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(f"{problems_of(error)}.") from None

    def source(self, name: str, revision: str | None = None, **more: Any) -> ModelSource:
        """A model that is loaded with these options, and ``more`` fields of `ModelSource`."""
        return ModelSource(name=name, revision=revision, **dict(self), **more)

    def on_onnx(self, model_type: str) -> bool:
        """Whether ONNX Runtime runs an artifact with this kind of language model, and not torch.

        It runs BERT's kind on a CPU, and everything where there is no torch.
        """
        fits = self.device in (None, "cpu") and self.dtype in ONNX_DTYPES
        return (model_type == "bert" and fits) or not find_spec("torch")

    @property
    def quantised(self) -> str | None:
        """What torch quantises weights to: ``"int8"``, ``"nf4"`` or None."""
        return self.dtype if self.dtype in QUANTISED else None

    @property
    def hub(self) -> dict[str, Any]:
        """Arguments of functions that read from the Hub."""
        return self.model_dump(include={"local_files_only", "token", "cache_dir"})

    def resolved_device(self) -> torch.device:
        """The requested device, or the best one present.

        Raises:
            InputError: There is no device of this name.
        """
        import torch

        if self.device is not None:
            try:
                return torch.device(self.device)
            except RuntimeError as error:
                raise InputError(f"device={self.device!r} is not a device: {error}") from None
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    def onnx_dtype(self, *, int8: bool) -> str:
        """The dtype to use on ONNX Runtime: the requested one, else the fastest.

        The fastest is int8 where the artifact allows it, else float32.

        Args:
            int8: Whether the artifact allows its documents to run in int8.

        Raises:
            InputError: ONNX Runtime does not compute in this dtype, or on this device.
        """
        if self.device not in (None, "cpu") or self.dtype not in ONNX_DTYPES:
            raise InputError(
                "ONNX Runtime computes on the CPU here, in int8 or float32. For another device or "
                f"dtype, use torch: {pip_install('lm')}."
            )
        return self.dtype or ("int8" if int8 else "float32")

    def resolved_dtype(self) -> torch.dtype:
        """The requested floating-point dtype, or bfloat16 where it is fast, else float32.

        Raises:
            InputError: There is no floating-point dtype of this name.
        """
        import torch

        if self.dtype is None or self.quantised:
            device = self.resolved_device()
            # On a CPU, products with quantised weights are computed in float32.
            fast = has_fast_bfloat16(device) and not (self.quantised and device.type == "cpu")
            return torch.bfloat16 if fast else torch.float32
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"dtype={self.dtype!r} is not a dtype here. Use 'float32', 'bfloat16', 'float16', "
                "'int8' or 'nf4'."
            )
        return dtype


class ModelSource(LoadOptions, CacheSettings):
    """All arguments of `RSRank.from_pretrained`; equal sources may share one model."""

    name: Name = "mini"
    """A built-in artifact, a folder or a Hub id; or another system (`adapters.kinds`)."""
    revision: str | None = None
    """Commit, tag or branch of the artifact, which names the language model's own revision."""
    backbone: Name | None = None
    """Another place to load the language model from, such as a local copy, which is checked."""
    max_length: int | None = Field(default=None, ge=1)
    """Use at most this many positions; longer documents are cut."""
    token_budget: int | None = Field(default=None, ge=1)
    """The most padded tokens in one batch. Default: a number that suits the device."""


class LoadArguments(TypedDict, total=False):
    """The fields of `ModelSource` as keywords, with the types that users may pass."""

    revision: str | None
    backbone: str | Path | None
    device: str | torch.device | None
    dtype: str | torch.dtype | None
    load_in_8bit: bool
    load_in_4bit: bool
    max_length: int | None
    token_budget: int | None
    cache_size: int | str | None
    cache_folder: str | Path | None
    deterministic: bool
    local_files_only: bool
    token: str | bool | None
    cache_dir: str | Path | None


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 matrices natively."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        return False
    # Older releases of torch cannot tell.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("amx_tile", "avx512_bf16"))
