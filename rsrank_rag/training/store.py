"""Features on disk and in memory: what training reads.

A store is a folder: ``store.json`` says what was read, of which model and from which queries; ``00000.safetensors`` and
so on hold a query each. A file appears only when it is complete, so a run that was killed goes on where it stopped.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Subset
from typing_extensions import Self

from ..artifact.config import BackboneSpec
from ..artifact.identity import TOLERANCE, relative_difference
from ..errors import TrainingError
from ..method.template import Template
from ..partial_files import appearing, is_running, write_text

STORE = "store.json"


class FeatureSpec(BaseModel, extra="forbid", frozen=True):
    """What the numbers of a store mean. A store that was begun under one is never continued under another."""

    format_version: Literal[2] = 2
    backbone: BackboneSpec
    template: Template
    layers: tuple[int, ...]
    signal: str = Field(
        default="values", description="Others than value vectors are made by ablations only."
    )
    null_prefix: str = Field(default="empty", description="What is subtracted; likewise.")
    fusion_layer: int = Field(
        default=0, description="The first layer in which queries see documents."
    )
    documents_stay: bool = Field(
        default=False, description="Whether layers from there on see documents as they enter it."
    )
    dtype: Literal["float16", "bfloat16"]
    compute_dtype: str = Field(description="What the language model computed in.")
    bits: int = Field(description="Of the language model's weights.")
    max_length: int
    data: str = Field(description="sha256 of the queries, their documents and labels.")
    queries: int
    max_tokens: int | None = None
    sources: tuple[str, ...] = Field(default=(), description="Names of the data sets.")


@dataclass(frozen=True)
class QueryFeatures:
    """One labelled query's features: L layers, H heads, M documents and oracle, T scored query tokens, D head width."""

    shifts: Tensor  # (L, H, M * T, D): T rows for each document, then, if there is an oracle, its T rows
    relevant: tuple[bool, ...]
    tokens: int  # T
    oracle: bool  # whether the last T rows are the oracle shift: all relevant documents together
    agreement: tuple[
        tuple[float, float], ...
    ] = ()  # of each document with the query; none without a fusion layer


