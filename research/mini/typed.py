"""Batches of the second stage: typed queries, mixed with the sets of the first stage.

The queries of one document are drawn together, because they share its passages: a passage is then
run once for all of them. A passage of the same document that does not answer is the hardest
negative, and most candidates are such.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import data

SOURCES_APART = 9
"""Of 86 sources of real documents, those whose queries validate: a tenth."""
SHARES: dict[str, float] = {
    **data.SETS,
    **{name: 1.4 * data.SETS[name] for name in ("qed.sentence", "fm2.sentence")},
    **{
        name: 1.4 * data.SETS[name]
        for name in ("squad.paragraph", "nq.paragraph", "medquad.paragraph")
    },
    "selqa.sentence": 0.12,
    "words": 0.12,
    "greetings": 0.05,
}
"""Shares of the queries that do not come from real documents."""
QUERIES_OF_SET: dict[str, int] = {
    **dict.fromkeys(data.SETS, 90),
    "selqa.sentence": 300,
    "qed.sentence": 200,
    "fm2.sentence": 200,
    "squad.paragraph": 180,
    "nq.paragraph": 180,
    "medquad.paragraph": 160,
    "bioasq.snippet": 160,
    "squad.sentence": 160,
}
"""Training queries taken of each set: the teacher has to read their passages."""

DOCUMENTS, QUERIES_OF_DOCUMENT, OTHERS = 2, 5, 6
"""A batch: so many real documents with so many queries each, and so many queries of other sets."""
OWN, FAR, STRANGE = 10, 2, 4
"""Irrelevant passages of a query: of its document, near ones of others, and of other queries."""
BUDGET = 260
"""Tokens of irrelevant passages of a query of another set."""
LOWER, TITLED_REAL, TITLED = 0.06, 0.65, 0.7
MANUALS_APART = frozenset({"curl", "netcat", "tmux", "zstd"})
"""Tools whose queries validate the last leg."""
MANUAL_QUERIES, LIBRARY_QUERIES, TITLED_LIBRARY = 6, 4, 0.4


@dataclass
class Batch:
    """Queries, texts, and which pairs of them are scored.

    Attributes:
        queries: Texts of the queries.
        texts: Distinct passages, some with their titles.
        bare: The same passages as the teacher knows them.
        pairs: (query, text) by position.
        labels: Whether the text of each pair is relevant.
        hard: For each query, whether its candidates are passages of one real document.
        unlabelled: Queries for which only the teacher's order of the passages counts.
    """

    queries: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)
    hard: list[bool] = field(default_factory=list)
    unlabelled: set[int] = field(default_factory=set)

    def text(self, text: str, bare: str) -> int:
        """Position of a text; the text is added where it is new."""
        if text not in self.texts:
            self.texts.append(text)
            self.bare.append(bare)
        return self.texts.index(text)

    def query(self, query: str, *, hard: bool) -> int:
        """Position of a new query."""
        self.queries.append(query)
        self.hard.append(hard)
        return len(self.queries) - 1

    def pair(self, query: int, text: int, relevant: bool) -> None:
        """Add a pair that is scored."""
        self.pairs.append((query, text))
        self.labels.append(relevant)


def document_of(passage: dict) -> str:
    """The real document that a passage was cut from: ``manual/12`` of ``manual/12#3``."""
    return passage["id"].partition("#")[0]


class Pool:
    """Everything that batches are drawn from.

    Args:
        folder: Training sets.

    Attributes:
        documents: The queries of each real document.
        validation: Queries of real documents of other sources than those that are trained on.
    """

    def __init__(self, folder: Path) -> None:
        rows = data.read(folder / f"{data.REAL}.jsonl.gz")
        sources = sorted({row["of"] for row in rows}, key=_digest)
        apart = set(sources[:SOURCES_APART])
        self.validation = [row for row in rows if row["of"] in apart]
        groups: dict[str, list[dict]] = defaultdict(list)
        for row in rows:
            if row["of"] not in apart:
                groups[own_document(row)].append(row)
        self.documents = list(groups.values())
        self.texts = data.Texts()
        training, _ = data.load(folder, list(QUERIES_OF_SET), self.texts)
        self.examples = _limited(training)

    def teacher_texts(self) -> list[str]:
        """Queries and passages of all examples, those of real documents first."""
        real = [row for rows in self.documents for row in rows]
        texts = dict.fromkeys(row["query"] for row in real)
        texts |= dict.fromkeys(passage["text"] for row in real for passage in row["documents"])
        texts |= dict.fromkeys(example.query for example in self.examples)
        for example in self.examples:
            places = [*example.relevant, *example.others]
            texts |= dict.fromkeys(self.texts.texts[place] for place in places)
        return list(texts)


