"""Recipes whose data may be sets by name from the Hub, such as those for Qwen3."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import AliasChoices, Field, PositiveInt, model_validator
from typing_extensions import Self

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from rsrank_rag.training.recipe import SHIPPED, DataPart, FeaturePart, Recipe, shipped

from .hub_datasets import Granularity, Split, load_named
from .negatives import Negatives, replace_negatives
from .reproduction.closed_forms import Method


class SetPart(DataPart, extra="forbid", frozen=True):
    """Labelled queries: a JSON-lines file, or a set by its name."""

    file: str | None = None  # type: ignore[assignment]
    label: str | None = None
    queries: PositiveInt | None = Field(default=None, description="At most so many, at random.")
    dataset: str | None = Field(
        default=None,
        validation_alias=AliasChoices("dataset", "name"),
        description="One of the paper's sets, or beir:NAME; `name` means the same.",
    )
    split: Split = "train"
    granularity: Granularity | None = None
    negatives: Negatives | None = Field(
        default=None,
        description="None for 15 random ones with BEIR, and for the set's own with all others.",
    )
    revision: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.dataset is None):
            raise ValueError("give either file or dataset (by its name)")
        return self

    @property
    def title(self) -> str:
        """What the set is called."""
        return self.label or self.dataset or dataset_name(str(self.file))

    def load(
        self, seed: int, *, options: LoadOptions | None = None, titles: bool = True
    ) -> list[LabelledQuery]:
        """Read the set.

        Args:
            seed: It draws queries and random negatives.
            options: How to load the bi-encoder of dense negatives.
            titles: Whether documents keep their titles. Without them, the first stage of hard
                negatives does not read a file's titles either.
        """
        queries = self._with_titles(seed, options, titles)
        if titles:
            return queries
        return list(map(_without_titles, queries))

    def _with_titles(
        self, seed: int, options: LoadOptions | None, titles: bool
    ) -> list[LabelledQuery]:
        if self.dataset is not None:
            return load_named(
                self.dataset,
                split=self.split,
                queries=self.queries,
                granularity=self.granularity,
                negatives=self.negatives or Negatives(),
                seed=seed,
                revision=self.revision,
                options=options,
            )
        queries = read_labelled(str(self.file))
        if self.negatives is not None:
            queries = replace_negatives(
                queries, self.negatives, titles=titles, seed=seed, options=options
            )
        if self.queries is None or self.queries >= len(queries):
            return queries
        return random.Random(f"{seed}-{self.title}").sample(queries, self.queries)


def _without_titles(query: LabelledQuery) -> LabelledQuery:
    documents = [document.model_copy(update={"title": None}) for document in query.documents]
    return query.model_copy(update={"documents": tuple(documents)})


class ResearchFeatures(FeaturePart, extra="forbid", frozen=True):
    """What is read of the language model."""

    max_tokens: PositiveInt | None = Field(
        default=None, description="At most so many tokens of a query, evenly spread."
    )
    max_documents: int | None = Field(
        default=None, gt=1, description="At most so many documents of a query, see `subsample`."
    )
    titles: bool = Field(default=True, description="Read documents with their titles.")


def subsample(
    queries: Sequence[LabelledQuery], max_documents: int | None, seed: int = 0
) -> list[LabelledQuery]:
    """At most so many documents of each query: relevant ones up to half of them, others at random.

    Where one class has too few documents, the other fills the rest.
    """
    if max_documents is None:
        return list(queries)
    drawn = []
    for query in queries:
        generator = random.Random(f"{seed}-{query.id}-{query.query}")
        relevant: list[int] = []
        others: list[int] = []
        for place, document in enumerate(query.documents):
            if document.relevant:
                relevant.append(place)
            else:
                others.append(place)
        count = min(len(relevant), max(max_documents // 2, max_documents - len(others)))
        places = generator.sample(relevant, count)
        places += generator.sample(others, min(len(others), max_documents - count))
        documents = tuple(query.documents[place] for place in sorted(places))
        drawn.append(query.model_copy(update={"documents": documents}))
    return drawn


class ResearchRecipe(Recipe, frozen=True):
    """A recipe of this folder, or of the package; its data may be sets by name."""

    folder: ClassVar[Path] = Path(__file__).with_name("recipes")

    data: tuple[SetPart, ...] = ()
    evaluation: tuple[SetPart, ...] = ()
    features: ResearchFeatures = ResearchFeatures()
    method: Method = "gradient"

    def read_queries(self) -> list[LabelledQuery]:
        """The labelled queries of all sets, with at most as many documents as the recipe says."""
        queries: list[LabelledQuery] = []
        for part in self.data:
            queries += part.load(self.fit.seed, titles=self.features.titles)
        return subsample(queries, self.features.max_documents, self.fit.seed)

    @model_validator(mode="after")
    def _unique_titles(self) -> Self:
        titles = [part.title for part in self.evaluation]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(
                    f"two evaluation sets are called {title!r}: give one of them a label"
                )
        return self

    @classmethod
    def load(cls, source: str, *arguments: object, **named: object) -> Self:
        """Read a recipe by the name of one in either folder, or from a TOML file."""
        if source in shipped():
            source = str(SHIPPED / f"{source}.toml")
        return super().load(source, *arguments, **named)  # type: ignore[arg-type]
