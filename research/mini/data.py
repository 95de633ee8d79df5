"""Labelled sets: rows, and which of their queries validate.

Validation queries are cut from the training files. They share no question and no relevant passage
with what is trained on.
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
    title, text = document.get("title"), document["text"]
    return f"{title}\n{text}" if title and not text.startswith(title) else text


def load(folder: Path, names: Sequence[str], texts: Texts) -> tuple[list[Example], list[Example]]:
    """Training and validation examples: no question and no relevant passage is in both."""
    rows = {name: read(folder / f"{name}.jsonl.gz") for name in names}
    kept_apart: dict[str, list[dict]] = {}
    questions: set[str] = set()
    passages: set[str] = set()
    for name, of_set in rows.items():
        by_hash = sorted(
            of_set, key=lambda row: hashlib.sha256(normal(row["query"]).encode()).hexdigest()
        )
        kept_apart[name] = by_hash[: min(VALIDATION, len(by_hash) // 4)]
        questions |= {normal(row["query"]) for row in kept_apart[name]}
        passages |= {
            normal(d["text"]) for row in kept_apart[name] for d in row["documents"] if d["relevant"]
        }
        passages |= {
            normal(content(d))
            for row in kept_apart[name]
            for d in row["documents"]
            if d["relevant"]
        }
    training, validation = [], []
    for name, of_set in rows.items():
        apart = {id(row) for row in kept_apart[name]}
        for row in of_set:
            example = Example(row["query"], [], [], source=name)
            for document in row["documents"]:
                place = texts.add(content(document))
                if content(document) != document["text"]:
                    texts.bare[place] = texts.add(document["text"])
                (example.relevant if document["relevant"] else example.others).append(place)
            if id(row) in apart:
                validation.append(example)
            elif normal(row["query"]) not in questions and not any(
                normal(d["text"]) in passages for d in row["documents"] if d["relevant"]
            ):
                training.append(example)
    return training, validation


def keywords(query: str) -> str:
    """Content words only; the query itself if fewer than two are left."""
    words = [word for word in re.findall(r"[\w'-]+", query) if word.lower() not in _FILLER]
    return " ".join(words) if len(words) > 1 else query
