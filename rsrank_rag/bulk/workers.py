"""What actors do beside scoring: read documents ahead of time, and make features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Read documents ahead of time on a Ray cluster; returns how many were not there yet.

    ``make`` loads the model. It must be picklable, and the model's folder of prefixes one that every machine sees.
    """
    texts = list(dict.fromkeys(documents))
    chunks = [texts[start : start + DOCUMENTS] for start in range(0, len(texts), DOCUMENTS)]
    return sum(each(lambda: make().index, chunks, actors))


def features_on(actors: Actors, recipe: Recipe, output: Path) -> FeatureStore:
    """Make a recipe's feature store on a Ray cluster, or what is missing of it, in a folder that every machine sees."""
    from ..training.store import FeatureStore

    folder = output.absolute()

    def extraction() -> Callable[[int], None]:
        from ..training.run import TrainingRun

        run = TrainingRun(recipe, folder)  # loads the language model at its first share, and once
        return lambda share: run.extract_part(share, SHARES)

    for _ in each(extraction, list(range(SHARES)), actors):
        pass
    store = FeatureStore(folder / "features")
    if store.missing():
        raise RSRankError(
            f"{store.folder} is not finished, though every actor has done its share. Do they all see this folder?"
        )
    return store
