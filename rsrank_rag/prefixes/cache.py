"""The prefix cache: documents' prefixes on the device and on disk, in this order.

A document's keys and values do not depend on the query, so a document with a cached prefix needs
only the query's tokens. An entry's key is a hash of everything that the entry depends on, so that
no stale or foreign one is used.
"""

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm
from typing_extensions import Self

from ..errors import InputError
from ..method.batches import Batches, Ids, Row, device_kind
from ..method.prefix import Prefix
from .disk import FORMAT, Disk, PackedPrefix

if TYPE_CHECKING:
    from ..backends.base import LanguageModel

logger = logging.getLogger(__name__)

# Bytes of a folder, by default.
FOLDER_BYTES = 10_000_000_000


@dataclass
class Statistics:
    """What a prefix cache has done, in documents, and its sizes, in bytes.

    Attributes:
        device_hits: Documents whose prefix was in the device's memory.
        disk_hits: Documents whose prefix was read from a file.
        misses: Documents that were run.
        evictions: Entries that were removed for newer ones.
        corrupt: Files that were damaged. They were removed, and their documents run again.
        write_errors: Files that could not be written, such as on a full disk.
        device_bytes: Bytes of the prefixes in the device's memory.
        disk_bytes: Bytes of the files.
        device_limit: The most bytes in the device's memory.
        disk_limit: The most bytes of files; 0 without a folder.
    """

    device_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    corrupt: int = 0
    write_errors: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    device_limit: int = 0
    disk_limit: int = 0


class PrefixTiers:
    """Prefixes by key, in memory and on disk. Safe for threads; processes may share the folder.

    Args:
        limit: The most bytes in memory. The prefixes that were not used for longest leave it first.
        disk: A folder; None for memory alone.
        device: Where prefixes are used.
        dtype: The dtype of keys and values there.
    """

    def __init__(self, limit: int, disk: Disk | None = None, *, device: Any, dtype: Any) -> None:
        self.limit = limit
        self.disk = disk
        self.device = device
        self.dtype = dtype
        self.is_on = limit > 0 or disk is not None
        # The one that was used last is at the end.
        self.in_memory = OrderedDict[str, Prefix]()
        self.counts = Statistics()
        self._locks: dict[int, threading.Lock] = {}

    @classmethod
    def of(cls, size: int | None, folder: str | None, *, device: Any, dtype: Any) -> Self:
        """Make them as the settings ``cache_size`` and ``cache_folder`` say.

        Raises:
            InputError: The folder cannot be made or read.
        """
        if folder is None:
            return cls(_default_bytes(device) if size is None else size, device=device, dtype=dtype)
        try:
            disk = Disk(Path(folder), FOLDER_BYTES if size is None else size)
        except OSError as error:
            raise InputError(
                f"Prefixes cannot be cached in {folder!r}: {error}. Give another folder."
            ) from error
        return cls(min(_default_bytes(device), disk.limit), disk, device=device, dtype=dtype)

    @property
    def lock(self) -> threading.Lock:
        """Held while the memory or the counts change.

        Each process has its own, because a thread may hold its parent's when it is forked.
        """
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def cached(self, keys: Collection[str]) -> set[str]:
        """Those of some keys that have a prefix."""
        with self.lock:
            cached = {key for key in keys if key in self.in_memory}
        if self.disk is not None:
            cached |= {key for key in keys if key in self.disk}
        return cached

    def get(self, key: str) -> Prefix | None:
        """A cached prefix, on the device; None if there is none."""
        with self.lock:
            prefix = self.in_memory.get(key)
            if prefix is not None:
                self.in_memory.move_to_end(key)
                self.counts.device_hits += 1
                return prefix
            if self.disk is None:
                self.counts.misses += 1
                return None
        packed = self.read_file(key)
        if packed is not None:
            prefix = packed.unpack(self.device, self.dtype)
        with self.lock:
            if prefix is None:
                self.counts.misses += 1
            else:
                self.counts.disk_hits += 1
                self.add(key, prefix)
        return prefix

    def put(self, key: str, prefix: Prefix) -> Prefix:
        """Cache a prefix. Returns what later calls will get, so that all calls score alike."""
        if self.disk is not None:
            packed = PackedPrefix.of(prefix)
            if packed is not None:
                prefix = packed.unpack(self.device, self.dtype)
                self._write_file(self.disk, key, packed)
        with self.lock:
            self.add(key, prefix)
        return prefix

    def add(self, key: str, prefix: Prefix) -> None:
        """Add a prefix to the memory, if it fits at all. The caller holds the lock."""
        size = _size(prefix)
        if key in self.in_memory or size > self.limit:
            return
        # A process that was forked while a thread was here may count one prefix too many.
        while self.in_memory and self.counts.device_bytes + size > self.limit:
            _, oldest = self.in_memory.popitem(last=False)
            self.counts.device_bytes -= _size(oldest)
            self.counts.evictions += 1
        self.in_memory[key] = prefix
        self.counts.device_bytes += size

    def read_file(self, key: str) -> PackedPrefix | None:
        """A prefix on disk; None if there is none. A damaged file is counted and removed."""
        try:
            return None if self.disk is None else self.disk.get(key)
        except ValueError as error:
            logger.warning("A cached prefix is damaged and is computed again: %s", error)
            with self.lock:
                self.counts.corrupt += 1
        return None

    def _write_file(self, disk: Disk, key: str, packed: PackedPrefix) -> None:
        """Write a prefix to disk. The first error is logged, and all are counted."""
        try:
            evicted = disk.put(key, packed)
        except OSError as error:
            with self.lock:
                self.counts.write_errors += 1
            if self.counts.write_errors == 1:
                logger.warning(
                    "Prefixes cannot be written to %s: %s. Going on.", disk.folder, error
                )
            return
        with self.lock:
            self.counts.evictions += evicted

    def stats(self) -> dict[str, int]:
        """The fields of `Statistics`."""
        with self.lock:
            counts = replace(self.counts, device_limit=self.limit)
        if self.disk is not None:
            counts.disk_bytes = self.disk.bytes
            counts.disk_limit = self.disk.limit
        return asdict(counts)

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        with self.lock:
            self.in_memory.clear()
            self.counts.device_bytes = 0


