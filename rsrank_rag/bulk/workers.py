"""What actors do beside scoring: read documents ahead of time, and make features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RSRankError
from .on_ray import Actors, each

if TYPE_CHECKING:
    from ..rsrank import RSRank
    from ..training.recipe import Recipe
    from ..training.run import TrainingRun
    from ..training.store import FeatureStore

DOCUMENTS = 256
"""That an actor reads at a time."""

SHARES = 64
"""Of the feature shards, for any number of actors: as many as there are shards, roughly."""


class Indexer:
    """Reads documents into a folder of prefixes that all actors share.

    Args:
        make: Loads the model with that folder as its ``prefix_cache``; picklable.
    """

    def __init__(self, make: Callable[[], RSRank]) -> None:
        self.make = make

    @cached_property
    def _ranker(self) -> RSRank:
        return self.make()

    def __call__(self, documents: list[str]) -> int:
        """Read documents and return how many were not there yet."""
        return self._ranker.index(documents)


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
    return sum(each(partial(Indexer, make), chunks, actors))


class FeatureMaker:
    """Makes shares of a feature store.

    Args:
        recipe: Whose features.
        output: The recipe's folder, one that every machine sees.
    """

    def __init__(self, recipe: Recipe, output: Path) -> None:
        self.recipe, self.output = recipe, output

    @cached_property
    def _run(self) -> TrainingRun:
        from ..training.run import TrainingRun

        return TrainingRun(self.recipe, self.output)

    def __call__(self, share: int) -> int:
        """Make one share of `SHARES` and return its number."""
        self._run.extract_part(share, SHARES)
        return share


def features_on(actors: Actors, recipe: Recipe, output: Path) -> FeatureStore:
    """Make a recipe's feature store on a Ray cluster, or what is missing of it.

    Raises:
        RSRankError: An actor could not do it.
    """
    from ..training.store import FeatureStore

    folder = output.absolute()
    for _ in each(partial(FeatureMaker, recipe, folder), list(range(SHARES)), actors):
        pass
    store = FeatureStore(folder / "features")
    if store.missing():
        raise RSRankError(
            f"{store.folder} is not finished, though every actor has done its share. Do they all see this folder?"
        )
    return store
