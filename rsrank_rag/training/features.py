"""Features: the shifts of labelled queries, computed once by the frozen backbone and kept on disk.

A store is a folder: ``store.json`` says what was read, of which model and from which queries; each shard
``shard-00000.safetensors`` holds a fixed range of queries. A shard appears only when it is complete, so a run that was
killed goes on where it stopped, and several processes can share the shards among them.

Axes: L layers, H heads, N documents, T scored query tokens, D head dimension.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..artifact.config import BackboneSpec, NullPrefix, Signal
from ..artifact.identity import TOLERANCE, relative_difference
from ..errors import InputError, ScoringError, TrainingError
from ..evaluation.datasets import LabelledQuery
from ..language_model.weights import is_fp8
from ..method.batching import DoesNotFitError, Ids, run_batches
from ..method.reading import NullRun, ShiftReader
from ..method.template import Template, TokenisedQuery
from ..partial_files import is_running, partial_of

STORE = "store.json"
STORE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHARD_BYTES = 1 << 30


class FeatureSpec(BaseModel):
    """What the numbers of a store mean. A store that was begun under one is never continued under another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    backbone: BackboneSpec
    template: Template
    layers: tuple[int, ...]
    signal: Signal
    null_prefix: NullPrefix
    dtype: Literal["float16", "bfloat16"]
    compute_dtype: str = Field(description="What the language model computed in.")
    bits: int = Field(description="Of the language model's weights.")
    fp8: bool = Field(default=False, description="Whether these are fp8.")
    max_length: int
    data: str = Field(description="sha256 of the queries, their documents and labels.")
    queries: int
    max_tokens: int | None = None
    sources: tuple[str, ...] = Field(default=(), description="Names of the data sets.")
    shards: tuple[int, ...] = Field(description="First query of each shard.")

    @property
    def heads(self) -> tuple[int, int]:
        """H and D of what was read."""
        if self.signal == "hidden":
            return 1, self.backbone.hidden_size or self.backbone.num_heads * self.backbone.head_dim
        return self.backbone.num_heads, self.backbone.head_dim


@dataclass(frozen=True)
class QueryFeatures:
    """One labelled query's features.

    Attributes:
        shifts: (L, H, M * T, D): T rows for each document, then, if there is an oracle, its T rows.
        relevant: Labels of the N documents.
        tokens: T.
        oracle: Whether the last T rows are the oracle shift: all relevant documents together.
    """

    shifts: Tensor
    relevant: tuple[bool, ...]
    tokens: int
    oracle: bool


