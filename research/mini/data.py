"""Training examples for `mini`: labelled sets, hard negatives, and short queries.

Everything is cut from the labelled sets by `prepare`: validation queries that share no question and
no relevant passage with what is trained on, negatives mined by the encoder's own cosine and by
BM25, one-word and keyword queries, statements, and greetings that nothing answers.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

# Share of the training queries. Only sets whose licences allow shipping: CC BY, CC BY-SA, Apache,
# MIT.
SETS: dict[str, float] = {
    "hotpotqa.sentence": 0.13,
    "hotpotqa.paragraph": 0.12,
    "2wiki.sentence": 0.10,
    "2wiki.paragraph": 0.06,
    "musique.paragraph": 0.03,
    "squad.sentence": 0.08,
    "squad.paragraph": 0.05,
    "nq.paragraph": 0.08,
    "qed.sentence": 0.05,
    "bioasq.snippet": 0.07,
    "medquad.paragraph": 0.05,
    "pubmedqa.paragraph": 0.04,
    "covidqa.paragraph": 0.04,
    "fm2.sentence": 0.06,
    "entailmentbank.sentence": 0.04,
}
REAL = "realdocs.passage"
"""Typed queries over real documents, the second stage's main set (typed.py)."""
UNSEEN = ("scifact.sentence", "scifact", "fiqa", "nfcorpus")
"""Sets for validation only: their licences do not allow weights trained on them to ship."""
MADE: dict[str, float] = {"words": 0.07, "statements": 0.05, "greetings": 0.02}
"""Sets made here, in addition to the shares above."""

MINED = frozenset(
    {
        "squad.sentence",
        "squad.paragraph",
        "nq.paragraph",
        "bioasq.snippet",
        "medquad.paragraph",
        "pubmedqa.paragraph",
    }
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "multihop": ("hotpotqa", "2wiki", "musique"),
    "wiki": ("squad", "nq", "qed"),
    "bio": ("bioasq", "medquad", "pubmedqa", "covidqa"),
    "claims": ("fm2", "entailmentbank"),
}
VALIDATION = 60
MOST_QUERIES = {
    "medquad.paragraph": 600,
    "hotpotqa.paragraph": 700,
    "squad.sentence": 2500,
    "squad.paragraph": 1200,
    "nq.paragraph": 1500,
    "bioasq.snippet": 1500,
    "covidqa.paragraph": 500,
    "pubmedqa.paragraph": 450,
}
"""Training queries taken of the larger sets: their passages have to be run and kept."""

TITLED = 0.75
KEYWORDS = 0.12
UNANSWERED = 0.12
QUOTED = 0.15
"""Share of queries that are replaced by a sentence of one of their passages."""
MOST_RELEVANT = 6
SORTED = 4
"""Batches drawn together and cut by length of the query: padding costs time."""

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
        mined: Irrelevant ones found by similarity.
        source: Name of the set.
    """

    query: str
    relevant: list[int]
    others: list[int]
    mined: list[int] = field(default_factory=list)
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


def capped(examples: Sequence[Example]) -> list[Example]:
    """At most so many of each set as `MOST_QUERIES` says."""
    rng = random.Random(1)
    kept = []
    for name in SETS:
        of_set = [example for example in examples if example.source == name]
        most = MOST_QUERIES.get(name, len(of_set))
        kept += rng.sample(of_set, most) if len(of_set) > most else of_set
    return kept


def cut(length: int, most: int, longer: int) -> int:
    """Tokens that are kept of a passage with ``length`` tokens: long ones get the tighter limit."""
    return longer if length > longer + 2 else most


def without(examples: Sequence[Example], names: Sequence[str]) -> list[Example]:
    """Examples that are neither of these sets nor made of their passages."""
    if not names:
        return list(examples)
    kept = {
        p
        for e in examples
        if e.source in SETS and e.source not in names
        for p in (*e.relevant, *e.others)
    }
    return [
        e
        for e in examples
        if e.source not in names and (e.source in SETS or all(p in kept for p in e.others[:5]))
    ]


def answers(examples: Sequence[Example], texts: Texts) -> dict[str, set[int]]:
    """Question, also as keywords -> every passage labelled as relevant to it, in any set."""
    found: dict[str, set[int]] = defaultdict(set)
    for example in examples:
        if example.source in SETS:
            relevant = {
                *example.relevant,
                *(texts.bare[p] for p in example.relevant if p in texts.bare),
            }
            found[example.query] |= relevant
            found[keywords(example.query)] |= relevant
    return found


def shares_word(query: str, text: str) -> bool:
    """Whether a passage holds a word of the query."""
    return any(word in text.lower() for word in query.lower().split())


def keywords(query: str) -> str:
    """Content words only; the query itself if fewer than two are left."""
    words = [word for word in re.findall(r"[\w'-]+", query) if word.lower() not in _FILLER]
    return " ".join(words) if len(words) > 1 else query


def sentences(text: str) -> list[str]:
    """Sentences of a passage, roughly."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)


