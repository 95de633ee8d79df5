"""Features of labelled queries, and their files.

A folder holds ``store.json``, which says what the features are of, and a file of torch for each
query. A file appears only when it is complete, so that a run that was killed goes on where it
stopped. Files are memory-mapped: features may be larger than memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from ..partial_files import appearing, write_text

DESCRIPTION = "store.json"


@dataclass(frozen=True)
class QueryFeatures:
    """One labelled query's features: L layers, H heads, N documents, T tokens, D head dimension."""

    # (L, H, (N + 1) * T, D): T rows for each document, then T rows of the oracle shift, if any.
    shifts: Tensor
    # N labels.
    relevant: tuple[bool, ...]
    # T, the query's scored tokens.
    tokens: int
    # Whether the last T rows are the oracle shift: that of all relevant documents together.
    oracle: bool
    # Cosine and MaxSim of the query and each document's similarity windows, (N, W, 2); a document
    # with fewer windows has its first one again. None without a fusion layer.
    similarity: Tensor | None = None


def write_features(path: Path, query: QueryFeatures) -> None:
    """Write a query's features into a file."""
    with appearing(path) as partial:
        torch.save(vars(query), partial)


def read_features(path: Path) -> QueryFeatures:
    """A query's features, memory-mapped; TrainingError where the file is damaged."""
    try:
        return QueryFeatures(**torch.load(path, mmap=True, weights_only=True))
    except (OSError, RuntimeError, TypeError, UnpicklingError) as error:
        raise TrainingError(
            f"{path} is damaged ({error}). Remove it and run the same command again."
        ) from error


def open_folder(folder: Path, description: Mapping[str, Any]) -> None:
    """Begin a folder of features, or go on with one of the same features.

    Args:
        folder: Where the files are.
        description: What the features are of, as JSON can hold it.

    Raises:
        TrainingError: The folder holds features of something else.
    """
    path = folder / DESCRIPTION
    text = json.dumps(description, indent=2, sort_keys=True) + "\n"
    if not path.exists():
        write_text(path, text)
    before = json.loads(path.read_text(encoding="utf-8"))
    different = []
    for name, value in json.loads(text).items():
        if before.get(name) != value:
            different.append(f"{name}: {before.get(name)!r} there, {value!r} wanted")
    if different:
        raise TrainingError(
            f"{folder} holds features of something else ({'; '.join(different)}). Use another "
            "folder, or remove this one."
        )
