"""Options for loading a language model, shared by the library, adapters, commands and training.

This module imports torch only where a device or a dtype is needed, because adapters and commands
are made before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, pip_install, problems_of
from ..prefixes.settings import as_text

if TYPE_CHECKING:
    import torch


ONNX_DTYPES = ("float32", "int8")

# An encoder's files. Torch reads the last one; without it, the tokenizer is that of the model type.
ENCODER_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def _as_name(value: Any) -> Any:
    # A device or a dtype, for whose check torch need not be imported.
    if type(value).__module__.partition(".")[0] == "torch":
        return str(value).removeprefix("torch.")
    return as_text(value)


# A text that users may also pass as a path, a device or a dtype.
Name = Annotated[str, BeforeValidator(_as_name)]


class LoadSettings(BaseModel, use_attribute_docstrings=True):
    """How a language model is loaded, for adapters, training configs and commands.

    ``load_in_8bit`` and ``load_in_4bit`` quantise weights with bitsandbytes, which saves memory and
    no time. ``dtype="int8"`` is for the documents of encoders on ONNX Runtime, and saves time.
    """

    device: Name | None = None
    """cuda, cuda:1, mps, cpu. Default: cpu for encoders of BERT's kind, else the best one
    present."""
    dtype: Name | None = None
    """float32, bfloat16, float16, int8 (encoders on a CPU). Default: the fastest one that is
    precise enough."""
    runtime: Literal["torch", "onnx"] | None = None
    """torch or onnx. Default: onnx for encoders of BERT's kind, unless a GPU is named."""
    load_in_8bit: bool = False
    """int8 weights (needs the 8bit extra)."""
    load_in_4bit: bool = False
    """nf4 weights (needs the 8bit extra)."""
    local_files_only: bool = False
    """Never ask the Hub."""
    trust_remote_code: bool = False
    """Run code from the model's repository (jina-reranker-v2)."""
    deterministic: bool = False
    """The same bits whatever else is scored: one row a batch (slower)."""

    @model_validator(mode="after")
    def _one_quantisation(self) -> Self:
        if self.load_in_8bit and self.load_in_4bit:
            raise InputError("load_in_8bit and load_in_4bit exclude each other. Choose one.")
        return self

    def load_options(self, **more: Any) -> LoadOptions:
        """These settings and ``more`` fields of `LoadOptions`."""
        fields = {name: getattr(self, name) for name in LoadSettings.model_fields}
        return LoadOptions(**fields, **more)


class LoadOptions(LoadSettings):
    """Where and how a language model is loaded; see `RSRank.from_pretrained`.

    Raises:
        InputError: Both quantisations are requested, or there is no such runtime.
    """

    # Not keywords of the class: mypy takes those for a dataclass's, whose base must be frozen, too.
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: str | bool | None = Field(default=None, repr=False)
    cache_dir: Name | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(f"{problems_of(error)}.") from None

    def runtime_for(self, model_type: str) -> str:
        """``"onnx"`` or ``"torch"``: what runs an artifact with this kind of language model.

        By default, ONNX Runtime runs BERT's kind on a CPU unless a GPU is named, and everything
        where there is no torch.
        """
        if self.runtime or not find_spec("torch"):
            return self.runtime or "onnx"
        fits = model_type == "bert" and not self.weights and self.dtype in (None, *ONNX_DTYPES)
        return "onnx" if fits and self.device in (None, "cpu") else "torch"

    @property
    def weights(self) -> str | None:
        """What weights are quantised to: ``"int8"``, ``"nf4"`` or None."""
        if self.load_in_8bit:
            return "int8"
        return "nf4" if self.load_in_4bit else None

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
        dtype = self.dtype or ("int8" if int8 else "float32")
        if self.device not in (None, "cpu") or self.weights or dtype not in ONNX_DTYPES:
            raise InputError(
                "ONNX Runtime computes on the CPU here, in int8 or float32. For another device or "
                f"dtype, or load_in_8bit and the like, use torch: {pip_install('lm')}."
            )
        return dtype

    def resolved_dtype(self) -> torch.dtype:
        """The requested floating-point dtype, or bfloat16 where it is fast, else float32.

        Raises:
            InputError: There is no floating-point dtype of this name.
        """
        import torch

        if self.dtype is None:
            fast = has_fast_bfloat16(self.resolved_device())
            return torch.bfloat16 if fast else torch.float32
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"dtype={self.dtype!r} is not a dtype of torch here. Use 'float32', 'bfloat16' or "
                "'float16'. 'int8' is for encoders of BERT's kind on a CPU (runtime='onnx')."
            )
        return dtype


@dataclass(frozen=True)
class ModelSource:
    """All arguments of `RSRank.from_pretrained`; equal sources may share one model.

    The name may also be that of another system (`adapters.kinds`).
    """

    name: str
    revision: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    backbone: str | None = None
    max_length: int | None = None
    token_budget: int | None = None
    cache_size: int | None = None
    cache_folder: str | None = None


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