def statements(examples: Sequence[Example], texts: Texts, count: int, seed: int) -> list[Example]:
    """Sentences as queries, each for the passage it was cut out of."""
    rng = random.Random(f"statements-{seed}")
    pools = [e for e in examples if e.source.endswith("paragraph")]
    made: list[Example] = []
    for example in rng.sample(pools, min(len(pools), 3 * count)):
        if not example.relevant or len(made) == count:
            continue
        chosen = rng.choice(example.relevant)
        title, line, body = texts.texts[chosen].partition("\n")
        if not line:
            title, body = "", title
        parts = sentences(body)
        long = [i for i, part in enumerate(parts) if 6 <= len(part.split()) <= 35]
        if len(parts) < 4 or not long:
            continue
        cut = rng.choice(long)
        rest = texts.add(title + line + " ".join(parts[:cut] + parts[cut + 1 :]))
        others = [place for place in example.others if place not in example.relevant]
        made.append(
            Example(
                parts[cut], [rest], others, [p for p in example.mined if p != chosen], "statements"
            )
        )
    return made


def words(examples: Sequence[Example], texts: Texts, count: int, seed: int) -> list[Example]:
    """One word, or two to four, of a passage as the query; none of the others holds them all."""
    rng = random.Random(f"words-{seed}")
    frequency: Counter[str] = Counter()
    for text in texts.texts:
        frequency.update(set(re.findall(r"[a-z][a-z'-]+", text.lower())))
    made: list[Example] = []
    for example in rng.sample(list(examples), min(len(examples), 3 * count)):
        if not example.relevant or len(made) == count:
            continue
        chosen = rng.choice(example.relevant)
        body = texts.texts[chosen]
        found = [
            w
            for w in dict.fromkeys(re.findall(r"[A-Za-z][A-Za-z'-]+", body))
            if len(w) > 3 and w.lower() not in _FILLER
        ]
        rare = [w for w in found if 2 <= frequency[w.lower()] <= 600]
        if len(rare) < 3:
            continue
        size = rng.choice((1, 1, 1, 2, 2, 3, 4))
        picked = rng.sample(rare, min(size, len(rare)))
        if size > 1 and rng.random() < 0.5:  # words that stand near each other
            start = rng.randrange(max(1, len(rare) - size))
            picked = rare[start : start + size]
        title = body.partition("\n")[0]
        if rng.random() < 0.2 and "\n" in body and len(title.split()) <= 5:
            picked = title.split()
        stems = [w.lower()[: max(4, len(w) - 2)] for w in picked]
        pool = dict.fromkeys([*example.relevant, *example.others, *example.mined])
        held = {
            p: sum(stem in texts.texts[p].lower() for stem in stems) for p in pool if p != chosen
        }
        others = [p for p, count in held.items() if count == 0]
        partly = [p for p, count in held.items() if 0 < count < len(stems)]
        if len(others) < 5:
            continue
        text = " ".join(picked)
        made.append(
            Example(
                text.lower() if rng.random() < 0.6 else text, [chosen], others, partly[:3], "words"
            )
        )
    return made


