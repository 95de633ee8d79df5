"""Scored documents, sorted and cut: what `rank` returns, and how it is shown."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from ..errors import InputError, finite
from .parts import WHOLE, Excerpt, Reading, Window, joined

BLANK_SCORE = -10_000.0
"""Score of a document without text: below any other, so that whatever sorts by score puts it last.

Finite, because JSON has no infinity and other tools average or subtract; exact in float16. Scores
of RSRank lie within plus or minus layers x heads (288 for Qwen3-8B); those of other systems are
logits, cosines and probabilities.
"""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """One document with its score, on the reranker's own scale.

    Attributes:
        index: Position in the list that was ranked.
        text: The document.
        score: The score; that of the best sentence or window if the document was read in such.
        truncated: Whether the model did not read all of it, because it was too long.
        window: The best window; None for a document that fits.
        excerpts: The sentences that are kept, in their order.
        heading: The document's first line, if it is a heading that is kept with the sentences.
    """

    index: int
    text: str
    score: float
    truncated: bool = False
    window: Window | None = None
    excerpts: tuple[Excerpt, ...] = ()
    heading: str = ""

    @property
    def extract(self) -> str:
        """The heading and the sentences that are kept; the whole text without ``excerpts``."""
        if not self.excerpts:
            return self.text
        return self.heading + joined(self.text, self.excerpts)


@dataclass(frozen=True, slots=True)
class Scored:
    """A document's score and how it was read; see `RankedDocument`.

    Attributes:
        score: The score.
        truncated: Whether its end was not read.
        tokens: Tokens read of query, document and prompt; 0 if the reranker does not count them.
        window: The best window.
        sentences: All its sentences, if they were scored.
    """

    score: float
    truncated: bool = False
    tokens: int = 0
    window: Window | None = None
    sentences: tuple[Excerpt, ...] = ()


@dataclass(frozen=True, slots=True)
class RankResult:
    """All documents of one query, best first: each is either in ``kept`` or in ``dropped``.

    Its length, iteration and indices are those of ``kept``: a result that kept nothing is false.

    Attributes:
        query: The query.
        threshold: Documents had to score above this to be kept; None when only ranked.
        kept: Documents to pass on.
        dropped: The others.
        query_truncated: Whether only the first and the last part of the query were read.
    """

    query: str
    threshold: float | None
    kept: tuple[RankedDocument, ...]
    dropped: tuple[RankedDocument, ...]
    query_truncated: bool = field(default=False, kw_only=True)

    @property
    def texts(self) -> list[str]:
        """Texts of the kept documents, best first, or of their sentences that are kept."""
        return [document.extract for document in self.kept]

    @property
    def in_order(self) -> list[RankedDocument]:
        """All documents, kept or dropped, in the order in which they were passed to `rank`."""
        return sorted((*self.kept, *self.dropped), key=attrgetter("index"))

    @property
    def best_score(self) -> float | None:
        """The highest score of a document with text; None if there is no such document."""
        documents = self.kept or self.dropped
        if not documents or not documents[0].text.strip():
            return None
        return documents[0].score

    @property
    def none_relevant(self) -> bool:
        """Whether no document scored above the threshold, even if ``min_docs`` kept some.

        When only ranked (``threshold`` None), true only if no document has text.
        """
        return self.best_score is None or not passes(self.best_score, self.threshold)

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[RankedDocument]:
        return iter(self.kept)

    def __getitem__(self, place: Any) -> Any:
        return self.kept[place]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, numbers and texts: what ``rsrank rank --json`` prints."""
        return asdict(self)

    def __str__(self) -> str:
        rule = "ranked only"
        if self.threshold is not None:
            rule = f"threshold {self.threshold:g}"
        below = sum(not passes(document.score, self.threshold) for document in self.kept)
        if below:
            rule += f", min_docs kept {below}"
        above = sum(passes(document.score, self.threshold) for document in self.dropped)
        if above:
            rule += f", top_n dropped {above}"
        if self.query_truncated:
            rule += ", query truncated"
        lines = [f"{self.query!r}: {len(self.kept)} kept, {len(self.dropped)} dropped ({rule})"]
        for place, document in enumerate(self.kept + self.dropped):
            mark = "+" if place < len(self.kept) else "-"
            text = " ".join(document.extract.split())
            if len(text) > 88:
                text = text[:87] + "…"
            if document.truncated:
                text += " (truncated)"
            lines.append(f"{mark} {document.score:+8.2f}  [{document.index}] {text}")
        return "\n".join(lines)


def passes(score: float, threshold: float | None) -> bool:
    """Whether a score is above a threshold. `BLANK_SCORE` passes no threshold but None."""
    return threshold is None or (score > threshold and score != BLANK_SCORE)


def choose(
    query: str,
    documents: Sequence[str],
    scored: Sequence[Scored],
    threshold: float | None,
    *,
    top_n: int | None = None,
    min_docs: int = 0,
    reading: Reading = WHOLE,
    query_truncated: bool = False,
) -> RankResult:
    """Sort scored documents and keep the relevant ones, as `Reranker.rank` says.

    Raises:
        InputError: There are more or fewer scores than documents.
        ScoringError: A document has no finite score; its position is given.
    """
    ranked = []
    for index, one in enumerate(blanks_last(documents, scored)):
        score = finite(float(one.score), index)
        ranked.append(RankedDocument(index, documents[index], score, one.truncated, one.window))
    # Blank documents are last even if a reranker gives lower scores. Equal scores keep their order.
    ranked.sort(key=lambda document: (document.score == BLANK_SCORE, -document.score))
    relevant = sum(passes(document.score, threshold) for document in ranked)
    count = max(relevant, min(min_docs, len(ranked)))
    if top_n is not None:
        count = min(count, top_n)
    kept = ranked[:count]
    if reading.extract:
        kept = [
            _with_excerpts(document, scored[document.index].sentences, threshold, reading)
            for document in kept
        ]
    return RankResult(
        query, threshold, tuple(kept), tuple(ranked[count:]), query_truncated=query_truncated
    )


def _with_excerpts(
    document: RankedDocument,
    sentences: Sequence[Excerpt],
    threshold: float | None,
    reading: Reading,
) -> RankedDocument:
    """A kept document with its relevant sentences: at least the best, even below the threshold."""
    hits: list[float] = []
    for place, sentence in enumerate(sentences):
        if passes(sentence.score, threshold) or sentence.score == document.score:
            hits.append(place)
    hits.append(math.inf)
    kept = []
    for place, sentence in enumerate(sentences):
        nearest_hit = hits[bisect_left(hits, place - reading.context)]
        if nearest_hit <= place + reading.context:
            kept.append(sentence)
    return replace(document, excerpts=tuple(kept), heading=reading.heading_of(document.text))


def blanks_last(documents: Sequence[str], scored: Sequence[Scored]) -> list[Scored]:
    """The same scores, with `BLANK_SCORE` for documents of nothing but white space.

    Raises:
        InputError: There are more or fewer scores than documents.
    """
    if len(scored) != len(documents):
        raise InputError(f"The reranker gave {len(scored)} scores for {len(documents)} documents.")
    marked = []
    for text, one in zip(documents, scored, strict=True):
        if not text.strip():
            one = replace(one, score=BLANK_SCORE)
        marked.append(one)
    return marked