def own_document(row: dict) -> str:
    """The document that most passages of a query come from."""
    return Counter(map(document_of, row["documents"])).most_common(1)[0][0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _limited(training: Sequence[data.Example]) -> list[data.Example]:
    """So many examples of each set, each with few passages: the teacher has to read them all."""
    rng = random.Random(5)
    examples = []
    for name, most in QUERIES_OF_SET.items():
        of_set = [example for example in training if example.source == name]
        for example in rng.sample(of_set, min(most, len(of_set))):
            others = [place for place in example.others if place not in example.relevant]
            most_others = 12 if name.endswith("sentence") else 5
            example.relevant = rng.sample(example.relevant, min(3, len(example.relevant)))
            example.others = rng.sample(others, min(most_others, len(others)))
            examples.append(example)
    return examples


class Sampler:
    """Batches as a function of the step alone, so that a resumed run sees the same batches.

    Args:
        pool: What batches are drawn from.
        seed: Of every choice.
    """

    validation: Sequence[dict] = ()

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.seed = seed
        self.by_set: dict[str, list[data.Example]] = defaultdict(list)
        made = data.words(pool.examples, pool.texts, 600, 3)
        made += data.greetings(pool.examples, 120, 3)
        for example in [*pool.examples, *made]:
            self.by_set[example.source].append(example)
        self.names = [name for name in SHARES if self.by_set[name]]
        self.shares = [SHARES[name] for name in self.names]

    def __call__(self, step: int) -> Batch:
        """The batch of one step."""
        return self.mixed(step, DOCUMENTS, OTHERS, BUDGET)

    def mixed(self, step: int, documents: int, others: int, budget: int) -> Batch:
        """Queries of real documents and of other sets, with a token budget for the latter."""
        rng = random.Random(f"{self.seed}-{step}")
        batch = Batch()
        count = min(documents, len(self.pool.documents))
        for rows in rng.sample(self.pool.documents, count):
            titled = rng.random() < TITLED_REAL
            for row in rng.sample(rows, min(QUERIES_OF_DOCUMENT, len(rows))):
                self._add_typed(batch, row, titled, rng)
        typed = len(batch.queries)
        words = {self._add_example(batch, budget, rng) for _ in range(others)} - {None}
        _add_strangers(batch, typed, words, rng)
        return batch

    def _add_typed(self, batch: Batch, row: dict, titled: bool, rng: random.Random) -> None:
        """Add a typed query with relevant and irrelevant passages."""
        own = own_document(row)
        relevant = [passage for passage in row["documents"] if passage["relevant"]]
        irrelevant = [passage for passage in row["documents"] if not passage["relevant"]]
        near = [passage for passage in irrelevant if document_of(passage) == own]
        far = [passage for passage in irrelevant if document_of(passage) != own]
        rng.shuffle(near)
        rng.shuffle(far)
        text = row["query"].lower() if rng.random() < LOWER else row["query"]
        query = batch.query(text, hard=True)
        for passage in [*relevant, *near[:OWN], *far[:FAR]]:
            content = data.content(passage) if titled else passage["text"]
            batch.pair(query, batch.text(content, passage["text"]), passage["relevant"])

    def _add_example(self, batch: Batch, budget: int, rng: random.Random) -> int | None:
        """Add a query of another set. Returns its position if it is made of words of a passage."""
        name = rng.choices(self.names, self.shares)[0]
        example = rng.choice(self.by_set[name])
        titled = rng.random() < TITLED
        short = name in data.SETS and rng.random() < data.KEYWORDS
        text = data.keywords(example.query) if short else example.query
        query = batch.query(text, hard=False)
        relevant = rng.sample(example.relevant, min(3, len(example.relevant)))
        mined = example.mined[:2] if name == "words" else []
        irrelevant = mined + rng.sample(example.others, len(example.others))
        left = budget
        for place in [*relevant, *irrelevant]:
            bare = self.pool.texts.texts[place]
            content = (
                bare if titled else self.pool.texts.texts[self.pool.texts.bare.get(place, place)]
            )
            tokens = min(158, len(content) // 4)
            if place not in relevant and left < tokens:
                continue
            left -= tokens
            batch.pair(query, batch.text(content, bare), place in relevant)
        return query if name == "words" else None


class TechnicalSampler(Sampler):
    """Batches of the last leg: manual pages and library documentation beside all else.

    Args:
        pool: As for `Sampler`.
        seed: Of every choice.
        manuals: JSON lines of labelled queries (manuals.py).
        library_docs: Groups of passages with a query each (library_docs.py), or None.
        documents: Real documents a batch.

    Attributes:
        validation: Labelled queries of the tools that nothing is trained on.
    """

    def __init__(
        self,
        pool: Pool,
        seed: int,
        manuals: Path,
        library_docs: Path | None,
        documents: int = 1,
    ) -> None:
        super().__init__(pool, seed)
        self.documents = documents
        lines = manuals.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        self.manuals = [row for row in rows if row["of"] not in MANUALS_APART]
        self.validation = [row for row in rows if row["of"] in MANUALS_APART]
        self.library_docs = []
        if library_docs is not None:
            self.library_docs = json.loads(library_docs.read_text(encoding="utf-8"))

    def teacher_texts(self) -> list[str]:
        """Queries and passages that `Pool.teacher_texts` does not hold."""
        texts = [row["query"] for row in self.manuals]
        texts += [passage["text"] for row in self.manuals for passage in row["documents"]]
        for passage in (passage for group in self.library_docs for passage in group):
            texts += [passage["query"], passage["text"]]
        return list(dict.fromkeys(texts))

    def __call__(self, step: int) -> Batch:
        """The batch of one step."""
        batch = self.mixed(step, self.documents, OTHERS, 240)
        rng = random.Random(f"technical-{self.seed}-{step}")
        for row in rng.sample(self.manuals, min(MANUAL_QUERIES, len(self.manuals))):
            titled = rng.random() < TITLED_REAL
            near = [passage for passage in row["documents"] if not passage["relevant"]][:12]
            rng.shuffle(near)
            query = batch.query(row["query"], hard=True)
            relevant = [passage for passage in row["documents"] if passage["relevant"]]
            for passage in [*relevant, *near[:9]]:
                content = data.content(passage) if titled else passage["text"]
                batch.pair(query, batch.text(content, passage["text"]), passage["relevant"])
        if self.library_docs:
            self._add_library_docs(batch, rng)
        return batch

    def _add_library_docs(self, batch: Batch, rng: random.Random) -> None:
        """Add first sentences as queries, over passages of two modules."""
        passages = []
        for count in (7, 4):
            group = rng.choice(self.library_docs)
            passages += rng.sample(group, min(count, len(group)))
        places = {}
        for passage in passages:
            titled = rng.random() < TITLED_LIBRARY
            content = f"{passage['title']}\n{passage['text']}" if titled else passage["text"]
            places[batch.text(content, passage["text"])] = passage["text"]
        for passage in rng.sample(passages, min(LIBRARY_QUERIES, len(passages))):
            query = batch.query(passage["query"], hard=False)
            batch.unlabelled.add(query)
            for place, text in places.items():
                batch.pair(query, place, text == passage["text"])


def _add_strangers(batch: Batch, typed: int, words: set[int | None], rng: random.Random) -> None:
    """Score each query against passages of other queries, too, which do not answer it.

    A passage of a real document is never a stranger to a typed query: whoever labelled the query
    left out the doubtful passages of its document on purpose.
    """
    scored = set(batch.pairs)
    of_typed = {text for query, text in scored if query < typed}
    for query in range(len(batch.queries)):
        if query in words:
            continue
        strange = [
            text
            for text in range(len(batch.texts))
            if (query, text) not in scored and not (query < typed and text in of_typed)
        ]
        for text in rng.sample(strange, min(STRANGE, len(strange))):
            batch.pair(query, text, False)
