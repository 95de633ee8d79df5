"""Labelled sets: rows, and which of their queries validate.

Validation queries come from the training files. They share no question and no relevant passage with
the training queries.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SETS = (
    "hotpotqa.sentence",
    "hotpotqa.paragraph",
    "2wiki.sentence",
    "2wiki.paragraph",
    "musique.paragraph",
    "squad.sentence",
    "squad.paragraph",
    "nq.paragraph",
    "qed.sentence",
    "bioasq.snippet",
    "medquad.paragraph",
    "pubmedqa.paragraph",
    "covidqa.paragraph",
    "fm2.sentence",
    "entailmentbank.sentence",
    "selqa.sentence",
)
"""Public sets whose licences allow weights to ship: CC BY, CC BY-SA, Apache-2.0, MIT."""
EVERYDAY, REAL, MANUALS = "everyday.passage", "realdocs.passage", "manuals.passage"
"""Typed queries over short passages, over real documents, and over manual pages."""
UNSEEN = ("scifact.sentence", "scifact", "fiqa", "nfcorpus")
"""Sets for validation only: their licences do not allow weights trained on them to ship."""
VALIDATION = 60
"""Validation queries of a public set, at most a quarter of its queries."""

_FILLER = frozenset(
    """
    a an and are as at be been by can could did do does for from had has have how in is it its
    many much of on or than that the their there these they this to was were what when where
    which who whom whose why will with would about after all also any because before being
    between both but each he her his if into more most no not only other our over she so some
    such them then through under up very we you your i my me
    """.split()  # noqa: SIM905
)
GREETINGS = (
    "Hello", "hi", "Hey there", "hi there!", "Good morning", "good evening everyone", "thanks",
    "Thank you very much!", "How are you?", "how are you doing today", "What's up?", "bye",
    "Goodbye, see you tomorrow", "ok", "yes please", "no", "Nice to meet you", "who are you",
    "what can you do", "can you help me", "Tell me a joke", "lol", "test", "asdf", "please help",
    "What is your name?", "sounds good", "I see", "cool", "never mind", "Could you repeat that?",
    "happy birthday", "welcome back", "good night", "sorry", "I love you", "are you a robot",
    "what time is it now", "what should I cook tonight", "write me a poem",
    "translate this into French", "play some music", "set an alarm for 7",
    "what is the weather like today", "call my mum", "how do I reset my password",
    "book a table for two", "show me my invoices", "python list comprehension example",
    "restart the router", "best laptop under 500", "unsubscribe", "open the settings",
    "where is my parcel", "cancel my subscription", "what is 2 + 2",
)  # fmt: skip


@dataclass
class Example:
    """A query and its candidates, as positions in the table of texts.

    Attributes:
        query: Text of the query.
        relevant: Relevant documents.
        others: Irrelevant ones of the set itself.
        source: Name of the set.
    """

    query: str
    relevant: list[int]
    others: list[int]
    source: str = ""


class Texts:
    """Distinct texts and, for those with a separate title, the variant without it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.bare: dict[int, int] = {}
        self._place: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Position of a text; it is added where it is new."""
        place = self._place.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def read(path: Path) -> list[dict]:
    """Rows of a gzipped JSON-lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def normal(text: str) -> str:
    """Letters and digits in lower case: for comparing texts."""
    return " ".join(re.findall(r"\w+", text.lower()))


def content(document: dict) -> str:
    """Title, where there is one and the text does not start with it, then the text."""
    title = document.get("title")
    text = document["text"]
    if title and not text.startswith(title):
        return f"{title}\n{text}"
    return text


def _order(row: dict) -> str:
    """A hash of the question: rows sorted by it are in a random order that never changes."""
    return hashlib.sha256(normal(row["query"]).encode()).hexdigest()


def _is_apart(row: dict, questions: set[str], passages: set[str]) -> bool:
    """Whether neither the question nor a relevant passage is one of these."""
    if normal(row["query"]) in questions:
        return False
    for document in row["documents"]:
        if document["relevant"] and normal(document["text"]) in passages:
            return False
    return True


def load(folder: Path, names: Sequence[str], texts: Texts) -> tuple[list[Example], list[Example]]:
    """Training and validation examples: no question and no relevant passage is in both."""
    rows = {name: read(folder / f"{name}.jsonl.gz") for name in names}
    validating: set[int] = set()
    questions: set[str] = set()
    passages: set[str] = set()
    for of_set in rows.values():
        for row in sorted(of_set, key=_order)[: min(VALIDATION, len(of_set) // 4)]:
            validating.add(id(row))
            questions.add(normal(row["query"]))
            for document in row["documents"]:
                if document["relevant"]:
                    passages.add(normal(document["text"]))
                    passages.add(normal(content(document)))
    training = []
    validation = []
    for name, of_set in rows.items():
        for row in of_set:
            example = _example_of(row, name, texts)
            if id(row) in validating:
                validation.append(example)
            elif _is_apart(row, questions, passages):
                training.append(example)
    return training, validation


def _example_of(row: dict, name: str, texts: Texts) -> Example:
    """The example of a row; its texts are added to the table."""
    example = Example(row["query"], [], [], source=name)
    for document in row["documents"]:
        place = texts.add(content(document))
        if content(document) != document["text"]:
            texts.bare[place] = texts.add(document["text"])
        if document["relevant"]:
            example.relevant.append(place)
        else:
            example.others.append(place)
    return example


def keywords(query: str) -> str:
    """Content words only; the query itself if fewer than two are left."""
    words = [word for word in re.findall(r"[\w'-]+", query) if word.lower() not in _FILLER]
    if len(words) < 2:
        return query
    return " ".join(words)
