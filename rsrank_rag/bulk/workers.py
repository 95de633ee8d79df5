"""What actors do beside scoring: read documents ahead of time, and make features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RSRankError
from .on_ray import Actors, each

if TYPE_CHECKING:
    from ..rsrank import RSRank
    from ..training.recipe import Recipe
    from ..training.store import FeatureStore

DOCUMENTS = 256
"""That an actor reads at a time."""

SHARES = 64
"""Of the feature shards, for any number of actors: as many as there are shards, roughly."""


def index_on(actors: Actors, make: Callable[[], RSRank], documents: Sequence[str]) -> int:
    """Read documents ahead of time on a Ray cluster.

    Args:
        actors: Who does it.
        make: Loads the model; picklable. Its folder of prefixes is one that every machine sees.
        documents: Texts.

    Returns:
        How many were not there yet.

    Raises:
        RSRankError: An actor could not do it.
    """
    texts = list(dict.fromkeys(documents))
    chunks = [texts[start : start + DOCUMENTS] for start in range(0, len(texts), DOCUMENTS)]
    return sum(each(partial(_indexing, make), chunks, actors))


def _indexing(make: Callable[[], RSRank]) -> Callable[[list[str]], int]:
    return make().index


def features_on(actors: Actors, recipe: Recipe, output: Path) -> FeatureStore:
    """Make a recipe's feature store on a Ray cluster, or what is missing of it.

    Args:
        actors: Who does it.
        recipe: Whose features.
        output: The recipe's folder, one that every machine sees.

    Raises:
        RSRankError: An actor could not do it.
    """
    from ..training.store import FeatureStore

    folder = output.absolute()
    for _ in each(partial(_extraction, recipe, folder), list(range(SHARES)), actors):
        pass
    store = FeatureStore(folder / "features")
    if store.missing():
        raise RSRankError(
            f"{store.folder} is not finished, though every actor has done its share. Do they all see this folder?"
        )
    return store


def _extraction(recipe: Recipe, output: Path) -> Callable[[int], None]:
    from ..training.run import TrainingRun

    run = TrainingRun(recipe, output)  # loads the language model at its first share, and once
    return lambda share: run.extract_part(share, SHARES)
