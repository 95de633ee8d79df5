"""Where documents' prefixes are kept between calls: the choices behind ``prefix_cache=``."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError

_SIZE = TypeAdapter(ByteSize)


def parse_size(text: str) -> int | None:
    """Bytes of a size such as ``"512MB"``, ``"1.5 GB"`` or ``"2GiB"``; None if it is not one.

    >>> parse_size("512MB"), parse_size("2g"), parse_size("prefixes/")
    (512000000, 2000000000, None)
    """
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError:
        return None


def as_bytes(size: Any) -> int:
    """Bytes of a size; InputError if it is none."""
    limit = parse_size(size) if isinstance(size, str) else size
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise InputError(f"{size!r} is no size. Write bytes, or such as '512MB'.")
    return limit


Size = Annotated[int, BeforeValidator(as_bytes)]
Folder = Annotated[
    str,
    BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given),
]


class PrefixCache(BaseModel, extra="forbid", frozen=True):
    """Where prefixes are kept and how much of each place they may fill. Sizes are bytes or such as ``"512MB"``."""

    device: Size | None = None
    """On the device, as they are; None for a quarter of what is free on a GPU, and on a CPU for `memory_share`."""
    host: Size = 0
    """In host memory, in 8 bits, beside the device: much more fits there."""
    folder: Folder | None = None
    """On disk, in 8 bits; None for not at all."""
    disk: Size | None = None
    """Limit of the folder: the least recently used files go. None for none."""
    salt: str = ""
    """Entries of one salt are invisible to every other: one for each tenant."""

    @model_validator(mode="after")
    def _a_limit_needs_a_folder(self) -> Self:
        if self.disk is not None and self.folder is None:
            raise InputError("disk limits a folder, and none was given. Add folder=.")
        return self


def memory_share(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """A twentieth of the machine's memory or, if less, of its container's limit: 128 MB at least, 2 GB at most."""
    sizes = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    )
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # versions 2 and 1
        with suppress(OSError, ValueError):  # absent, or "max"
            sizes.append(int((cgroup / name).read_text()))
    return min(max(min(sizes, default=0) // 20, 128_000_000), 2_000_000_000)


Choice = bool | int | str | Path | Mapping[str, Any] | PrefixCache


def as_prefix_cache(choice: Choice) -> PrefixCache | None:
    """The settings that a choice stands for: True and False, a size, a folder, or all settings.

    Raises InputError: not a choice.

    >>> as_prefix_cache("512MB").device, as_prefix_cache("prefixes").folder, as_prefix_cache(False)
    (512000000, 'prefixes', None)
    """
    if isinstance(choice, PrefixCache):
        return choice
    if isinstance(choice, bool):
        return PrefixCache() if choice else None
    if isinstance(choice, Mapping):
        try:
            return PrefixCache.model_validate(dict(choice))
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(
                f"prefix_cache: {'.'.join(map(str, first['loc']))}: {first['msg']}."
            ) from None
    if isinstance(choice, int) or (isinstance(choice, str) and parse_size(choice) is not None):
        return PrefixCache(device=as_bytes(choice))
    if not isinstance(choice, (str, os.PathLike)) or not os.fspath(choice):
        raise InputError(
            f"prefix_cache={choice!r} is neither True, False, a size such as '512MB', a folder, nor a PrefixCache."
        )
    return PrefixCache(folder=os.fspath(choice))
