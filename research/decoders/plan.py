"""Which queries' features are read, in which order."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, PositiveInt
from typing_extensions import Self

from rsrank_rag.evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from rsrank_rag.training.recipe import ModelPart, read_toml, validated

FOLDER = Path(__file__).with_name("plans")

FIRST_DOCUMENTS = 10
"""Documents of a query that are read first: the relevant ones, up to half, and others at random."""


class PlannedSet(BaseModel, extra="forbid", frozen=True):
    """Queries of a labelled file."""

    file: str
    queries: PositiveInt
    first_only: bool = False
    """Whether only the first documents are read in this stage."""
    signals: bool = False
    """Whether keys, hidden states and raw value vectors are stored beside shifts."""
    typo: bool = False
    """Whether each query has a typo in its longest word."""

    @property
    def name(self) -> str:
        """The file's name, and whether queries have typos."""
        name = dataset_name(self.file)
        return f"{name}.typo" if self.typo else name

    def drawn(self) -> list[LabelledQuery]:
        """The queries, at random. A larger number of queries begins with the same ones."""
        queries = read_labelled(self.file)
        random.Random(f"decoders-{dataset_name(self.file)}").shuffle(queries)
        queries = queries[: self.queries]
        if not self.typo:
            return queries
        changed = []
        for query in queries:
            changed.append(query.model_copy(update={"query": with_typo(query.query)}))
        return changed


class Stage(BaseModel, extra="forbid", frozen=True):
    """Sets that are read side by side: after any share of the stage, each set has this share."""

    sets: tuple[PlannedSet, ...] = Field(min_length=1)


class Plan(BaseModel, extra="forbid", frozen=True):
    """The language model, and the stages in their order."""

    model: ModelPart
    stages: tuple[Stage, ...] = Field(min_length=1)

    @classmethod
    def load(cls, source: str) -> Self:
        """Read a plan by its name or from a TOML file; InputError if the plan is not valid."""
        return validated(cls, read_toml(source, FOLDER, "plan"), source, "plan")

    def files(self, split: str) -> dict[str, PlannedSet]:
        """Each set of a folder (``train`` or ``dev``), by name, with most of its queries."""
        sets: dict[str, PlannedSet] = {}
        for stage in self.stages:
            for part in stage.sets:
                largest = sets.get(part.name)
                if Path(part.file).parent.name == split and (
                    largest is None or part.queries > largest.queries
                ):
                    sets[part.name] = part
        return sets


def in_order(stage: Stage) -> Iterator[tuple[PlannedSet, LabelledQuery]]:
    """The stage's queries, interleaved."""
    placed = []
    for number, part in enumerate(stage.sets):
        queries = part.drawn()
        for place, query in enumerate(queries):
            placed.append(((place + 0.5) / len(queries), number, query))
    placed.sort(key=lambda entry: entry[:2])
    for _, number, query in placed:
        yield stage.sets[number], query


def first_places(query: LabelledQuery) -> list[int]:
    """Places of the documents that are read first, in the query's order."""
    relevant: list[int] = []
    others: list[int] = []
    for place, document in enumerate(query.documents):
        if document.relevant:
            relevant.append(place)
        else:
            others.append(place)
    generator = random.Random(f"decoders-{query.id}-{query.query}")
    least = max(FIRST_DOCUMENTS // 2, FIRST_DOCUMENTS - len(others))
    places = _sample(generator, relevant, least)
    places += _sample(generator, others, FIRST_DOCUMENTS - len(places))
    return sorted(places)


def with_typo(text: str) -> str:
    """A text with one typo inside its longest word: a letter left out, doubled or swapped."""
    generator = random.Random(f"typo-{text}")
    words = text.split()
    longest = max(range(len(words)), key=lambda place: len(words[place]))
    word = words[longest]
    if len(word) < 4:
        return text
    place = generator.randrange(1, len(word) - 2)
    first, second = word[place], word[place + 1]
    changed = generator.choice([second, first * 2 + second, second + first])
    words[longest] = word[:place] + changed + word[place + 2 :]
    return " ".join(words)


def _sample(generator: random.Random, places: Sequence[int], count: int) -> list[int]:
    return generator.sample(places, min(count, len(places)))
