"""Cached prefixes in 8 bits, and as files.

Axes: L layers, H KV heads, S prefix positions, D head dimension.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save
from typing_extensions import Self

from ..method.formula import Numbers, cast, namespace, similarity_windows, to_numpy
from ..method.prefix import Prefix
from ..partial_files import appearing, remove_stale

if TYPE_CHECKING:
    from ..backends.base import LanguageModel

FORMAT = "rsrank-prefix-4"

# The largest float16, the dtype of scales.
LARGEST_SCALE = 65504

DIGEST_BYTES = 32


@dataclass(frozen=True)
class PackedPrefix:
    """A prefix in 8 bits, with one scale for each token and head.

    A scale for each token keeps one token's large values (an attention sink's) from making other
    tokens less accurate. L layers, H heads, S tokens, D head dimension.

    Attributes:
        codes: Keys, then values, (2, L, H, S, D) int8.
        scales: (2, L, H, S, 1) fp16.
        pooled: `Prefix.pooled`, as it is.
    """

    codes: Numbers
    scales: Numbers
    pooled: Numbers

    @classmethod
    def of(cls, prefix: Prefix) -> Self | None:
        """Quantise a prefix; the largest error is half a scale, 0.4% of the token's largest entry.

        None if a number is infinite, NaN or too large, because 8 bits would hide that.
        """
        states = cast(prefix.states, "float32")
        xp = namespace(states)
        scales = xp.clip(xp.amax(abs(states), -1, keepdims=True) / 127, 1e-7, None)
        if not bool((scales <= LARGEST_SCALE).all()):
            return None
        scales = cast(scales, "float16")
        codes = (states / cast(scales, "float32")).round().clip(-127, 127)
        return cls(to_numpy(cast(codes, "int8")), to_numpy(scales), to_numpy(prefix.pooled))

    @staticmethod
    def size(length: int, model: "LanguageModel") -> int:
        """Bytes of the packed prefix of a document with so many positions."""
        layers = model.last_layer - model.fusion_layer
        size = length * 2 * layers * model.num_heads * (model.head_dim + 2)
        if model.fusion_layer:
            windows = similarity_windows(length, model.similarity_window)
            size += 4 * len(windows) * model.hidden_size
        return size

    def unpack(self, device: Any, dtype: Any) -> Prefix:
        """The prefix on a device, with keys and values in this dtype, of numpy or of torch."""
        xp = namespace(dtype)
        codes = cast(xp.asarray(self.codes, device=device), "float32")
        states = codes * cast(xp.asarray(self.scales, device=device), "float32")
        # A scale that was rounded up may pass the largest number.
        largest = float(xp.finfo(dtype).max)
        states = xp.asarray(states.clip(-largest, largest), dtype=dtype)
        return Prefix(states, xp.asarray(self.pooled, device=device))


class Disk:
    """Entries as files, one each. Several processes may share a folder.

    A file appears only when it is complete, and begins with a checksum of its key and of all other
    bytes. Only its owner can read it, because it says what the document says. The least recently
    used files are removed when the folder outgrows its limit.

    Args:
        folder: Where the files are.
        limit: Bytes of all files.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in folder.iterdir():
            remove_stale(part)
        self.bytes = sum(size for _, size, _ in self._files())
        # Bytes written since the folder was last listed. Both numbers are estimates, which each
        # listing corrects: other threads and processes write there, too. A lock could be held by a
        # thread that a forked process does not have.
        self._since = 0

    def path(self, key: str) -> Path:
        """Where an entry's file is, or would be."""
        return self.folder / key[:2] / f"{key}.prefix"

    def __contains__(self, key: str) -> bool:
        return self.path(key).is_file()

    def get(self, key: str) -> PackedPrefix | None:
        """The prefix of a key; None if there is no file, or the file cannot be read now.

        Raises:
            ValueError: The file is damaged. It has been removed.
        """
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        body = content[DIGEST_BYTES:]
        if content[:DIGEST_BYTES] != _checksum(key, body):
            with contextlib.suppress(OSError):
                path.unlink()
                self.bytes -= len(content)
            raise ValueError(f"{path}: its checksum does not match")
        # The time of use; the folder may belong to another user.
        with contextlib.suppress(OSError):
            os.utime(path)
        return PackedPrefix(**load(body))

    def put(self, key: str, entry: PackedPrefix) -> int:
        """Write a prefix, and return how many older files were removed for it.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.path(key)
        if path.is_file():
            return 0
        # The folder may have been removed.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        body = save({name: np.ascontiguousarray(part) for name, part in vars(entry).items()})
        content = _checksum(key, body) + body
        with appearing(path) as partial:
            partial.touch(mode=0o600)
            partial.write_bytes(content)
        self.bytes += len(content)
        self._since += len(content)
        if self.bytes <= self.limit and self._since <= self.limit / 20:
            return 0
        return self._shrink()

    def _shrink(self) -> int:
        """Remove the least recently used files until a tenth of the limit is free."""
        files = sorted(self._files())
        self.bytes = sum(size for _, size, _ in files)
        self._since = 0
        if self.bytes <= self.limit:
            return 0
        removed = 0
        for _, size, path in files:
            if self.bytes <= 0.9 * self.limit:
                break
            path.unlink(missing_ok=True)
            self.bytes -= size
            removed += 1
        return removed

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each file."""
        files = []
        for path in self.folder.glob("*/*.prefix"):
            # Another process may have removed it.
            with contextlib.suppress(OSError):
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        return files


def _checksum(key: str, body: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(body)
    return digest.digest()