def _size(prefix: Prefix) -> int:
    return int(prefix.states.nbytes + prefix.pooled.nbytes)


class CachedPrefixes:
    """Prefixes of one model and one tenant.

    Args:
        identity: Everything that a prefix depends on besides its token ids: model, weights, layers.
        tiers: Where they are, shared by all tenants.
        salt: Prefixes of one salt are not found through another.
    """

    def __init__(self, identity: Mapping[str, object], tiers: PrefixTiers, salt: str = "") -> None:
        content = {**identity, "format": FORMAT, "dtype": str(tiers.dtype), "salt": salt}
        self._hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        self.identity = identity
        self.tiers = tiers
        self.salt = salt

    def with_salt(self, salt: str) -> "CachedPrefixes":
        """The same memory, files and limits, with keys of another tenant.

        What was cached with one salt is not found with another.
        """
        return CachedPrefixes(self.identity, self.tiers, json.dumps([self.salt, salt]))

    def key(self, ids: Ids) -> str:
        """The key of a document, by its token ids."""
        digest = self._hash.copy()
        digest.update(np.array(ids, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def prefill(self, backbone: "LanguageModel", rows: Sequence[Row]) -> list[Prefix]:
        """The prefix of each row's document.

        Documents without a cached prefix run in one batch, each once, and are cached.
        """
        keys = [row.key or self.key(row.document) for row in rows]
        documents = {key: row.document for key, row in zip(keys, rows, strict=True)}
        prefixes = dict[str, Prefix]()
        for key in documents:
            prefix = self.tiers.get(key)
            if prefix is not None:
                prefixes[key] = prefix
        missing = [key for key in documents if key not in prefixes]
        if missing:
            run = backbone.prefill([documents[key] for key in missing])
            for key, prefix in zip(missing, run, strict=True):
                prefixes[key] = self.tiers.put(key, prefix)
        return [prefixes[key] for key in keys]

    def write(
        self,
        documents: Collection[Ids],
        backbone: "LanguageModel",
        budget: int,
        *,
        show_progress: bool = False,
    ) -> int:
        """Run the documents whose prefixes are not on disk, and write these there.

        A prefix with numbers that are too large for 8 bits is not written, without an error.

        Args:
            documents: Token ids.
            backbone: The model.
            budget: Padded tokens of a batch.
            show_progress: Whether to show a progress bar.

        Returns:
            The number of documents that were run.

        Raises:
            InputError: There is no folder, or it is too small, or a prefix could not be written.
            DoesNotFitError: A document does not fit into memory even alone.
        """
        disk = self.tiers.disk
        if disk is None:
            raise InputError(
                "There is no folder for prefixes. Load the model with cache_folder=FOLDER."
            )
        _check_room(disk, backbone, documents)
        missing = [ids for ids in documents if self.tiers.read_file(self.key(ids)) is None]
        batches = Batches(missing, budget)
        bar = tqdm(total=len(missing), disable=not show_progress, unit="doc", desc="reading")
        try:
            with bar:
                for batch in batches:
                    with batches.attempt():
                        self._write_batch(batch, disk, backbone)
                        bar.update(len(batch))
        except OSError as error:
            raise InputError(
                f"Prefixes could not be written: {error}. Make room there, or name another folder. "
                "What was written is not run again."
            ) from error
        return len(missing)

    def _write_batch(self, batch: Sequence[Ids], disk: Disk, backbone: "LanguageModel") -> None:
        """Run a batch and write its prefixes."""
        with backbone.inference():
            run = backbone.prefill(batch)
        for ids, prefix in zip(batch, run, strict=True):
            packed = PackedPrefix.of(prefix)
            if packed is not None:
                disk.put(self.key(ids), packed)


def _check_room(disk: Disk, backbone: "LanguageModel", documents: Collection[Ids]) -> None:
    """InputError if the prefixes of all documents take more bytes than the folder may hold.

    The headers of the files are not counted.
    """
    size = sum(PackedPrefix.size(len(ids), backbone) for ids in documents)
    if size > disk.limit:
        raise InputError(
            f"The prefixes take {size:,} bytes and the folder may hold {disk.limit:,}: the first "
            "would leave before the last is written. "
            "Raise cache_size, or index fewer documents."
        )


def _default_bytes(device: Any) -> int:
    if device_kind(device) == "cuda":
        from torch.cuda import mem_get_info

        return mem_get_info(device)[0] // 4
    # On MPS, the device's memory is the machine's.
    return memory_share()


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
