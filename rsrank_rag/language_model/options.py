"""How a language model is loaded, and which: declared here once, for the library, adapters, commands and recipes.

Importing this loads no torch: adapters and commands are made before anything is loaded.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field

from ..errors import InputError
from ..prefixes.settings import Choice

if TYPE_CHECKING:
    import torch

Weights = Literal["int8", "nf4", "fp8"]
"""What weights are rounded to."""

FLAGS: dict[str, Weights] = {"load_in_8bit": "int8", "load_in_4bit": "nf4", "load_in_fp8": "fp8"}
"""How users ask for it, as in transformers."""


@dataclass(frozen=True)
class LoadOptions:
    """Where and how a language model is loaded, see `RSRank.from_pretrained`; only artifacts are read in ``int8``.

    ``load_in_8bit``, ``load_in_4bit`` and ``load_in_fp8`` may be given instead of ``weights``: ``int8`` and ``nf4``
    (bitsandbytes) save memory, not time. ``fp8`` (torchao) does so too; on CUDA devices that multiply float8 (Ada,
    Hopper and later), in bfloat16, activations are rounded as well, token by token. None leaves them as they are.

    Raises InputError: weights that there are not, or two kinds of them.
    """

    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    weights: Weights | None = None
    _: KW_ONLY
    local_files_only: bool = False
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    trust_remote_code: bool = False
    deterministic: bool = False
    load_in_8bit: InitVar[bool] = False
    load_in_4bit: InitVar[bool] = False
    load_in_fp8: InitVar[bool] = False

    def __post_init__(self, load_in_8bit: bool, load_in_4bit: bool, load_in_fp8: bool) -> None:
        given = zip(FLAGS, (load_in_8bit, load_in_4bit, load_in_fp8), strict=True)
        flags = [flag for flag, wanted in given if wanted]
        asked = flags if self.weights is None else [f"weights={self.weights!r}", *flags]
        if len(asked) > 1:
            raise InputError(f"{' and '.join(asked)} exclude each other. Choose one.")
        if flags:
            object.__setattr__(self, "weights", FLAGS[flags[0]])
        if self.weights is not None and self.weights not in get_args(Weights):
            raise InputError(f"weights={self.weights!r} is none of {', '.join(get_args(Weights))}.")

    @property
    def hub(self) -> dict[str, Any]:
        """Arguments of whatever reads from the Hub."""
        return {
            "local_files_only": self.local_files_only,
            "token": self.token,
            "cache_dir": self.cache_dir,
        }

    def resolved_device(self) -> torch.device:
        """The device asked for, or the best one present; InputError if it is not the name of one."""
        import torch

        if self.device is not None:
            try:
                return torch.device(self.device)
            except RuntimeError as error:
                raise InputError(f"device={self.device!r} is not a device: {error}") from None
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    def settled_dtype(self, *, int8: bool = False) -> str:
        """Name of the dtype asked for, or of the fastest here, which is int8 only where that is good enough (``int8``).

        Raises InputError as `resolved_dtype`, and where int8 is asked for and cannot be had.
        """
        device, asked = self.resolved_device(), self.dtype == "int8"
        wanted = asked or (
            int8 and self.dtype is None and not has_fast_bfloat16(device, than_int8=True)
        )
        if wanted and self.weights is None and device.type == "cpu" and has_fast_int8():
            return "int8"
        if asked:
            raise InputError(
                "dtype='int8' needs an x86 CPU with AVX2, and excludes load_in_8bit and the like."
            )
        return str(self.resolved_dtype()).removeprefix("torch.")

    def resolved_dtype(self) -> torch.dtype:
        """The dtype asked for, or bfloat16 where it is fast; InputError if it is no floating-point dtype's name."""
        import torch

        if self.dtype is not None:
            found = (
                self.dtype
                if isinstance(self.dtype, torch.dtype)
                else getattr(torch, self.dtype, None)
            )
            if not isinstance(found, torch.dtype) or not found.is_floating_point:
                raise InputError(
                    f"dtype={self.dtype!r} is not a dtype. Use 'float32', 'bfloat16' or 'float16'."
                )
            return found
        return torch.bfloat16 if has_fast_bfloat16(self.resolved_device()) else torch.float32


@dataclass(frozen=True)
class ModelSource:
    """Everything that decides which model is loaded and how; equal sources may share one model.

    As `RSRank.from_pretrained` explains; the name may be another system's.
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
    return (
        str(value).removeprefix("torch.")
        if type(value).__module__.partition(".")[0] == "torch"
        else value
    )


Name = Annotated[str, BeforeValidator(_as_name)]
"""A text, which may be given as a path, a device or a dtype."""


class LoadSettings(BaseModel):
    """The same as fields with the names that users know: of adapters and recipes and, as options, of commands."""

    device: Name | None = Field(
        default=None, description="cuda, cuda:1, mps, cpu. Default: the best one present."
    )
    dtype: Name | None = Field(
        default=None,
        description="float32, bfloat16, float16, int8 (CPU). Default: the fastest that is good enough.",
    )
    load_in_8bit: bool = Field(default=False, description="int8 weights (needs the 8bit extra).")
    load_in_4bit: bool = Field(default=False, description="nf4 weights (needs the 8bit extra).")
    load_in_fp8: bool = Field(default=False, description="float8 weights (needs the fp8 extra).")
    local_files_only: bool = Field(default=False, description="Never ask the Hub.")
    trust_remote_code: bool = Field(
        default=False, description="Run code from the model's repository (jina-reranker-v2)."
    )
    deterministic: bool = Field(
        default=False,
        description="Scores never depend on the other documents of a call (slower on CPUs with AMX).",
    )

    def load_options(self, **more: Any) -> LoadOptions:
        """What these settings, and ``more`` options without a field, ask for; InputError for two kinds of weights."""
        return LoadOptions(
            **{name: getattr(self, name) for name in LoadSettings.model_fields}, **more
        )


def leaves_instructions_unused() -> bool:
    """Whether torch is told (``ATEN_CPU_CAPABILITY``) to do without AVX512 that is there.

    Then its fused attention fails in bfloat16, and other libraries may go on using what it does without.
    """
    import torch

    has_more = getattr(
        torch.cpu, "_is_avx512_supported", lambda: False
    )()  # private, so it may vanish
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2") and bool(has_more)


def has_fast_bfloat16(device: torch.device, *, than_int8: bool = False) -> bool:
    """Whether the hardware multiplies bfloat16 matrices natively; ``than_int8``: faster than int8 ones, too (AMX)."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or leaves_instructions_unused():
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")[
        : 1 if than_int8 else 2
    ]  # private: may vanish
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def has_fast_int8() -> bool:
    """Whether this processor and this torch multiply int8 matrices faster than float32 ones: x86 with AVX2."""
    import torch

    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in an older torch
    return bool(has.get("avx2")) and hasattr(torch.ops.onednn, "qlinear_pointwise")