class FeatureSource(Protocol):
    """Where training gets its features from: a store, or a list in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> QueryFeatures: ...


@dataclass(frozen=True)
class Plan:
    """What an extraction will take.

    Attributes:
        queries: Number of queries.
        documents: Number of documents of all queries, oracle prompts not counted.
        prompt_tokens: Tokens the language model will read.
        bytes: Size of the store.
        query_bytes: Size of each query's features.
    """

    queries: int
    documents: int
    prompt_tokens: int
    bytes: int
    query_bytes: tuple[int, ...]


class FeatureExtractor:
    """Turns labelled queries into features.

    Args:
        reader: What to read of which backbone.
        dtype: Of the stored shifts.
        max_tokens: Use at most this many query tokens, evenly spread; None for all.
        token_budget: Padded tokens in one batch.
        titles: Put a document's title in front of its text.
    """

    def __init__(
        self,
        reader: ShiftReader,
        *,
        dtype: Literal["float16", "bfloat16"] = "float16",
        max_tokens: int | None = None,
        token_budget: int = 16384,
        titles: bool = True,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1 or None, got {max_tokens}.")
        self.reader, self.prompts = reader, reader.prompts
        self.layers = sorted(reader.layers)
        self.dtype, self.max_tokens, self.token_budget, self.titles = dtype, max_tokens, token_budget, titles

    def plan(self, queries: Sequence[LabelledQuery], heads: int, width: int) -> Plan:
        """Tokenise everything and add up what it will take.

        Raises:
            InputError: A query is empty or too long, or none of its documents has text.
        """
        sizes, tokens = [], 0
        for query in queries:
            tokenised, prompts, oracle = self._prompts(query)
            if all(len(ids) == self._bare for ids in prompts):
                raise InputError(f"Query {query.id!r} has no document with text. Remove it from the data.")
            rows = (len(prompts) + (oracle is not None)) * len(self._positions(tokenised))
            sizes.append(rows * len(self.layers) * heads * width * STORE_DTYPES[self.dtype].itemsize)
            parts = [*prompts, *([oracle] if oracle is not None else [])]
            tokens += sum(len(ids) + len(tokenised.ids) for ids in parts)
        documents = sum(len(query.documents) for query in queries)
        return Plan(len(queries), documents, tokens, sum(sizes), tuple(sizes))

    @torch.inference_mode()
    def extract(self, query: LabelledQuery) -> QueryFeatures:
        """Features of one query.

        Raises:
            InputError: The query is empty or too long, or none of its documents has text.
            TrainingError: A shift is not finite in the store's dtype.
            ScoringError: A document does not fit into memory even alone; it is named.
        """
        tokenised, prompts, oracle = self._prompts(query)
        positions = self._positions(tokenised)
        texts = [*prompts, *([oracle] if oracle is not None else [])]
        count = len(positions)
        found: list[Tensor] = []  # per layer (H, M * T, D)
        # A document without tokens shifts nothing.
        wanted = {ids: [i for i, other in enumerate(texts) if other == ids] for ids in texts if len(ids) > self._bare}

        def read(batch: list[Ids]) -> None:
            row = 0

            def keep(layer: int, shift: Tensor) -> None:
                nonlocal row
                n, heads, _, width = shift.shape
                if len(found) == row:
                    found.append(torch.zeros(heads, len(texts) * count, width, dtype=STORE_DTYPES[self.dtype]))
                chosen = shift[:, :, positions].to(STORE_DTYPES[self.dtype]).cpu()
                for i in range(n):
                    for place in wanted[batch[i]]:
                        found[row][:, place * count : (place + 1) * count] = chosen[i]
                row += 1

            self.reader.read(run, self.reader.prefill(batch, len(tokenised.ids)), keep)

        run = NullRun(tokenised)
        try:
            # What fitted once stays: memory would run out again with every query.
            self.token_budget = run_batches(list(wanted), read, budget=self.token_budget, extra=len(tokenised.ids))
        except DoesNotFitError as error:
            place = wanted[error.ids][0]
            name = f"Document {place}" if place < len(prompts) else "All relevant documents together"
            raise ScoringError(
                f"{name} of query {query.id!r} ({len(error.ids)} tokens) do not fit into memory even alone. Set a "
                "smaller model.max_length, or load the model in 8-bit or on another device.",
                place,
            ) from None
        shifts = torch.stack(found)
        if not bool(torch.isfinite(shifts).all()):
            raise TrainingError(
                f"Query {query.id!r} has shifts that are not finite in {self.dtype}. Use bfloat16 for the store, or "
                "load the model in bfloat16 or float32."
            )
        labels = tuple(document.relevant for document in query.documents)
        return QueryFeatures(shifts, labels, count, oracle is not None)

    @property
    def _bare(self) -> int:
        return len(self.prompts.null_prefix)

    def _prompts(self, query: LabelledQuery) -> tuple[TokenisedQuery, list[Ids], Ids | None]:
        tokenised = self.prompts.query(query.query)
        texts = [document.content(titles=self.titles) for document in query.documents]
        prompts = [prompt.ids for prompt in self.prompts.documents(texts, len(tokenised.ids))]
        relevant = [text for text, document in zip(texts, query.documents, strict=True) if document.relevant]
        oracle = self.prompts.together(relevant, len(tokenised.ids)) if any(map(str.strip, relevant)) else None
        return tokenised, prompts, oracle

    def _positions(self, query: TokenisedQuery) -> list[int]:
        """Which of the scored tokens are kept: all, or ``max_tokens`` of them, evenly spread."""
        if self.max_tokens is None or query.length <= self.max_tokens:
            return list(range(query.length))
        step = query.length / self.max_tokens
        return [int(step * (i + 0.5)) for i in range(self.max_tokens)]


class FeatureStore:
    """A finished or unfinished store on disk. Shards are memory-mapped, so it may be larger than memory.

    Args:
        folder: Made by `create`.

    Raises:
        TrainingError: Not a store.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.spec = FeatureSpec.model_validate_json((self.folder / STORE).read_text(encoding="utf-8"))
        except OSError:
            raise TrainingError(
                f"{self.folder} is no feature store: it has no {STORE}. Make one with: rsrank features"
            ) from None
        except (ValidationError, UnicodeDecodeError) as error:
            raise TrainingError(f"{self.folder / STORE} is damaged: {error}") from None

    @classmethod
    def create(cls, folder: str | Path, spec: FeatureSpec, size: int) -> FeatureStore:
        """Begin a store, or go on with one that was begun in just the same way.

        Args:
            folder: Where.
            spec: What it will hold.
            size: Bytes it will take.

        Raises:
            TrainingError: There is a store of something else, or the disk is too small.
        """
        folder = Path(folder)
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
                "tokens (--max-tokens), documents (--max-documents) or queries (--queries), or another disk."
            )
        _write(folder / STORE, (spec.model_dump_json(indent=2) + "\n").encode())
        return cls(folder)

    def ranges(self) -> list[range]:
        """The queries of each shard."""
        stops = [*self.spec.shards[1:], self.spec.queries]
        return [range(start, stop) for start, stop in zip(self.spec.shards, stops, strict=True)]

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        return [shard for shard in range(len(self.spec.shards)) if not self.path(shard).exists()]

    def write(self, shard: int, features: Sequence[QueryFeatures]) -> None:
        """Write a whole shard; it appears only when it is complete."""
        tensors = {
            str(number): query.shifts.contiguous() for number, query in zip(self.ranges()[shard], features, strict=True)
        }
        table = {
            str(number): {"relevant": list(query.relevant), "tokens": query.tokens, "oracle": query.oracle}
            for number, query in zip(self.ranges()[shard], features, strict=True)
        }
        partial = partial_of(self.path(shard))
        save_file(tensors, partial, metadata={"queries": json.dumps(table)})
        partial.chmod(0o644)
        partial.replace(self.path(shard))

    def __len__(self) -> int:
        """Number of queries.

        Raises:
            TrainingError: The store is not finished.
        """
        missing = self.missing()
        if missing:
            raise TrainingError(
                f"{self.folder} is not finished: {len(missing)} of {len(self.spec.shards)} shards are missing. Run the "
                "same rsrank features command again; it goes on where it stopped."
            )
        return self.spec.queries

    def __getitem__(self, number: int, /) -> QueryFeatures:
        """One query's features, read from the disk when they are used.

        Raises:
            IndexError: No such query.
            TrainingError: The shard is damaged.
        """
        if not 0 <= number < self.spec.queries:
            raise IndexError(number)
        shard = max(i for i, first in enumerate(self.spec.shards) if first <= number)
        try:
            with safe_open(self.path(shard), framework="pt") as file:
                row = json.loads(file.metadata()["queries"])[str(number)]
                shifts = file.get_tensor(str(number))
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self.path(shard)} is damaged ({error}). Remove it and run the same rsrank features command again."
            ) from error
        return QueryFeatures(shifts, tuple(row["relevant"]), row["tokens"], row["oracle"])

    def fill(
        self,
        queries: Sequence[LabelledQuery],
        extractor: FeatureExtractor,
        *,
        worker: int = 0,
        workers: int = 1,
    ) -> Iterator[int]:
        """Make the missing shards that fall to one of several workers.

        Yields:
            The number of each query as it is done, those of shards that were there already included.
        """
        missing = set(self.missing())
        for shard, numbers in enumerate(self.ranges()):
            if shard not in missing:
                yield from numbers
        for shard in sorted(missing):
            if shard % workers != worker:  # by its number: what is missing changes while others work
                continue
            features = []
            for number in self.ranges()[shard]:
                features.append(extractor.extract(queries[number]))
                yield number
            self.write(shard, features)


