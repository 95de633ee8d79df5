"""Features of queries, stored by the query's content in two parts.

The first part holds the documents of `plan.first_places` and the oracle shift, the second part all
other documents. So a store is useful long before all candidates have been read, and a longer plan
goes on with the same files.

Axes: L layers, H KV heads, N documents, T scored query tokens, D head dimension, C hidden size.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.partial_files import appearing
from rsrank_rag.training.store import DESCRIPTION, QueryFeatures

from .plan import first_places

Signal = Literal["values", "keys", "hidden", "raw"]
"""Shifts of value vectors, of keys before rotation, of hidden states that enter a layer, or value
vectors themselves."""

FIELDS = ("shifts", "relevant", "tokens", "oracle")
"""What a file holds of `QueryFeatures`."""


@dataclass(frozen=True)
class Store:
    """A folder with a folder for each set."""

    folder: Path

    def path(self, name: str, query: LabelledQuery, part: str) -> Path:
        """The file of one part of a query's documents."""
        key = hashlib.sha256(query.model_dump_json().encode()).hexdigest()[:24]
        return self.folder / name / f"{key}.{part}.pt"

    def read(
        self,
        name: str,
        queries: Sequence[LabelledQuery],
        *,
        whole: bool = True,
        signal: Signal = "values",
    ) -> dict[str, QueryFeatures]:
        """Features of the queries that have been read, by the id of the query.

        Args:
            name: The set's name.
            queries: The queries.
            whole: Take only queries of which all documents have been read, with all documents.
                Otherwise a query has the documents that have been read.
            signal: What the features are of. Queries without this signal are left out.
        """
        read = {}
        for query in queries:
            features = self._read(name, query, whole, signal)
            if features is not None:
                read[query.id] = features
        return read

    @cached_property
    def head_dim(self) -> int:
        """D."""
        description = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
        return int(description["head_dim"])

    def _read(
        self, name: str, query: LabelledQuery, whole: bool, signal: Signal
    ) -> QueryFeatures | None:
        parts = parts_of(query)
        paths = [self.path(name, query, part) for part in parts]
        present = [path.exists() for path in paths]
        if not present[0] or (whole and not all(present)):
            return None
        places: list[int] = []
        documents: list[Tensor] = []
        oracle: Tensor | None = None
        for part, path, exists in zip(parts, paths, present, strict=True):
            if not exists:
                continue
            features = read_part(path)
            selected = select(features.shifts, signal, self.head_dim)
            if selected is None:
                return None
            layers, heads, _, width = selected.shape
            by_document = selected.reshape(layers, heads, -1, features.tokens, width)
            count = len(features.relevant)
            documents.append(by_document[:, :, :count])
            places += parts[part]
            if features.oracle:
                oracle = by_document[:, :, count:]
        order = sorted(range(len(places)), key=places.__getitem__)
        shifts = torch.cat(documents, 2)[:, :, order]
        if oracle is not None:
            shifts = torch.cat([shifts, oracle], 2)
        relevant = tuple(query.documents[places[index]].relevant for index in order)
        return QueryFeatures(
            shifts.flatten(2, 3), relevant, features.tokens, oracle=oracle is not None
        )


def write_part(path: Path, features: QueryFeatures) -> None:
    """Write features without similarity, which a decoder's artifact does not have."""
    fields = {name: getattr(features, name) for name in FIELDS}
    path.parent.mkdir(exist_ok=True)
    with appearing(path) as partial:
        torch.save(fields, partial)


def read_part(path: Path) -> QueryFeatures:
    """Features that `write_part` wrote, memory-mapped."""
    stored = torch.load(path, mmap=True, weights_only=True)
    return QueryFeatures(**{name: stored[name] for name in FIELDS})


def parts_of(query: LabelledQuery) -> dict[str, list[int]]:
    """Places of the documents of each part; a query with few documents has one part."""
    first = first_places(query)
    parts = {"first": first, "rest": sorted(set(range(len(query.documents))) - set(first))}
    return {part: places for part, places in parts.items() if places}


def select(stored: Tensor, signal: Signal, head_dim: int) -> Tensor | None:
    """One signal of stored rows (L, H, rows, D) or (L, H, rows, 3 D + C / H), or None."""
    if signal == "values":
        return stored[..., :head_dim]
    if stored.shape[-1] == head_dim:
        return None
    if signal == "raw":
        return stored[..., head_dim : 2 * head_dim]
    if signal == "keys":
        return stored[..., 2 * head_dim : 3 * head_dim]
    # Hidden states have no heads: (L, 1, rows, C).
    hidden = stored[..., 3 * head_dim :]
    return hidden.movedim(1, 2).flatten(2)[:, None]
