"""Batches for `mini`: what people type, over passages as people cut them.

A batch holds several lists. A list is a query and the texts that it is scored against. Typed
queries (everyday, realdocs) come first; queries of the public sets follow. Everything is changed at
random as it happens in use: typos, keywords, titles that are none or none at all, and passages
joined with their neighbours.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data
from data import EVERYDAY, MANUALS, REAL

DOCUMENTS = (REAL, MANUALS)
"""Sets whose queries share the passages of one document."""
APART = 0.1
"""Share of everyday's entries and of realdocs' sources whose queries validate."""
QUERIES_OF_SET = 400
"""Training queries taken of each public set."""
MANUALS_APART = frozenset({"curl", "netcat", "tmux", "zstd"})
"""Tools whose queries validate."""
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NO_TITLES = (
    "Microsoft Word - final_v3.docx", "Microsoft Word - Document1", "final_v2.docx", "scan0012.pdf",
    "nan", "None", "untitled", "Untitled document", "PowerPoint Presentation", "report.pdf",
    "IMG_20230411.pdf", "export (2).html", "data/handbook/part_07.md", "index.html", "notes.txt",
    "Microsoft PowerPoint - slides_new.pptx", "Book1.xlsx", "tmp8f3a.pdf", "-", "page 3",
)  # fmt: skip
"""What loaders of PDF and office files write as a title."""


@dataclass
class Passage:
    """A candidate of a query.

    Attributes:
        text: Its text, without a title.
        title: Its title, or nothing.
        relevant: Whether it answers the query.
        group: What it was cut from: a real document, or the set.
    """

    text: str
    title: str
    relevant: bool
    group: str

    def content(self) -> str:
        """Title and text, as `rsrank_rag` reads them."""
        if self.title and not self.text.startswith(self.title):
            return f"{self.title}\n{self.text}"
        return self.text


@dataclass
class Example:
    """A query with its candidates.

    Attributes:
        query: Its text.
        passages: Its candidates.
        source: Name of the set.
        group: Entry of everyday, or real document: queries of one group share their passages.
    """

    query: str
    passages: list[Passage]
    source: str
    group: str


@dataclass
class Batch:
    """Queries, texts, and which text is of which list.

    Attributes:
        queries: Texts of the queries.
        clean: The queries as the teacher knows them; None for those that are changed too much.
        texts: Distinct texts.
        parts: For each text, its passages as the teacher knows them; several where it is joined.
        labels: For each query, text -> whether it is relevant, of the query's own list.
        groups: For each text, what its passages were cut from.
        sources: For each query, its set.
    """

    queries: list[str] = field(default_factory=list)
    clean: list[str | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    parts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[dict[int, bool]] = field(default_factory=list)
    groups: list[set[str]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def text(self, text: Text) -> int:
        """Position of a text; the text is added where it is new."""
        if text.text not in self.texts:
            self.texts.append(text.text)
            self.parts.append(text.parts)
            self.groups.append(set())
        place = self.texts.index(text.text)
        self.groups[place] |= text.groups
        return place


def without_typos(batch: Batch, lists: Sequence[int]) -> tuple[Batch, list[int]]:
    """Some lists of a batch with their queries as they were, and the positions of their texts."""
    read: set[int] = set()
    for number in lists:
        read |= batch.labels[number].keys()
    places = sorted(read)
    result = Batch()
    for place in places:
        result.texts.append(batch.texts[place])
        result.parts.append(batch.parts[place])
    for number in lists:
        result.queries.append(batch.clean[number] or batch.queries[number])
        labels = {}
        for place, relevant in batch.labels[number].items():
            labels[places.index(place)] = relevant
        result.labels.append(labels)
    return result, places


@dataclass
class Pool:
    """Everything that batches are drawn from, and the queries that validate.

    Attributes:
        training: Set -> examples.
        validation: Set -> examples that share no query and no relevant passage with training.
    """

    training: dict[str, list[Example]]
    validation: dict[str, list[Example]]

    @classmethod
    def of(cls, place: Path, manuals: Path | None = None) -> Pool:
        """The pool of a folder with training sets, or of a file that `pack` wrote.

        Args:
            place: Folder or file.
            manuals: Queries over manual pages (manuals.py), for a folder.
        """
        return unpack(place) if place.is_file() else from_sets(place, manuals)

    def titles(self) -> list[str]:
        """Titles of everyday's passages."""
        titles = {}
        for example in self.training[EVERYDAY]:
            for passage in example.passages:
                if passage.title:
                    titles[passage.title] = None
        return list(titles)

    def teacher_texts(self) -> list[str]:
        """What the teacher reads: queries and passages of everyday."""
        texts: dict[str, None] = {}
        for example in self.training[EVERYDAY]:
            texts[example.query] = None
            for passage in example.passages:
                texts[passage.content()] = None
        return list(texts)


