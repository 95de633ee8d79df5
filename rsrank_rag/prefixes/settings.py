"""The argument ``prefix_cache=``: where documents' prefixes are cached between calls."""

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

from ..errors import InputError, problems_of

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


def _as_text(folder: Any) -> Any:
    return os.fspath(folder) if isinstance(folder, os.PathLike) else folder


Folder = Annotated[str, BeforeValidator(_as_text)]


class PrefixCache(BaseModel, extra="forbid", frozen=True):
    """Where prefixes are cached, and how much of each place they may fill.

    Sizes are bytes, or texts such as ``"512MB"``.
    """

    device: Size | None = None
    """On the device, as they are. None for a quarter of a GPU's free memory, and for `memory_share`
    on a CPU."""
    folder: Folder | None = None
    """On disk, in 8 bits; None for not at all."""
    disk: Size = 10_000_000_000
    """Limit of the folder: the least recently used files are removed."""
    salt: str = ""
    """Entries of one salt are invisible to every other: one for each tenant."""

    @model_validator(mode="after")
    def _a_limit_needs_a_folder(self) -> Self:
        if "disk" in self.model_fields_set and self.folder is None:
            raise InputError("disk limits a folder, and there is none. Add folder=.")
        return self


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


Choice = bool | int | str | Path | Mapping[str, Any] | PrefixCache


def as_prefix_cache(choice: Choice) -> PrefixCache | None:
    """The settings for True or False, a size, a folder, or the settings themselves.

    Raises:
        InputError: ``choice`` is none of these.

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
            raise InputError(f"prefix_cache: {problems_of(error)}.") from None
    if isinstance(choice, int) or (isinstance(choice, str) and parse_size(choice) is not None):
        return PrefixCache(device=as_bytes(choice))
    if not isinstance(choice, (str, os.PathLike)) or not os.fspath(choice):
        raise InputError(
            f"prefix_cache={choice!r} is neither True, False, a size such as '512MB', a folder, "
            "nor a PrefixCache."
        )
    return PrefixCache(folder=os.fspath(choice))