def greetings(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """What nothing answers: greetings, commands, small talk."""
    rng = random.Random(f"greetings-{seed}")
    made = []
    for example in rng.choices(list(examples), k=count):
        query = rng.choice(GREETINGS)
        query = query.lower() if rng.random() < 0.3 else query
        made.append(Example(query, [], [*example.relevant, *example.others], [], "greetings"))
    return made


def bm25(queries: Sequence[str], documents: Sequence[str], best: int) -> list[list[int]]:
    """Positions of the best documents by Okapi BM25, for each query."""
    tokens = [
        Counter(w for w in re.findall(r"\w+", text.lower()) if w not in _FILLER)
        for text in documents
    ]
    mean = sum(sum(t.values()) for t in tokens) / max(len(tokens), 1)
    postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for place, counts in enumerate(tokens):
        norm = 1.2 * (0.25 + 0.75 * sum(counts.values()) / mean)
        for word, n in counts.items():
            postings[word].append((place, n * 2.2 / (n + norm)))
    found = []
    for query in queries:
        scores: Counter[int] = Counter()
        for word in set(re.findall(r"\w+", query.lower())) - _FILLER:
            hits = postings.get(word, ())
            idf = math.log(1 + (len(documents) - len(hits) + 0.5) / (len(hits) + 0.5))
            for place, weight in hits:
                scores[place] += idf * weight
        found.append([place for place, _ in scores.most_common(best)])
    return found


def mine(
    examples: Sequence[Example],
    texts: Texts,
    embed: Callable[[Iterable[str]], Tensor],
    embedded: Tensor,
) -> None:
    """Add similar but irrelevant passages of each query's own set, by cosine and by BM25.

    What is nearly as near as the relevant ones may be relevant as well, though nobody said so: it
    is left out.
    """
    for name in sorted(MINED & {example.source for example in examples}):
        of_set = [example for example in examples if example.source == name]
        pool = sorted(
            {place for example in of_set for place in (*example.relevant, *example.others)}
        )
        keys = embedded[pool]
        similar = embed([example.query for example in of_set]) @ keys.T
        lexical = bm25(
            [example.query for example in of_set], [texts.texts[place] for place in pool], 12
        )
        row_of = {place: row for row, place in enumerate(pool)}
        bodies = [normal(texts.texts[place]) for place in pool]
        for number, example in enumerate(of_set):
            wanted = [bodies[row_of[place]] for place in example.relevant]
            best = (
                max(float(similar[number, row_of[place]]) for place in example.relevant)
                if example.relevant
                else 0.0
            )
            near = similar[number].topk(min(30, len(pool))).indices.tolist()
            candidates = dict.fromkeys([*near[1:], *lexical[number][:6]])
            example.mined = [
                pool[row]
                for row in candidates
                if pool[row] not in example.relevant
                and float(similar[number, row]) < 0.92 * best
                and not any(body in bodies[row] or bodies[row] in body for body in wanted)
            ][:16]


@dataclass
class Chosen:
    """One query of a batch, with its documents and labels."""

    query: str
    documents: list[int]
    relevant: list[bool]
    source: str


class Sampler:
    """Batches as a function of the step alone, so that a resumed run sees the same batches.

    Args:
        examples: Training examples of all sets.
        texts: Their texts.
        lengths: Tokens of each text.
        seed: Of every choice.
        queries: Queries a batch.
        budget: Document tokens a query may bring.
        shares: Set -> share.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        texts: Texts,
        lengths: Sequence[int],
        seed: int,
        queries: int,
        budget: int,
        shares: dict[str, float],
    ) -> None:
        self.by_set: dict[str, list[Example]] = defaultdict(list)
        for example in examples:
            self.by_set[example.source].append(example)
        self.names = [name for name in shares if self.by_set[name]]
        self.shares = [shares[name] for name in self.names]
        self.texts, self.lengths, self.seed, self.queries, self.budget = (
            texts,
            lengths,
            seed,
            queries,
            budget,
        )
        self._order: dict[tuple[str, int], list[int]] = {}

    def __call__(self, step: int) -> list[Chosen]:
        """The batch of one step."""
        rng = random.Random(f"{self.seed}-{step // SORTED}")
        names = rng.choices(self.names, self.shares, k=SORTED * self.queries)
        chosen = [self.choose(rng.choice(self.by_set[name]), rng) for name in names]
        chosen.sort(key=lambda one: len(one.query))
        order = rng.sample(range(SORTED), SORTED)
        start = order[step % SORTED] * self.queries
        return chosen[start : start + self.queries]

    def quoted(self, example: Example, rng: random.Random) -> Example:
        """The same passages, and a sentence of one of them as the query if there is one."""
        places = [*example.relevant, *example.others, *example.mined]
        for place in rng.sample(places, min(4, len(places))):
            parts = sentences(self.texts.texts[place].partition("\n")[2] or self.texts.texts[place])
            long = [part for part in parts if 6 <= len(part.split()) <= 35]
            if len(parts) > 2 and long:
                return Example(
                    rng.choice(long), [place], [p for p in places if p != place], [], "quoted"
                )
        return example

    def choose(self, example: Example, rng: random.Random) -> Chosen:
        """Documents for a query, within the budget: relevant ones, mined ones, the set's own."""
        query = example.query
        if example.source not in MADE and rng.random() < QUOTED:
            example = self.quoted(example, rng)
            query = example.query
        elif example.source not in MADE and rng.random() < KEYWORDS:
            query = keywords(query)
        titled = rng.random() < TITLED
        relevant = rng.sample(example.relevant, min(MOST_RELEVANT, len(example.relevant)))
        if rng.random() < UNANSWERED and example.source != "words":
            relevant = []
        mined = rng.sample(example.mined, min(rng.choice((0, 3, 6, 9)), len(example.mined)))
        others = rng.sample(example.others, len(example.others))
        documents, labels, left = [], [], self.budget
        for label, places in ((True, relevant), (False, mined), (False, others)):
            for place in places:
                place = place if titled else self.texts.bare.get(place, place)
                if place in documents or (left < self.lengths[place] and len(documents) > 3):
                    continue
                documents.append(place)
                labels.append(label)
                left -= self.lengths[place]
        return Chosen(query, documents, labels, example.source)
