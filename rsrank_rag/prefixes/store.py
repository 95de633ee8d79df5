"""Document prefixes kept between calls: on the device, in host memory and on disk, in this order.

A document's keys and values do not depend on the query, so a document that comes back needs only the query's tokens.
Entries are found by a hash of everything they depend on, so a foreign or stale one is never served.

Axes: N documents, L layers, H KV heads, S prefix positions, D head dimension.
"""

import copy
import hashlib
import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from typing_extensions import Self

from ..errors import InputError
from ..method.backbone import Backbone
from ..method.batching import Batches, Ids
from ..method.probe import Prefix, Prefixes, Scratch
from ..method.scoring import Prefill
from ..method.template import TokenisedDocument
from .disk import FORMAT, Disk, PackedPrefix
from .settings import PrefixCache, memory_share

logger = logging.getLogger(__name__)

MPS_BYTES = 1_000_000_000
"""Prefixes kept there by default; on CUDA a quarter of what is free after loading, on a CPU `settings.memory_share`."""

REMEMBERED, MOST = 8, 3
"""Past questions for a document count half after so many times as many as there are entries, and so many at most."""


@dataclass
class Statistics:
    """What a store has done and holds."""

    device_hits: int = 0  # documents found there
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0  # documents that had to be run
    evictions: int = 0  # entries that a tier gave up for newer ones
    corrupt: int = 0  # files that were damaged, removed and computed again
    write_errors: int = 0  # files that could not be written, such as on a full disk
    device_bytes: int = 0  # held now
    host_bytes: int = 0
    disk_bytes: int = 0


Entry = TypeVar("Entry", Prefix, PackedPrefix)


