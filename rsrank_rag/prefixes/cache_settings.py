"""The settings ``cache_size`` and ``cache_folder``: where prefixes are cached between calls."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, problems_of

# Bytes of a folder, by default.
FOLDER_BYTES = 10_000_000_000

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


def as_text(path: Any) -> Any:
    """A path as text; any other value as it is."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


Size = Annotated[int, BeforeValidator(as_bytes)]
Folder = Annotated[
    str, BeforeValidator(as_text), Field(min_length=1), AfterValidator(os.path.expanduser)
]


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


def cache_settings(size: int | str | None, folder: str | Path | None) -> CacheSettings:
    """Validated settings.

    Raises:
        InputError: ``size`` is no size, ``folder`` is no path, or a folder has the size 0.
    """
    try:
        return CacheSettings.model_validate({"cache_size": size, "cache_folder": folder})
    except ValidationError as error:
        raise InputError(f"{problems_of(error)}.") from None


def memory_share(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """A twentieth of the memory of the machine or its container: 128 MB at least, 2 GB at most."""
    sizes = []
    if hasattr(os, "sysconf"):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Versions 2 and 1 of control groups. A file is absent, or says "max", where there is no limit.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            sizes.append(int((cgroup / name).read_text()))
    return min(max(min(sizes, default=0) // 20, 128_000_000), 2_000_000_000)
