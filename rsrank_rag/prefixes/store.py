"""Document prefixes kept between calls: on the device, in host memory and on disk, in this order.

A document's keys and values do not depend on the query, so a document that comes back needs only the query's tokens.
Entries are found by a hash of everything they depend on, so a foreign or stale one is never served.

Axes: N documents, L layers, H KV heads, S prefix positions, D head dimension.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import InputError
from ..method.batching import Ids
from ..method.probe import Prefixes, Scratch
from ..partial_files import is_running, partial_of

logger = logging.getLogger(__name__)

FORMAT = "rsrank-prefix-1"


@dataclass(frozen=True)
class PackedPrefix:
    """A prefix in 8 bits: one scale for each token and head, so that a sink token's large values cost no other.

    Attributes:
        codes: Keys, then values, (2, L, H, S, D) int8.
        scales: (2, L, H, S, 1) fp16.
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, prefix: Tensor) -> PackedPrefix | None:
        """Quantise (2, L, H, S, D); the largest error is half a scale, 0.4% of the token's largest entry.

        None where something is infinite, NaN or too large: in 8 bits it would look as if it were not.
        """
        both = prefix.float()
        scales = (both.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-7)
        if not bool((scales <= 65504).all()):
            return None
        scales = scales.half()
        codes = (both / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
        return cls(codes.cpu(), scales.cpu())

    def unpack(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Back on the device, (2, L, H, S, D)."""
        largest = torch.finfo(dtype).max  # rounding the scale up may pass it
        return (self.codes.to(device).float() * self.scales.to(device).float()).clamp(-largest, largest).to(dtype)


@dataclass
class Statistics:
    """What a store has done and holds.

    Attributes:
        device_hits: Documents found on the device; likewise in host memory and on disk.
        misses: Documents that had to be run.
        evictions: Entries that a tier gave up for newer ones.
        corrupt: Files that were damaged, removed and computed again.
        write_errors: Files that could not be written, such as on a full disk.
        device_bytes: Bytes held now; likewise in host memory and on disk.
    """

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    corrupt: int = 0
    write_errors: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


Run = Callable[[list[Ids], int], Prefixes]
"""Runs documents through the model, with room for so many tokens after them."""

Entry = TypeVar("Entry", Tensor, PackedPrefix)


class _Tier(Generic[Entry]):
    """The most recently used entries that fit into so many bytes. Not safe for threads by itself."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.entries: OrderedDict[str, Entry] = OrderedDict()

    def get(self, key: str) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: Entry) -> list[tuple[str, Entry]]:
        """Add an entry; gives those that had to go, which may be the new one."""
        if key in self.entries:
            self.entries.move_to_end(key)
            return []
        if entry.nbytes > self.limit:
            return [(key, entry)]
        self.entries[key] = entry
        self.bytes += entry.nbytes
        gone = []
        while self.bytes > self.limit:
            old = self.entries.popitem(last=False)
            self.bytes -= old[1].nbytes
            gone.append(old)
        return gone


class _Disk:
    """Entries as files, one each. Several processes may share a folder.

    A file appears only when it is complete and carries a checksum. The least recently used go when the folder outgrows
    its limit.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*/*.partial"):  # of writers that were killed
            if not is_running(partial):
                with contextlib.suppress(OSError):
                    partial.unlink()
        self.bytes = sum(size for _, size, _ in self._files())
        self._since = 0  # bytes written since the folder was last looked through: others write there too
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        return self.path(key).exists()

    def get(self, key: str) -> PackedPrefix | None:
        """An entry, or None if there is none.

        Raises:
            ValueError: The file is damaged; it is gone now.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                entry = PackedPrefix(file.get_tensor("codes").clone(), file.get_tensor("scales").clone())
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
        """Write an entry; gives the number of older ones that had to go.

        Raises:
            OSError: It could not be written.
        """
        path = self.path(key)
        if path.exists():
            return 0
        path.parent.mkdir(exist_ok=True)
        metadata = {"format": FORMAT, "key": key, "sha256": _checksum(entry)}
        content = save({"codes": entry.codes.contiguous(), "scales": entry.scales.contiguous()}, metadata)
        partial = partial_of(path)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
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
        gone = 0
        enough = self.limit if self.limit is None or self.bytes <= self.limit else 0.9 * self.limit
        for _, size, path in files:
            if enough is None or self.bytes <= enough:
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


class PrefixStore:
    """Keeps document prefixes. Safe for threads; several processes may share its folder.

    Args:
        identity: Everything that a prefix depends on beside its token ids: model, weights, dtype, layers.
        device: Where prefixes are used.
        dtype: Of keys and values there.
        device_bytes: Kept on the device as they are.
        host_bytes: Kept in host memory in 8 bits.
        folder: Kept on disk in 8 bits; None for no disk.
        disk_bytes: Limit of the folder; None for none.
        salt: Entries of one salt are invisible to every other: one for each tenant.

    Raises:
        InputError: The folder cannot be made or read.
    """

    def __init__(
        self,
        identity: Mapping[str, object],
        *,
        device: torch.device,
        dtype: torch.dtype,
        device_bytes: int = 0,
        host_bytes: int = 0,
        folder: str | Path | None = None,
        disk_bytes: int | None = None,
        salt: str = "",
    ) -> None:
        content = json.dumps({**identity, "format": FORMAT, "dtype": str(dtype), "salt": salt}, sort_keys=True)
        self._identity = hashlib.sha256(content.encode()).digest()
        self.device, self.dtype = device, dtype
        self._on_device: _Tier[Tensor] = _Tier(device_bytes)
        self._in_host: _Tier[PackedPrefix] = _Tier(host_bytes)
        try:
            self._disk = None if folder is None else _Disk(Path(folder), disk_bytes)
        except OSError as error:
            raise InputError(f"Prefixes cannot be kept in {str(folder)!r}: {error}. Give another folder.") from error
        self._counts = Statistics()
        self._lock = threading.Lock()
        self._scratch = Scratch()

    def key(self, ids: Ids) -> str:
        """Name of a document's entry."""
        digest = hashlib.sha256(self._identity)
        digest.update(torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()

    def prefill(self, documents: Sequence[Ids], run: Run, room: int = 0, *, nulls: Sequence[Tensor] = ()) -> Prefixes:
        """Prefixes of documents: those that are kept, and the others run in one batch and kept from now on.

        Args:
            documents: Token ids of ``instruction + document + separator``.
            run: Runs documents through the model.
            room: Tokens of the queries that will be run after them.
            nulls: Prefixes without a document, to stand behind the others where these are joined in any case.

        Returns:
            As `Backbone.prefill`; to be used before the same thread calls this again.
        """
        keys = [self.key(ids) for ids in documents]
        found = [self._get(key) for key in keys]
        missing = [i for i, prefix in enumerate(found) if prefix is None]
        if missing:
            made = run([documents[i] for i in missing], room)
            for row, i in enumerate(missing):
                found[i] = prefix = made.row(row)
                self._put(keys[i], prefix)
            if len(missing) == len(documents):
                return made
        rows = [prefix for prefix in found if prefix is not None]
        return Prefixes.of([*rows, *nulls], room, self._scratch, nulls=len(nulls))

    @property
    def has_disk(self) -> bool:
        """Whether entries are kept on disk."""
        return self._disk is not None

    def add(self, documents: Sequence[Ids], run: Run) -> None:
        """Run documents and put them on disk, and nowhere else."""
        made = run(list(documents), 0)
        for row, ids in enumerate(documents):
            self._write(self.key(ids), PackedPrefix.of(made.row(row)))

    def has(self, ids: Ids) -> bool:
        """Whether a document is kept, anywhere."""
        key = self.key(ids)
        with self._lock:
            if key in self._on_device.entries or key in self._in_host.entries:
                return True
        return self._disk is not None and self._disk.has(key)

    @property
    def disk_limit(self) -> int | None:
        """Bytes that the folder may fill; None for no limit."""
        return None if self._disk is None else self._disk.limit

    def holds(self, ids: Ids) -> bool:
        """Whether a document is on disk."""
        return self._disk is not None and self._disk.has(self.key(ids))

    def stats(self) -> dict[str, int]:
        """See `Statistics`."""
        with self._lock:
            self._counts.device_bytes, self._counts.host_bytes = self._on_device.bytes, self._in_host.bytes
            self._counts.disk_bytes = 0 if self._disk is None else self._disk.bytes
            return asdict(self._counts)

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        with self._lock:
            self._on_device, self._in_host = _Tier(self._on_device.limit), _Tier(self._in_host.limit)

    def _get(self, key: str) -> Tensor | None:
        with self._lock:
            entry = self._on_device.get(key)
            if entry is not None:
                self._counts.device_hits += 1
                return entry
            packed = self._in_host.get(key)
            if packed is not None:
                self._counts.host_hits += 1
        if packed is None:
            packed = self._read(key)
        if packed is None:
            return None
        prefix = packed.unpack(self.device, self.dtype)
        self._keep(key, prefix)
        return prefix

    def _read(self, key: str) -> PackedPrefix | None:
        packed = None
        try:
            packed = None if self._disk is None else self._disk.get(key)
        except ValueError as error:
            logger.warning("A kept prefix is damaged and is computed again: %s", error)
            with self._lock:
                self._counts.corrupt += 1
        with self._lock:
            if packed is None:
                self._counts.misses += 1
            else:
                self._counts.disk_hits += 1
        return packed

    def _put(self, key: str, prefix: Tensor) -> None:
        self._keep(key, prefix)
        if self._disk is not None and not self._disk.has(key):
            self._write(key, PackedPrefix.of(prefix))

    def _keep(self, key: str, prefix: Tensor) -> None:
        """On the device; what has to leave it goes to host memory."""
        with self._lock:
            leaving = self._on_device.put(key, prefix)
            self._counts.evictions += sum(old != key for old, _ in leaving)
        for old, entry in leaving:
            if self._in_host.limit and old not in self._in_host.entries:
                packed = PackedPrefix.of(entry)
                if packed is None:
                    continue
                with self._lock:
                    gone = self._in_host.put(old, packed)
                    self._counts.evictions += sum(name != old for name, _ in gone)

    def _write(self, key: str, packed: PackedPrefix | None) -> None:
        assert self._disk is not None
        if packed is None:
            return
        try:
            gone = self._disk.put(key, packed)
        except OSError as error:
            with self._lock:
                first = self._counts.write_errors == 0
                self._counts.write_errors += 1
            if first:
                logger.warning("Prefixes cannot be written to %s: %s. Going on without.", self._disk.folder, error)
            return
        with self._lock:
            self._counts.evictions += gone


def _checksum(entry: PackedPrefix) -> str:
    digest = hashlib.sha256(repr((tuple(entry.codes.shape), tuple(entry.scales.shape))).encode())
    digest.update(entry.codes.contiguous().numpy().tobytes())
    digest.update(entry.scales.contiguous().numpy().tobytes())
    return digest.hexdigest()