class _Tier(Generic[Entry]):
    """Entries that fit into so many bytes. Not safe for threads by itself.

    A new entry takes the place of the least recently used one only if it was asked for more often of late (TinyLFU's
    rule, arXiv 1512.00727). So where more documents come round than fit, those that are here stay, instead of each
    leaving just before it is asked for again.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.asked: Counter[str] = Counter()
        self.questions = self.returned = (
            0  # since past ones were halved; for what had been asked for, and was not here
        )
        self.too_small = False  # whether many of them were such

    def get(self, key: str) -> Entry | None:
        if self.questions >= REMEMBERED * max(len(self.entries), REMEMBERED):
            self.too_small = bool(self.entries) and self.returned > self.questions / 5
            self.asked = Counter(
                {key: count // 2 for key, count in self.asked.items() if count > 1}
            )
            self.questions = self.returned = 0
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        self.questions += 1
        self.returned += entry is None and self.asked[key] > 0
        self.asked[key] = min(self.asked[key] + 1, MOST)
        return entry

    def put(self, key: str, entry: Entry) -> list[str]:
        """Add an entry; gives the keys of those that had to go, or its own if it was refused."""
        if key in self.entries:
            return []
        gone, free, size = list[str](), self.limit - self.bytes, _size(entry)
        for old, kept in self.entries.items():
            if free >= size or self.asked[old] >= self.asked[key]:
                break
            gone.append(old)
            free += _size(kept)
        if free < size:
            return [key]
        for old in gone:
            del self.entries[old]
        self.entries[key], self.bytes = entry, self.limit - free + size
        return gone


def _size(entry: Prefix | PackedPrefix) -> int:
    return sum(part.nbytes for part in vars(entry).values())


class PrefixStore:
    """Keeps document prefixes. Safe for threads; several processes may share its folder.

    Args:
        identity: Everything that a prefix depends on beside its token ids: model, weights, dtype, layers.
        chosen: How much is kept where.
        device: Where prefixes are used.
        dtype: Of keys and values there.

    Raises InputError: the folder cannot be made or read.
    """

    def __init__(
        self,
        identity: Mapping[str, object],
        chosen: PrefixCache,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        content = json.dumps(
            {**identity, "format": FORMAT, "dtype": str(dtype), "salt": chosen.salt}, sort_keys=True
        )
        self._identity = hashlib.sha256(content.encode()).digest()
        self.device, self.dtype = device, dtype
        self._on_device: _Tier[Prefix] = _Tier(
            _device_bytes(device) if chosen.device is None else chosen.device
        )
        self._in_host: _Tier[PackedPrefix] = _Tier(chosen.host)
        try:
            self.disk = None if chosen.folder is None else Disk(Path(chosen.folder), chosen.disk)
        except OSError as error:
            raise InputError(
                f"Prefixes cannot be kept in {chosen.folder!r}: {error}. Give another folder."
            ) from error
        self._counts = Statistics()
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self._said = False  # that the cache is too small

    def with_salt(self, salt: str) -> Self:
        """The same places and limits; what is kept through one salt is not found through another."""
        found = copy.copy(self)
        found._identity = hashlib.sha256(self._identity + salt.encode()).digest()
        return found

    def key(self, ids: Ids) -> str:
        """Name of a document's entry."""
        digest = hashlib.sha256(self._identity)
        digest.update(torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()

    def prefill(
        self, documents: Sequence[Ids], run: Prefill, room: int = 0, behind: Sequence[Prefix] = ()
    ) -> Prefixes:
        """As `Backbone.prefill`, with documents that are kept, and others ``run`` in one batch and kept from now on.

        The same document may stand there again. To be used before the same thread calls this again.
        """
        keys = {ids: self.key(ids) for ids in documents}
        found = {ids: self._get(key) for ids, key in keys.items()}
        missing = [ids for ids, prefix in found.items() if prefix is None]
        if missing:
            all_new = len(missing) == len(documents) and not self._keeps_8_bit
            made = run(missing, room, behind if all_new else ())
            for row, ids in enumerate(missing):
                found[ids] = self._put(keys[ids], made.row(row))
            if all_new:
                return made
        rows = [prefix for prefix in map(found.__getitem__, documents) if prefix is not None]
        return Prefixes.of([*rows, *behind], room, self._scratch)

    def waiting(
        self, documents: Sequence[TokenisedDocument], *, whole: bool = False
    ) -> dict[Ids, int]:
        """Documents that are not on disk, if need be as ``whole`` files, and where each first stands."""
        first: dict[Ids, int] = {}
        for position, document in enumerate(documents):
            if not document.empty and not self.is_on_disk(document.ids, whole=whole):
                first.setdefault(document.ids, position)
        return first

    @torch.inference_mode()
    def write(
        self, documents: Collection[Ids], core: Backbone, budget: int, done: Callable[[int], object]
    ) -> None:
        """Run documents in batches of so many padded tokens and put them on disk, and nowhere else.

        Raises InputError where the folder may not hold them or could not be written; see `RSRank.index` for the rest.
        """
        before, size = self._counts.write_errors, disk_bytes(core, documents)
        if self.disk is not None and self.disk.limit is not None and size > self.disk.limit:
            raise InputError(
                f"The prefixes take {size / 1e9:.2f} GB and the folder may hold {self.disk.limit / 1e9:.2f} GB: the "
                "first would have left before the last is written. Raise disk=, or index fewer documents."
            )
        batches = Batches(documents, budget)
        for batch in batches:
            with batches.attempt():
                # Without a name, so that the batch's prefixes are gone before the next one runs.
                for ids, prefix in zip(
                    batch, map(core.prefill(batch).row, range(len(batch))), strict=True
                ):
                    self._write(self.key(ids), PackedPrefix.of(prefix))
                done(len(batch))
        if failed := self._counts.write_errors - before:
            raise InputError(
                f"{failed} of {len(documents)} prefixes could not be written (is the disk full?). Make room and index "
                "again: what was written is not read again."
            )

    def is_kept(self, ids: Ids) -> bool:
        """Whether a document is kept, anywhere."""
        key = self.key(ids)
        with self._lock:
            in_memory = key in self._on_device.entries or key in self._in_host.entries
        return in_memory or self.is_on_disk(ids)

    def is_on_disk(self, ids: Ids, *, whole: bool = False) -> bool:
        """Whether a document is kept on disk; if it has to be ``whole``, it is read."""
        if whole:
            return self._from_disk(self.key(ids)) is not None
        return self.disk is not None and self.disk.path(self.key(ids)).exists()

    def stats(self) -> dict[str, int]:
        """See `Statistics`."""
        with self._lock:
            self._counts.device_bytes, self._counts.host_bytes = (
                self._on_device.bytes,
                self._in_host.bytes,
            )
            self._counts.disk_bytes = 0 if self.disk is None else self.disk.bytes
            return asdict(self._counts)

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        with self._lock:
            self._on_device, self._in_host = (
                _Tier(self._on_device.limit),
                _Tier(self._in_host.limit),
            )

    def _get(self, key: str) -> Prefix | None:
        with self._lock:
            entry = self._on_device.get(key)
            if entry is not None:
                self._counts.device_hits += 1
                return entry
            packed = self._in_host.get(key)
            self._counts.host_hits += packed is not None
        if packed is None:
            packed = self._from_disk(key)
            with self._lock:
                self._counts.disk_hits += packed is not None
                self._counts.misses += packed is None
        if packed is None:
            self._say_if_too_small()
            return None
        prefix = packed.unpack(self.device, self.dtype)
        self._keep(key, prefix, packed)
        return prefix

    def _say_if_too_small(self) -> None:
        tier = self._on_device
        if tier.too_small and not self._said:
            self._said = True
            logger.warning(
                "The prefix cache is too small: more than a fifth of the documents asked for of late had been read "
                "before and were read again. It holds %d in %.0f MB. Choose a larger prefix_cache=, or a folder.",
                *(len(tier.entries), tier.limit / 1e6),
            )

    def _from_disk(self, key: str) -> PackedPrefix | None:
        try:
            return None if self.disk is None else self.disk.get(key)
        except ValueError as error:
            logger.warning("A kept prefix is damaged and is computed again: %s", error)
            with self._lock:
                self._counts.corrupt += 1
        return None

    @property
    def _keeps_8_bit(self) -> bool:
        return self.disk is not None or self._in_host.limit > 0

    def _put(self, key: str, prefix: Prefix) -> Prefix:
        """Keep a prefix. Gives what later calls will find: the first one scores from the same numbers."""
        packed = PackedPrefix.of(prefix) if self._keeps_8_bit else None
        if packed is not None:
            prefix = packed.unpack(self.device, self.dtype)
        self._keep(key, prefix, packed)
        self._write(key, packed)
        return prefix

    def _keep(self, key: str, prefix: Prefix, packed: PackedPrefix | None) -> None:
        """On the device and, in 8 bits, in host memory.

        In both at once: to pack on leaving the device what was packed before would round twice, and change scores.
        """
        with self._lock:
            gone = self._on_device.put(key, prefix)
            if packed is not None and self._in_host.limit:
                gone += self._in_host.put(key, packed)
            self._counts.evictions += sum(old != key for old in gone)

    def _write(self, key: str, packed: PackedPrefix | None) -> None:
        if self.disk is None or packed is None:
            return
        try:
            gone = self.disk.put(key, packed)
        except OSError as error:
            with self._lock:
                first = self._counts.write_errors == 0
                self._counts.write_errors += 1
            if first:
                logger.warning(
                    "Prefixes cannot be written to %s: %s. Going on without.",
                    self.disk.folder,
                    error,
                )
            return
        with self._lock:
            self._counts.evictions += gone


def disk_bytes(core: Backbone, documents: Collection[Ids]) -> int:
    """What the files of documents will take: 8 bits, a scale for each token and head, and what is pooled."""
    token = 2 * (core.last_layer - core.fusion_layer) * core.num_heads * (core.head_dim + 2)
    pooled = 4 * core.config.hidden_size if core.fusion_layer else 0
    return sum(map(len, documents)) * token + len(documents) * pooled


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return MPS_BYTES if device.type == "mps" else memory_share()
