"""Options for loading a language model, shared by the library, adapters, commands and training.

This module imports torch only where a device or a dtype is needed, because adapters and commands
are made before anything is loaded.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ..errors import InputError, pip_install
from ..prefixes.settings import Choice

if TYPE_CHECKING:
    import torch


ONNX_DTYPES = ("float32", "int8")


@dataclass(frozen=True)
class LoadOptions:
    """Where and how a language model is loaded; see `RSRank.from_pretrained`.

    ``load_in_8bit`` and ``load_in_4bit`` quantise weights with bitsandbytes, which saves memory and
    no time. ``dtype="int8"`` is for the documents of encoders on ONNX Runtime, and saves time.

    Raises:
        InputError: Both quantisations are requested, or there is no such runtime.
    """

    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    _: KW_ONLY
    runtime: str | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    local_files_only: bool = False
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    trust_remote_code: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise InputError("load_in_8bit and load_in_4bit exclude each other. Choose one.")
        if self.runtime not in (None, "torch", "onnx"):
            raise InputError(f"runtime={self.runtime!r} is not a runtime. Use 'torch' or 'onnx'.")

    def runtime_for(self, model_type: str) -> str:
        """``"onnx"`` or ``"torch"``: what runs an artifact with this kind of language model.

        By default, ONNX Runtime runs BERT's kind on a CPU, and everything where there is no torch.
        """
        if self.runtime or not find_spec("torch"):
            return self.runtime or "onnx"
        fits = model_type == "bert" and not self.weights and self._dtype in ("", *ONNX_DTYPES)
        return "onnx" if fits and self.on_cpu else "torch"

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return str(self.device or self.resolved_device()) == "cpu"

    @property
    def _dtype(self) -> str:
        return str(self.dtype or "").removeprefix("torch.")

    @property
    def weights(self) -> str | None:
        """What weights are quantised to: ``"int8"``, ``"nf4"`` or None."""
        if self.load_in_8bit:
            return "int8"
        return "nf4" if self.load_in_4bit else None

    @property
    def hub(self) -> dict[str, Any]:
        """Arguments of functions that read from the Hub."""
        return {
            "local_files_only": self.local_files_only,
            "token": self.token,
            "cache_dir": self.cache_dir,
        }

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

    def settled_dtype(self, model_type: str, *, int8: bool = False) -> str:
        """Name of the dtype to load the model in: the requested one, else the fastest.

        The fastest is bfloat16 on torch where the device is fast at it, and int8 on ONNX Runtime
        where the artifact allows it; elsewhere it is float32.

        Args:
            model_type: The kind of the language model, as in its config.
            int8: Whether the artifact allows its documents to run in int8.

        Raises:
            InputError: The runtime does not compute in this dtype, or on this device.
        """
        if self.runtime_for(model_type) == "torch":
            return str(self.resolved_dtype()).removeprefix("torch.")
        dtype = self._dtype or ("int8" if int8 else "float32")
        if str(self.device or "cpu") != "cpu" or self.weights or dtype not in ONNX_DTYPES:
            raise InputError(
                "ONNX Runtime computes on the CPU here, in int8 or float32. For another device or "
                f"dtype, or load_in_8bit and the like, use torch: {pip_install('lm')}"
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
        dtype = getattr(torch, self._dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"dtype={self.dtype!r} is not a dtype of torch here. Use 'float32', 'bfloat16' or "
                "'float16'. 'int8' is for encoders of BERT's kind on a CPU (runtime='onnx')."
            )
        return dtype


@dataclass(frozen=True)
class ModelSource:
    """All arguments of `RSRank.from_pretrained`; equal sources may share one model.

    The name may also be that of another system (`adapters.systems`).
    """

    name: str
    revision: str | None = None
    load: LoadOptions = LoadOptions()
    backbone: str | None = None
    max_length: int | None = None
    token_budget: int | None = None
    prefix_cache: Choice = True


def _as_name(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A device or a dtype, for whose check torch need not be imported.
    if type(value).__module__.partition(".")[0] == "torch":
        return str(value).removeprefix("torch.")
    return value


# A text that users may also pass as a path, a device or a dtype.
Name = Annotated[str, BeforeValidator(_as_name)]


class LoadSettings(BaseModel):
    """Fields of `LoadOptions` for adapters and training configs, and options of commands."""

    device: Name | None = Field(
        default=None, description="cuda, cuda:1, mps, cpu. Default: the best one present."
    )
    dtype: Name | None = Field(
        default=None,
        description="float32, bfloat16, float16, int8 (encoders on a CPU). Default: the fastest "
        "one that is precise enough.",
    )
    runtime: Literal["torch", "onnx"] | None = Field(
        default=None,
        description="torch or onnx. Default: onnx for encoders of BERT's kind on a CPU.",
    )
    load_in_8bit: bool = Field(default=False, description="int8 weights (needs the 8bit extra).")
    load_in_4bit: bool = Field(default=False, description="nf4 weights (needs the 8bit extra).")
    local_files_only: bool = Field(default=False, description="Never ask the Hub.")
    trust_remote_code: bool = Field(
        default=False, description="Run code from the model's repository (jina-reranker-v2)."
    )
    deterministic: bool = Field(
        default=False,
        description="The same bits whatever else is scored: one row a batch (slower).",
    )

    def load_options(self, **more: Any) -> LoadOptions:
        """These settings and ``more`` fields of `LoadOptions`.

        Raises:
            InputError: Both quantisations are requested.
        """
        return LoadOptions(
            **{name: getattr(self, name) for name in LoadSettings.model_fields}, **more
        )


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