def spec_for(
    extractor: FeatureExtractor,
    queries: Sequence[LabelledQuery],
    plan: Plan,
    backbone: BackboneSpec,
    *,
    sources: Sequence[str] = (),
    shard_bytes: int | None = None,
) -> FeatureSpec:
    """What a store of these queries would be.

    Shards are small enough that several workers all get some and that little is lost to a kill: 64 of them, each of
    at most a gigabyte.
    """
    shard_bytes = min(SHARD_BYTES, plan.bytes // 64) if shard_bytes is None else shard_bytes
    reader = extractor.reader
    return FeatureSpec(
        backbone=backbone,
        template=reader.prompts.template,
        layers=tuple(extractor.layers),
        signal=reader.signal,
        null_prefix=reader.null_prefix,
        dtype=extractor.dtype,
        compute_dtype=str(reader.backbone.dtype).removeprefix("torch."),
        bits=reader.backbone.bits,
        fp8=is_fp8(reader.backbone.model),
        max_length=reader.prompts.max_length,
        data=digest(queries, titles=extractor.titles),
        queries=len(queries),
        max_tokens=extractor.max_tokens,
        sources=tuple(sources),
        shards=tuple(_shards(plan.query_bytes, shard_bytes)),
    )


def digest(queries: Sequence[LabelledQuery], *, titles: bool = True) -> str:
    """sha256 of what the language model reads, and of the labels."""
    content = [
        [query.query, [[document.content(titles=titles), document.relevant] for document in query.documents]]
        for query in queries
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def subsample(queries: Sequence[LabelledQuery], max_documents: int | None, seed: int = 0) -> list[LabelledQuery]:
    """At most so many documents a query: relevant ones up to half of them, the rest irrelevant, at random.

    What one class lacks, the other fills.
    """
    if max_documents is None:
        return list(queries)
    if max_documents < 2:
        raise InputError(f"max_documents must be at least 2 (one of each class), got {max_documents}.")
    chosen = []
    for query in queries:
        rng = random.Random(f"{seed}-{query.id}-{query.query}")
        relevant = [i for i, document in enumerate(query.documents) if document.relevant]
        others = [i for i, document in enumerate(query.documents) if not document.relevant]
        keep = min(len(relevant), max(max_documents // 2, max_documents - len(others)))
        places = rng.sample(relevant, keep) + rng.sample(others, min(len(others), max_documents - keep))
        chosen.append(query.model_copy(update={"documents": tuple(query.documents[i] for i in sorted(places))}))
    return chosen


def _shards(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """First query of each shard: as many queries as fit, at least one."""
    total = limit + 1
    for number, size in enumerate(sizes):
        total += size
        if total > limit:
            yield number
            total = size


def _differences(found: FeatureSpec, wanted: FeatureSpec) -> list[str]:
    """What differs, entry by entry. Value vectors may differ as much as other devices and dtypes make them."""
    theirs, ours = (_flat(spec.model_dump(exclude={"shards"})) for spec in (found, wanted))
    values = [entries.pop("backbone.values") for entries in (theirs, ours)]
    different = [
        f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} asked for"
        for name in sorted(set(theirs) | set(ours))
        if theirs.get(name) != ours.get(name)
    ]
    comparable = found.layers[-1] == wanted.layers[-1]  # the values are of the last layer that is read
    if comparable and relative_difference(values[1], values[0]) > TOLERANCE[wanted.bits]:
        different.append("the weights of the language model")
    if not different and found.shards != wanted.shards:
        different.append("other shards")
    return different


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _write(path: Path, content: bytes) -> None:
    partial = partial_of(path)
    partial.write_bytes(content)
    partial.replace(path)
