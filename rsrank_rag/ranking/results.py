"""Scored documents, sorted and cut: what `rank` returns, and how it is shown."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from typing_extensions import Self

from ..errors import InputError, finite
from ..reading.documents import InputDocument
from ..reading.parts import WHOLE, Excerpt, Reading, Window, joined
from .notebook import result_html
from .rule import BLANK_SCORE, Bar, Rule, best_first, passes


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
        weak: Whether the fallback kept it: no document of the list scored above the threshold.
        id: The document's id, if it came with one.
        metadata: The document's metadata, if it came with some.
    """

    index: int
    text: str
    score: float
    truncated: bool = False
    window: Window | None = None
    excerpts: tuple[Excerpt, ...] = ()
    weak: bool = False
    id: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def extract(self) -> str:
        """The sentences that are kept; the whole text without ``excerpts``."""
        return joined(self.text, self.excerpts) if self.excerpts else self.text


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
        rule: The rule that decided which documents are kept.
        kept: Documents to pass on.
        dropped: The others.
        query_truncated: Whether only the first and the last part of the query were read.
        blank_score: The score of documents without text.
    """

    query: str
    rule: Rule
    kept: tuple[RankedDocument, ...]
    dropped: tuple[RankedDocument, ...]
    query_truncated: bool = field(default=False, kw_only=True)
    blank_score: float = field(default=BLANK_SCORE, kw_only=True)

    @property
    def threshold(self) -> float | None:
        """Documents that score above it are relevant; None when only ranked."""
        return self.rule.threshold

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
        if not documents or documents[0].score == self.blank_score:
            return None
        return documents[0].score

    @property
    def none_relevant(self) -> bool:
        """Whether no document scored above the threshold, even if the fallback kept some.

        When only ranked (``threshold`` None), true only if no document has text.
        """
        return self.best_score is None or not passes(self.best_score, self.threshold)

    def normalised(self, native: float | None) -> Self:
        """This result with scores between 0 and 1; see `normalise`. Other limits stay raw.

        Args:
            native: The reranker's own threshold.
        """
        threshold = self.threshold
        if threshold is not None:
            threshold = normalise(threshold, native)
        return replace(
            self,
            rule=replace(self.rule, threshold=threshold),
            blank_score=normalise(self.blank_score, native),
            kept=tuple(_normalised(document, native) for document in self.kept),
            dropped=tuple(_normalised(document, native) for document in self.dropped),
        )

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[RankedDocument]:
        return iter(self.kept)

    def __getitem__(self, place: Any) -> Any:
        return self.kept[place]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, numbers and texts: what ``rsrank rank --json`` prints."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """The query, how many documents are kept, and by which rule."""
        rule = "ranked only"
        if self.threshold is not None:
            rule = f"threshold {self.threshold:g}"
        elif self.dropped:
            rule = str(self.rule)
        if self.kept and self.kept[0].weak:
            rule += f", the fallback kept {len(self.kept)}"
        elif self.threshold is not None:
            above = sum(passes(document.score, self.threshold) for document in self.dropped)
            if above:
                rule += f", {above} above it dropped"
        if self.query_truncated:
            rule += ", query truncated"
        return f"{self.query!r}: {len(self.kept)} kept, {len(self.dropped)} dropped ({rule})"

    def mark(self, place: int) -> str:
        """The sign of the document at this place, best first: ``+``, ``~`` (weak) or ``-``."""
        if place >= len(self.kept):
            return "-"
        return "~" if self.kept[place].weak else "+"

    def _repr_html_(self) -> str:
        """The result in a notebook."""
        return result_html(self)

    def __str__(self) -> str:
        lines = [self.summary]
        for place, document in enumerate(self.kept + self.dropped):
            text = " ".join(document.extract.split())
            if len(text) > 88:
                text = text[:87] + "…"
            if document.truncated:
                text += " (truncated)"
            lines.append(f"{self.mark(place)} {document.score:+8.2f}  [{document.index}] {text}")
        return "\n".join(lines)


def normalise(score: float, threshold: float | None) -> float:
    """A score between 0 and 1, by the logistic function; 0.5 if it equals the threshold.

    The threshold None counts as 0. A score so near the threshold that 0.5 would be the rounded
    result becomes the next number above or below 0.5.

    >>> normalise(0.5, 0.5), normalise(1e-300, 0.0) > 0.5, normalise(2.0, None)
    (0.5, True, 0.8807970779778823)
    """
    distance = score - (threshold or 0.0)
    if distance == 0:
        return 0.5
    small = math.exp(-abs(distance))
    share = 1 / (1 + small) if distance > 0 else small / (1 + small)
    return math.nextafter(0.5, 1.0 if distance > 0 else 0.0) if share == 0.5 else share


def _normalised(document: RankedDocument, native: float | None) -> RankedDocument:
    excerpts = []
    for excerpt in document.excerpts:
        excerpts.append(replace(excerpt, score=normalise(excerpt.score, native)))
    score = normalise(document.score, native)
    return replace(document, score=score, excerpts=tuple(excerpts))


def choose(
    query: str,
    documents: Sequence[InputDocument],
    scored: Sequence[Scored],
    rule: Rule,
    *,
    reading: Reading = WHOLE,
    query_truncated: bool = False,
) -> RankResult:
    """Sort documents by their scores, of `blanks_last`, and keep those that a rule keeps.

    Raises:
        ScoringError: A document has no finite score; its position is given.
    """
    scores = [finite(float(one.score), index) for index, one in enumerate(scored)]
    bar = rule.bar(scores)
    count = len(rule.select(scores))
    ranked = []
    for place, index in enumerate(best_first(scores)):
        own = documents[index]
        one = scored[index]
        excerpts: tuple[Excerpt, ...] = ()
        if place < count and reading.extract:
            excerpts = _kept_sentences(one, bar, reading.context)
        document = RankedDocument(
            index,
            own.text,
            scores[index],
            one.truncated,
            one.window and one.window.without(len(own.before)),
            excerpts,
            weak=place < count and bar.weak,
            id=own.id,
            metadata=own.metadata,
        )
        ranked.append(document)
    return RankResult(
        query,
        rule,
        tuple(ranked[:count]),
        tuple(ranked[count:]),
        query_truncated=query_truncated,
    )


def _kept_sentences(scored: Scored, bar: Bar, context: int) -> tuple[Excerpt, ...]:
    """The sentences of a kept document near those that reach the list's bar, or its best one."""
    hits: list[float] = []
    for place, sentence in enumerate(scored.sentences):
        if bar.passes(sentence.score) or sentence.score == scored.score:
            hits.append(place)
    hits.append(math.inf)
    kept = []
    for place, sentence in enumerate(scored.sentences):
        if hits[bisect_left(hits, place - context)] <= place + context:
            kept.append(sentence)
    return tuple(kept)


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
