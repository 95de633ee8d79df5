"""Kept prefixes in 8 bits, and as files.

Axes: L layers, H KV heads, S prefix positions, D head dimension.
"""

import contextlib
import hashlib
import itertools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import Self

from ..errors import InputError
from ..method.probe import Prefix
from ..partial_files import appearing, is_running

FORMAT = "rsrank-prefix-2"


@dataclass(frozen=True)
class PackedPrefix:
    """A prefix in 8 bits: one scale for each token and head, so that a sink token's large values cost no other."""

    codes: Tensor  # keys, then values, (2, L, H, S, D) int8
    scales: Tensor  # (2, L, H, S, 1) fp16
    pooled: Tensor  # as it is, `Prefix.pooled`

    @classmethod
    def of(cls, prefix: Prefix) -> Self | None:
        """Quantise a prefix; the largest error is half a scale, 0.4% of the token's largest entry.

        None where something is infinite, NaN or too large: in 8 bits it would look as if it were not.
        """
        both = prefix.states.float()
        scales = (both.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-7)
        if not bool((scales <= 65504).all()):
            return None
        scales = scales.half()
        codes = (both / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
        return cls(codes.cpu(), scales.cpu(), prefix.pooled.cpu())

    def unpack(self, device: torch.device, dtype: torch.dtype) -> Prefix:
        """Back on the device, keys and values in this dtype."""
        largest = torch.finfo(dtype).max  # rounding the scale up may pass it
        states = (
            (self.codes.to(device).float() * self.scales.to(device).float())
            .clamp(-largest, largest)
            .to(dtype)
        )
        return Prefix(states, self.pooled.to(device))


class Disk:
    """Entries as files, one each. Several processes may share a folder.

    A file appears only when it is complete and carries a checksum; nobody else may read it, because it holds what the
    document says. The least recently used go when the folder outgrows its limit.

    Raises InputError: the folder's files are of another release.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in itertools.islice(folder.glob("*/*.safetensors"), 1):
            # A damaged one is found out when it is read.
            with (
                contextlib.suppress(SafetensorError, OSError),
                safe_open(path, framework="pt") as file,
            ):
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise InputError(
                        f"The prefixes in {folder} are of another release, or something else is there. Remove the "
                        "folder, or give another one."
                    )
        for partial in folder.glob("*/*.partial"):  # of writers that were killed
            if not is_running(partial):
                with contextlib.suppress(OSError):
                    partial.unlink()
        self.bytes = sum(size for _, size, _ in self._files())
        self._since = (
            0  # bytes written since the folder was last looked through: others write there too
        )
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Where an entry is, or would be."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def get(self, key: str) -> PackedPrefix | None:
        """An entry, or None if there is none; ValueError if the file was damaged, and is gone now."""
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                entry = PackedPrefix(
                    *(file.get_tensor(name).clone() for name in ("codes", "scales", "pooled"))
                )
            if metadata.get("key") != key or metadata.get("sha256") != _checksum(entry):
                raise SafetensorError("checksum")
        except SafetensorError as error:
            with contextlib.suppress(OSError), self._lock:
                size = path.stat().st_size
                path.unlink()
                self.bytes -= size
            raise ValueError(f"{path}: {error}") from error
        except OSError:  # not there, or not to be read now
            return None
        with contextlib.suppress(OSError):  # a folder of somebody else's
            os.utime(path)
        return entry

    def put(self, key: str, entry: PackedPrefix) -> int:
        """Write an entry, or raise OSError; gives the number of older ones that had to go."""
        path = self.path(key)
        if path.exists():
            return 0
        path.parent.mkdir(mode=0o700, exist_ok=True)
        metadata = {"format": FORMAT, "key": key, "sha256": _checksum(entry)}
        content = save(
            {name: tensor.contiguous() for name, tensor in vars(entry).items()}, metadata
        )
        with appearing(path) as partial:
            partial.touch(mode=0o600)
            partial.write_bytes(content)
        with self._lock:
            self.bytes += len(content)
            self._since += len(content)
            if self.limit is None or (self.bytes <= self.limit and self._since <= self.limit / 20):
                return 0
            return self._shrink()

    def _shrink(self) -> int:
        """Remove the least recently used files until the rest fits with a tenth to spare."""
        files = sorted(self._files())
        self.bytes, self._since = sum(size for _, size, _ in files), 0
        assert self.limit is not None
        enough, gone = self.limit if self.bytes <= self.limit else 0.9 * self.limit, 0
        for _, size, path in files:
            if self.bytes <= enough:
                break
            path.unlink(missing_ok=True)
            self.bytes -= size
            gone += 1
        return gone

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("*/*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return found


def _checksum(entry: PackedPrefix) -> str:
    digest = hashlib.sha256(repr((tuple(entry.codes.shape), tuple(entry.scales.shape))).encode())
    for part in (entry.codes, entry.scales, entry.pooled):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
