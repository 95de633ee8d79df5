"""Training batches for `mini`: a few queries of mixed sets, with all their documents scored against all of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from rsrank_rag.evaluation.datasets import read_labelled

# Share of the queries, and irrelevant documents taken of each query's own. Only sets under CC BY, CC BY-SA and
# Apache licences: the weights ship inside the package.
SETS: dict[str, tuple[float, int]] = {
    "hotpotqa.sentence": (0.15, 16),
    "2wiki.sentence": (0.12, 16),
    "hotpotqa.paragraph": (0.14, 8),
    "2wiki.paragraph": (0.06, 8),
    "musique.paragraph": (0.05, 10),
    "squad.sentence": (0.15, 6),
    "squad.paragraph": (0.06, 5),
    "nq.paragraph": (0.12, 5),
    "bioasq.snippet": (0.15, 6),
}
TITLED = 0.7  # share of queries whose documents start with their page title
KEYWORDS = 0.15  # share of queries reduced to their content words, as people type them into a search box
MOST_RELEVANT = 3
_FILLER = frozenset(
    """
    a an and are as at be been by can could did do does for from had has have how in is it its many much of on or than
    that the their there these they this to was were what when where which who whom whose why will with would
    """.split()  # noqa: SIM905 - a word a string would take fifty lines
)


@dataclass(frozen=True)
class Batch:
    """Queries and documents of one step.

    Attributes:
        queries: M queries.
        documents: N documents of all queries.
        own: For each query, the half-open range of its own documents.
        relevant: For each query, its N labels; other queries' documents are irrelevant unless they repeat its own.
        oracle: The first query's relevant documents, joined.
    """

    queries: list[str]
    documents: list[str]
    own: list[tuple[int, int]]
    relevant: list[list[bool]]
    oracle: str


def keywords(query: str) -> str:
    """Content words only; the query itself if fewer than two are left."""
    words = [word for word in re.findall(r"[\w'-]+", query) if word.lower() not in _FILLER]
    return " ".join(words) if len(words) > 1 else query


def statement(text: str, rng: random.Random) -> tuple[str, str] | None:
    """A sentence of a passage, to serve as a query, and the passage without it; None if it has too few."""
    title, line, body = text.rpartition("\n")
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", body)
    long = [i for i, sentence in enumerate(sentences) if 5 <= len(sentence.split()) <= 40]
    if len(sentences) < 3 or not long:
        return None
    chosen = rng.choice(long)
    return sentences[chosen], title + line + " ".join(sentences[:chosen] + sentences[chosen + 1 :])


class Batches:
    """Batches as a function of the step alone, so that a resumed run sees what an unbroken one would have seen.

    Args:
        folder: The training sets.
        seed: Of every choice.
        queries: Queries a batch.
        statements: Share of the queries replaced by a sentence of one of their relevant passages, which is then
            searched for without it: declarative queries, as in fact checking.
    """

    def __init__(self, folder: Path, seed: int, queries: int, statements: float = 0.0) -> None:
        self.sets = {name: read_labelled(folder / f"{name}.jsonl.gz") for name in SETS}
        self.seed, self.queries, self.statements = seed, queries, statements

    def __call__(self, step: int) -> Batch:
        """The batch of one step."""
        rng = random.Random(f"{self.seed}-{step}")
        shares = [share for share, _ in SETS.values()]
        # Two queries a set: their documents are hard enough for each other to teach something.
        names = [name for name in rng.choices(list(SETS), shares, k=self.queries // 2) for _ in range(2)]
        queries, documents, own, gold = [], [], [], []
        for name in names:
            row = rng.choice(self.sets[name])
            titled = rng.random() < TITLED
            relevant = [document for document in row.documents if document.relevant]
            others = [document for document in row.documents if not document.relevant]
            chosen = rng.sample(relevant, min(MOST_RELEVANT, len(relevant)))
            negatives = rng.sample(others, min(SETS[name][1], len(others)))
            texts = [document.content(titles=titled) for document in chosen]
            query = keywords(row.query) if rng.random() < KEYWORDS else row.query
            wanted = {document.content(titles=titles) for document in relevant for titles in (True, False)}
            if self.statements and rng.random() < self.statements and (split := statement(texts[0], rng)):
                query, rest = split
                wanted |= {rest}
                texts = [rest]
            texts += [document.content(titles=titled) for document in negatives]
            queries.append(query)
            own.append((len(documents), len(documents) + len(texts)))
            documents += texts
            gold.append(wanted)
        labels = [[text in wanted for text in documents] for wanted in gold]
        first = [text for text, label in zip(documents[: own[0][1]], labels[0], strict=False) if label]
        return Batch(queries, documents, own, labels, "\n".join(first))