def from_sets(folder: Path, manuals: Path | None) -> Pool:
    """The pool of a folder with training sets."""
    pool = Pool(defaultdict(list), defaultdict(list))
    for name in (EVERYDAY, REAL):
        for row in data.read(folder / f"{name}.jsonl.gz"):
            entry = row["id"].rpartition("-")[0]
            source = entry if name == EVERYDAY else row["of"]
            part = pool.validation if digest(source) < APART * 2**64 else pool.training
            part[name].append(example_of(row, name, entry))
    if manuals is not None:
        for line in manuals.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            part = pool.validation if row["of"] in MANUALS_APART else pool.training
            part[MANUALS].append(example_of(row, MANUALS, row["of"]))
    for name in (*data.SETS, *data.UNSEEN):
        texts = data.Texts()
        training, validation = data.load(folder, [name], texts)
        if name in data.SETS:
            random.Random(5).shuffle(training)
            training = training[:QUERIES_OF_SET]
            pool.training[name] = [public_example(example, texts) for example in training]
        pool.validation[name] = [public_example(example, texts) for example in validation]
    return pool


def pack(pool: Pool, path: Path, queries: int, passages: int) -> None:
    """Write the training part of a pool to one small file, for a machine without the sets.

    Args:
        pool: What is written.
        path: A JSON file, compressed by xz.
        queries: Most queries of a public set.
        passages: Most passages of a query of a public set; relevant ones come first.
    """
    table: dict[tuple[str, str, str], int] = {}
    examples = []
    for name, of_set in pool.training.items():
        public = name in data.SETS
        if public:
            of_set = of_set[:queries]
        for example in of_set:
            rows = example.passages
            if public:
                rows = sorted(rows, key=lambda passage: not passage.relevant)[:passages]
            places = []
            for passage in rows:
                key = (passage.text, passage.title, passage.group)
                places.append([table.setdefault(key, len(table)), passage.relevant])
            examples.append([name, example.query, example.group, places])
    with lzma.open(path, "wt", encoding="utf-8") as file:
        json.dump({"passages": list(table), "examples": examples}, file)


def unpack(path: Path) -> Pool:
    """What `pack` wrote; no query validates."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    pool = Pool(defaultdict(list), defaultdict(list))
    for name, query, group, places in content["examples"]:
        passages = []
        for place, relevant in places:
            text, title, origin = content["passages"][place]
            passages.append(Passage(text, title, relevant, origin))
        pool.training[name].append(Example(query, passages, name, group))
    return pool


def example_of(row: dict[str, Any], name: str, entry: str) -> Example:
    """A labelled row of typed queries. Queries of one real document have that document as group."""
    passages = []
    for document in row["documents"]:
        group = name
        if name == REAL:
            group = f"{name}/{document['id'].partition('#')[0]}"
        elif name == MANUALS:
            group = f"{name}/{entry}"
        title = document.get("title") or ""
        passages.append(Passage(document["text"], title, document["relevant"], group))
    if name == REAL:
        groups = [passage.group for passage in passages]
        entry = max(set(groups), key=groups.count)
    return Example(row["query"], passages, name, entry)


def public_example(example: data.Example, texts: data.Texts) -> Example:
    """An example of a public set."""
    passages = []
    for relevant, places in ((True, example.relevant), (False, example.others)):
        for place in places:
            text = texts.texts[place]
            bare = texts.texts[texts.bare.get(place, place)]
            title = text[: -len(bare)].strip() if bare != text else ""
            passages.append(Passage(bare, title, relevant, example.source))
    return Example(example.query, passages, example.source, example.source)


def digest(text: str) -> int:
    """A number below 2 ** 64 that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def typo(query: str, rng: random.Random, longest: bool = False) -> str:
    """The query with one mistake in a word of four letters or more.

    A letter is dropped, doubled, swapped with the next one, or replaced by its neighbour on the
    keyboard.
    """
    words = query.split()
    places = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if not places:
        return query
    place = max(places, key=lambda i: len(words[i])) if longest else rng.choice(places)
    word = words[place]
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        changed = word[:at] + word[at + 1 :]
    elif kind == 1:
        changed = word[:at] + word[at] + word[at:]
    elif kind == 2:
        changed = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    else:
        changed = word[:at] + neighbour(word[at], rng) + word[at + 1 :]
    words[place] = changed
    return " ".join(words)


