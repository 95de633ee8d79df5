"""What B does to the shifts, for the eye: documents as vectors before and after it, and as points on a plane (UMAP).

Axes: N documents, L layers, H KV heads, T query tokens, D head dimension, P projection dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import InputError, MissingDependencyError
from ..evaluation import plots
from ..evaluation.datasets import LabelledQuery
from ..evaluation.report import Picture, short_names
from ..evaluation.systems.batched import read_documents
from ..method.scoring import Row
from ..method.shift import EPSILON
from ..rsrank import RSRank

FEWEST = 4
"""Documents that UMAP can lay out."""


@dataclass(frozen=True)
class ShiftVectors:
    """One vector a document before and after B, and its label.

    Attributes:
        before: (N, L * H * D) fp32: the shift's direction at each layer and head, averaged over the query's tokens.
        after: (N, L * H * P) fp32: the same of the projected shift. A row's sum over the root of P is the score.
        relevant: (N,) bool.
    """

    before: np.ndarray
    after: np.ndarray
    relevant: np.ndarray


@torch.inference_mode()
def shift_vectors(ranker: RSRank, queries: Sequence[LabelledQuery], *, titles: bool = True) -> ShiftVectors:
    """Read the shifts of all documents (paper, Section 7.1).

    Directions and not lengths, on both sides of B: the score knows nothing else, and the last layers' values are so
    much longer that they would hide the others. Documents without tokens, which shift nothing, are left out.

    `queries`: labelled queries; their documents' vectors take 4 * L * H * (D + P) bytes each.

    Raises:
        InputError: A query is empty or too long.
    """

    def read(batch: list[Row]) -> Iterator[tuple[Tensor, Tensor]]:
        before: list[Tensor] = []
        after: list[Tensor] = []

        def keep(layer: int, shift: Tensor) -> None:
            projected = ranker.projection.projected(layer, shift)
            before.append(normalize(shift, dim=-1, eps=EPSILON).mean(2).flatten(1).cpu())  # (N, H * D)
            after.append(normalize(projected, dim=-1, eps=EPSILON).mean(2).flatten(1).cpu())  # (N, H * P)

        ranker.reader.read(batch, keep)
        return zip(torch.cat(before, 1), torch.cat(after, 1), strict=True)

    rows: list[tuple[Tensor, Tensor]] = []
    labels: list[bool] = []
    for query in queries:
        texts = [document.content(titles=titles) for document in query.documents]
        found = read_documents(ranker, query.query, texts, read)
        rows += [vectors for vectors in found if vectors is not None]
        labels += [d.relevant for d, vectors in zip(query.documents, found, strict=True) if vectors is not None]
    layers, heads, dim, width = ranker.projection.weight.shape
    before, after = (
        np.stack([row[side].numpy() for row in rows]) if rows else np.empty((0, layers * heads * size), np.float32)
        for side, size in ((0, width), (1, dim))
    )
    return ShiftVectors(before, after, np.array(labels, dtype=bool))


def umap_plane(vectors: np.ndarray, *, neighbours: int = 15, seed: int = 0) -> np.ndarray:
    """Lay vectors out on a plane so that neighbours (by cosine) stay together (umap-learn, repeatable).

    `vectors`: (N, F) with N at least `FEWEST`. `neighbours`: how many neighbours of each vector to keep together;
    fewer where there are not so many vectors.

    Returns:
        (N, 2). Distances between groups and the axes themselves mean nothing.

    Raises:
        InputError: Too few vectors.
        MissingDependencyError: umap-learn is not installed.
    """
    umap = load_umap()
    if len(vectors) < FEWEST:
        raise InputError(f"UMAP needs at least {FEWEST} documents, got {len(vectors)}.")
    layout = umap.UMAP(
        n_neighbors=min(neighbours, len(vectors) - 1), metric="cosine", random_state=seed, n_jobs=1, init="pca"
    )
    return np.asarray(layout.fit_transform(vectors), dtype=float)


def load_umap() -> Any:
    """The library, which takes seconds to import.

    Raises:
        MissingDependencyError: umap-learn is not installed.
    """
    try:
        import umap
    except ImportError:
        raise MissingDependencyError("UMAP needs umap-learn.", "umap") from None
    return umap


def shift_pictures(
    name: str, system: object, sets: Mapping[str, Sequence[LabelledQuery]], *, titles: bool = True, queries: int = 100
) -> list[Picture]:
    """Shifts before and after B for `write_report`, one figure a set.

    None for a system that is no `RSRank`, nor for a set of fewer documents than UMAP can lay out.

    `queries`: only the first ones of each set.

    Raises:
        MissingDependencyError: matplotlib or umap-learn is not installed.
    """
    if not isinstance(system, RSRank):
        return []
    pictures = []
    for number, (label, labelled) in enumerate(sets.items()):
        vectors = shift_vectors(system, labelled[:queries], titles=titles)
        if len(vectors.relevant) < FEWEST:
            continue
        figure = plots.shift_map(
            umap_plane(vectors.before),
            umap_plane(vectors.after),
            vectors.relevant,
            title=f"{short_names([name])[name]}, {label}",
        )
        caption = (
            f"{name}, {label}: documents by their shifts (UMAP), before and after B. Those of one query may gather: "
            "they shift the same tokens."
        )
        stem = "".join(letter if letter.isalnum() else "-" for letter in name)
        pictures.append(Picture("shifts", f"shifts-{stem}-{number}", caption, figure))
    return pictures
