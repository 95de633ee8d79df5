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
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, problems_of

_SIZE = TypeAdapter[ByteSize](Annotated[ByteSize, Field(ge=0)])


def as_bytes(size: Any) -> int:
    """Bytes of a size: a number, or a text such as ``"512MB"``, ``"1.5 GB"`` or ``"2GiB"``.

    Raises:
        InputError: It is no size.

    >>> as_bytes("512MB"), as_bytes("2g"), as_bytes(5000)
    (512000000, 2000000000, 5000)
    """
    try:
        return int(_SIZE.validate_python(size))
    except ValidationError:
        raise InputError(f"{size!r} is no size. Write bytes, or such as '512MB'.") from None


Size = Annotated[int, BeforeValidator(as_bytes)]


def as_text(path: Any) -> Any:
    """A path as text; any other value as it is."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


Folder = Annotated[str, BeforeValidator(as_text), Field(min_length=1)]


class PrefixCache(BaseModel, extra="forbid", frozen=True):
    """Where prefixes are cached, and how much of each place they may fill.

    Sizes are bytes, or texts such as ``"512MB"``.
    """

    device: Size | None = None
    """Bytes of prefixes in the device's memory, in the model's dtype. None: a quarter of the free
    memory on CUDA, and `memory_share` elsewhere."""
    folder: Folder | None = None
    """Folder for prefixes in 8 bits. None: prefixes are not written to disk."""
    disk: Size = 10_000_000_000
    """The most bytes of files in the folder. The least recently used files are removed."""
    salt: str = ""
    """Entries of one salt are invisible to every other: one for each tenant."""

    @model_validator(mode="after")
    def _a_limit_needs_a_folder(self) -> Self:
        # A copy that was written down and read again has all fields set.
        if self.folder is None and self.disk != type(self).model_fields["disk"].default:
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
    if choice is False:
        return None
    if choice is True:
        choice = PrefixCache()
    if isinstance(choice, PrefixCache):
        return choice
    fields: Mapping[str, Any] = {"folder": choice}
    if isinstance(choice, Mapping):
        fields = choice
    elif isinstance(choice, int):
        fields = {"device": choice}
    elif isinstance(choice, str):
        with suppress(InputError):
            fields = {"device": as_bytes(choice)}
    try:
        return PrefixCache(**fields)
    except ValidationError as error:
        raise InputError(
            f"prefix_cache={choice!r}: {problems_of(error)}. Give True, False, a size such as "
            "'512MB', a folder, or a PrefixCache."
        ) from None