def neighbour(letter: str, rng: random.Random) -> str:
    """A letter next to this one on an English keyboard."""
    for row in KEYBOARD:
        at = row.find(letter.lower())
        if at >= 0:
            return rng.choice(row[max(0, at - 1) : at] + row[at + 1 : at + 2])
    return rng.choice("aeiou")


class Sampler:
    """Batches as a function of the step alone, so that a resumed run sees the same batches.

    Args:
        pool: What batches are drawn from.
        config: The part ``batch`` of the configuration.
        seed: Of every choice.
        tokens: Number of tokens of a text.
        near: Cosine of two texts, None where it is unknown; the hardest passages come first.
    """

    def __init__(
        self,
        pool: Pool,
        config: Mapping[str, Any],
        seed: int,
        tokens: Callable[[str], int],
        near: Callable[[str, str], float | None],
    ) -> None:
        self.pool, self.config, self.seed = pool, config, seed
        self.tokens, self.near = tokens, near
        self.titles = pool.titles()
        self.documents: dict[str, list[Example]] = defaultdict(list)
        self.manuals: dict[str, list[Example]] = defaultdict(list)
        for example in pool.training[REAL]:
            self.documents[example.group].append(example)
        for example in pool.training[MANUALS]:
            group = f"{MANUALS}/{example.group}"
            copy = Example(example.query, example.passages, MANUALS, group)
            self.manuals[group].append(copy)
        self.sets = [name for name in config["public"] if pool.training[name]]
        self.shares = [config["public"][name] for name in self.sets]

    def __call__(self, step: int) -> Batch:
        """The batch of one step."""
        rng = random.Random(f"{self.seed}-{step}")
        batch, config = Batch(), self.config
        for example in rng.sample(self.pool.training[EVERYDAY], config["everyday"]):
            self.add(batch, example, rng, config["everyday_tokens"])
        for _ in range(config["documents"]):
            manual = self.manuals and rng.random() < config["manuals"]
            documents = self.manuals if manual else self.documents
            self.add_document(batch, documents[rng.choice(sorted(documents))], rng)
        for name in rng.choices(self.sets, self.shares, k=config["others"]):
            example = rng.choice(self.pool.training[name])
            self.add(batch, example, rng, config["others_tokens"])
        if rng.random() < config["greetings"]:
            self.add_greeting(batch, rng)
        return batch

    def add(self, batch: Batch, example: Example, rng: random.Random, budget: int) -> None:
        """Add one list with texts of its own."""
        query = example.query
        clean: str | None = example.query
        relevant = [passage for passage in example.passages if passage.relevant]
        rng.shuffle(relevant)
        relevant = relevant[: self.config["most_relevant"]]
        bare = rng.random() >= self.config["titled"]
        if example.source == EVERYDAY and relevant and rng.random() < self.config["title_query"]:
            title = relevant[0].title
            if title:
                query = title
                clean = None
                bare = True
                if rng.random() < 0.5:
                    query = title.lower()
        elif rng.random() < self.config["keywords"]:
            query = data.keywords(query)
        if relevant and rng.random() < self.config["unanswered"]:
            relevant = []
        passages = relevant + self.irrelevant(example, rng)
        join = rng.random() < self.config["joined"]
        if join:
            budget = 3 * budget // 2
        passages = self.within(passages, len(relevant), budget)
        rng.shuffle(passages)
        texts = self.texts_of(passages, bare, rng)
        if join:
            texts = self.joined(texts, rng)
        self.add_list(batch, self.typed(query, rng), clean, example.source, texts)

    def irrelevant(self, example: Example, rng: random.Random) -> list[Passage]:
        """Irrelevant passages: the nearest ones and random ones, by turns."""
        rest = [passage for passage in example.passages if not passage.relevant]
        rng.shuffle(rest)

        def distance(passage: Passage) -> float:
            return -(self.near(example.query, passage.content()) or 0.0)

        hardest = sorted(rest, key=distance)
        order: dict[int, Passage] = {}
        for first, second in zip(hardest, rest, strict=True):
            order.setdefault(id(first), first)
            if rng.random() < self.config["random_passages"]:
                order.setdefault(id(second), second)
        return list(order.values())

    def within(self, passages: list[Passage], least: int, budget: int) -> list[Passage]:
        """The first passages that keep within a number of tokens, at least ``least`` and three."""
        first = []
        for passage in passages:
            size = min(self.config["most_tokens"], self.tokens(passage.text))
            if len(first) >= least + 3 and size > budget:
                continue
            budget -= size
            first.append(passage)
        return first

    def add_document(self, batch: Batch, examples: Sequence[Example], rng: random.Random) -> None:
        """Add queries of one real document, which share its passages."""
        config = self.config
        examples = rng.sample(list(examples), min(config["document_queries"], len(examples)))
        bare = rng.random() >= config["titled"]
        texts = {}
        for passage in self.shared_passages(examples, rng):
            texts[passage.text] = self.texts_of([passage], bare, rng)[0]
        for example in examples:
            listed = []
            for passage in example.passages:
                if passage.text in texts:
                    text = texts[passage.text]
                    listed.append(Text(text.text, text.parts, passage.relevant, {passage.group}))
            if rng.random() < config["joined_document"]:
                listed = self.joined(listed, rng)
            query = example.query
            self.add_list(batch, self.typed(query, rng), query, example.source, listed)

    def shared_passages(self, examples: Sequence[Example], rng: random.Random) -> list[Passage]:
        """Relevant passages of queries of one document, then irrelevant ones of the document."""
        passages: dict[str, Passage] = {}
        for example in examples:
            for passage in example.passages:
                if passage.relevant:
                    passages.setdefault(passage.text, passage)
        for example in examples:
            own = [passage for passage in example.passages if passage.group == example.group]
            own = self.irrelevant(Example(example.query, own, example.source, example.group), rng)
            for passage in own[: self.config["document_passages"]]:
                if len(passages) < self.config["document_texts"]:
                    passages.setdefault(passage.text, passage)
        return list(passages.values())

    def add_greeting(self, batch: Batch, rng: random.Random) -> None:
        """Add a query that nothing answers, scored against texts of the batch."""
        query = rng.choice(data.GREETINGS)
        places = rng.sample(range(len(batch.texts)), min(8, len(batch.texts)))
        batch.queries.append(query)
        batch.clean.append(None)
        batch.sources.append("greetings")
        batch.labels.append(dict.fromkeys(places, False))

    def add_list(
        self, batch: Batch, query: str, clean: str | None, source: str, texts: Sequence[Text]
    ) -> None:
        """Add a query and its texts."""
        labels: dict[int, bool] = {}
        for text in texts:
            place = batch.text(text)
            labels[place] = labels.get(place, False) or text.relevant
        batch.queries.append(query)
        batch.clean.append(clean)
        batch.sources.append(source)
        batch.labels.append(labels)

    def typed(self, query: str, rng: random.Random) -> str:
        """The query as somebody types it: with typos, in lower case, without its question mark."""
        if rng.random() < self.config["typos"]:
            query = typo(query, rng, longest=rng.random() < 0.5)
            if rng.random() < self.config["second_typo"]:
                query = typo(query, rng)
        if rng.random() < self.config["lower"]:
            query = query.lower().rstrip("?.! ")
        return query or "?"

    def texts_of(self, passages: Sequence[Passage], bare: bool, rng: random.Random) -> list[Text]:
        """Passages as texts, with their titles, without, or with titles that are none.

        Some passages of everyday have no title. In lists with titles they get the title of another
        passage half of the time, so that a title says nothing about relevance.
        """
        junk = rng.random() < self.config["no_titles"]
        texts = []
        for passage in passages:
            text = passage.content()
            if bare:
                text = passage.text
            elif junk:
                text = f"{rng.choice(NO_TITLES)}\n{passage.text}"
            elif not passage.title and passage.group == EVERYDAY and rng.random() < 0.5:
                text = f"{rng.choice(self.titles)}\n{passage.text}"
            texts.append(Text(text, (passage.content(),), passage.relevant, {passage.group}))
        return texts

    def joined(self, texts: Sequence[Text], rng: random.Random) -> list[Text]:
        """The same texts, several of them in one, as a splitter with longer chunks cuts them."""
        size = rng.choice(self.config["join"])
        parts: list[list[Text]] = [[]]
        length = 0
        for text in texts:
            more = self.tokens(text.text)
            if parts[-1] and (len(parts[-1]) == size or length + more > self.config["most_tokens"]):
                parts.append([])
                length = 0
            parts[-1].append(text)
            length += more
        return list(map(merged, parts))


@dataclass
class Text:
    """A text of a list.

    Attributes:
        text: As it is read.
        parts: Its passages as the teacher knows them.
        relevant: Whether it answers the query.
        groups: What its passages were cut from.
    """

    text: str
    parts: tuple[str, ...]
    relevant: bool
    groups: set[str]


def merged(part: Sequence[Text]) -> Text:
    """Several texts as one."""
    if len(part) == 1:
        return part[0]
    contents: list[str] = []
    passages: list[str] = []
    groups: set[str] = set()
    relevant = False
    for text in part:
        contents.append(text.text)
        passages += text.parts
        groups |= text.groups
        relevant = relevant or text.relevant
    return Text("\n\n".join(contents), tuple(passages), relevant, groups)