class FeatureSource(Protocol):
    """Where training gets its features from: a store, or a list in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> QueryFeatures: ...


def subset(source: FeatureSource, numbers: Sequence[int]) -> FeatureSource:
    """Some queries of a source, in a given order."""
    return Subset[QueryFeatures](source, numbers)  # type: ignore[arg-type] # anything that has a length and items


class FeatureStore:
    """A finished or unfinished store on disk, which may be larger than memory. Raises TrainingError: not a store."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._checked = set[int]()  # queries, once: the rest of training reads them again and again
        try:
            self._identity = (self.folder / STORE).read_text(encoding="utf-8")
            self.spec = FeatureSpec.model_validate_json(self._identity)
        except OSError:
            raise TrainingError(f"{self.folder} is no feature store: it has no {STORE}.") from None
        except ValueError as error:
            raise TrainingError(
                f"{self.folder / STORE} is damaged, or of another release: {error}"
            ) from None

    @classmethod
    def create(cls, folder: Path, spec: FeatureSpec, size: int) -> Self:
        """Begin a store of so many bytes, or go on with one that was begun in just the same way.

        Raises TrainingError: there is a store of something else, or the disk is too small.
        """
        if (folder / STORE).exists():
            found = cls(folder)
            different = _differences(found.spec, spec)
            if different:
                raise TrainingError(
                    f"{folder} holds features made otherwise ({'; '.join(different)}). Use another folder, or remove "
                    "this one."
                )
            for partial in folder.glob("*.partial"):  # of a run that was killed
                if not is_running(partial):
                    partial.unlink(missing_ok=True)
            return found
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise TrainingError(
                f"The features need {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free. Use fewer query "
                "tokens (features.max_tokens), documents (features.max_documents) or queries, or another disk."
            )
        write_text(folder / STORE, spec.model_dump_json(indent=2) + "\n")
        return cls(folder)

    def path(self, number: int) -> Path:
        """File of a query."""
        return self.folder / f"{number:05d}.safetensors"

    def missing(self) -> list[int]:
        """Queries that are not there yet."""
        return [number for number in range(self.spec.queries) if not self.path(number).exists()]

    def write(self, number: int, query: QueryFeatures) -> None:
        """Write a query's features."""
        shifts = query.shifts.contiguous()
        row = json.dumps(
            {name: getattr(query, name) for name in ("relevant", "tokens", "oracle", "agreement")}
        )
        with appearing(self.path(number)) as partial:
            save_file(
                {"shifts": shifts},
                partial,
                {"query": row, "sha256": self._checksum(number, row, shifts)},
            )
            partial.chmod(0o644)

    def __len__(self) -> int:
        """Number of queries; raises TrainingError if the store is not finished."""
        missing = self.missing()
        if missing:
            raise TrainingError(
                f"{self.folder} is not finished: {len(missing)} of {self.spec.queries} queries are missing. Run the "
                "same command again; it goes on where it stopped."
            )
        return self.spec.queries

    def __getitem__(self, number: int, /) -> QueryFeatures:
        """One query's features, read from the disk when they are used; raises TrainingError if the file is damaged."""
        if not 0 <= number < self.spec.queries:
            raise IndexError(number)
        try:
            with safe_open(self.path(number), framework="pt") as file:
                about, shifts = file.metadata(), file.get_tensor("shifts")
            if number not in self._checked and about["sha256"] != self._checksum(
                number, about["query"], shifts
            ):
                raise SafetensorError("checksum")
            self._checked.add(number)
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self.path(number)} is damaged ({error}). Remove it and run the same command again."
            ) from error
        row = json.loads(about["query"])
        return QueryFeatures(
            shifts,
            tuple(row["relevant"]),
            row["tokens"],
            row["oracle"],
            tuple(map(tuple, row["agreement"])),
        )

    def _checksum(self, number: int, row: str, shifts: Tensor) -> str:
        """sha256 of a query's features, of no other number and store."""
        what = (self._identity, number, row, shifts.shape, shifts.dtype)
        return hashlib.sha256(
            repr(what).encode() + shifts.view(torch.uint8).numpy().tobytes()
        ).hexdigest()

    def fill(self, extract: Callable[[int], QueryFeatures]) -> Iterator[int]:
        """Make the missing queries, by their number; yields each that is there."""
        for number in range(self.spec.queries):
            if not self.path(number).exists():
                self.write(number, extract(number))
            yield number

    def in_memory(self, device: torch.device) -> FeatureSource:
        """The features copied once, to the GPU or host memory, where they take at most half of what is free there."""
        size = sum(self.path(number).stat().st_size for number in range(len(self)))
        if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] / 2:
            return resident(self, device)
        return resident(self, "cpu") if size < free_memory() / 2 else self


def resident(source: FeatureSource, device: str | torch.device) -> list[QueryFeatures]:
    """Features copied to a device's memory once, for a store that fits."""
    queries = (source[number] for number in range(len(source)))
    return [replace(query, shifts=query.shifts.to(device, copy=True)) for query in queries]


def _differences(found: FeatureSpec, wanted: FeatureSpec) -> list[str]:
    """What differs, entry by entry. Value vectors may differ as much as other devices and dtypes make them."""
    theirs, ours = (_flat(spec.model_dump()) for spec in (found, wanted))
    values = [entries.pop("backbone.values") for entries in (theirs, ours)]
    different = [
        f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} asked for"
        for name in sorted(set(theirs) | set(ours))
        if theirs.get(name) != ours.get(name)
    ]
    comparable = (
        found.layers[-1] == wanted.layers[-1]
    )  # the values are of the last layer that is read
    if comparable and relative_difference(values[1], values[0]) > TOLERANCE[wanted.bits]:
        different.append("the weights of the language model")
    return different


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


def free_memory() -> int:
    """Bytes of host memory that can still be had, within a container's limit."""
    limits = []
    with suppress(ValueError, AttributeError, OSError):  # no such limit, or not Linux
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        group = Path("/sys/fs/cgroup")
        limits.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    return min(limits, default=0)
