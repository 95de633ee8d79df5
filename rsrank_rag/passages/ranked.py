"""Scored documents, sorted and cut: what `rank` returns, and how it is shown."""

import html
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..errors import InputError, ScoringError, needs
from .parts import WHOLE, Excerpt, Reading, Window, joined

BLANK_SCORE = -10_000.0
"""What a document without text scores: less than any other, so that whatever sorts by score puts it last.

Finite, because JSON has no infinity and other tools average or subtract; exact in float16. Scores of RSRank lie within
plus or minus layers x heads (288 for Qwen3-8B), those of other systems are logits, cosines and probabilities.
"""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """One document with its position in the list that was ranked, and its score on the reranker's own scale.

    Its score is that of its best sentence, where sentences are extracted; where it is read in windows, of the best one.
    It is `truncated` where the model did not read all of it, because it was too long. `excerpts` are the sentences that
    are kept, in their order, and `heading` the line before them, if that is kept, too.
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
        """What is kept of the text: the heading and the excerpts, if sentences are extracted, else all of it."""
        return self.heading + joined(self.text, self.excerpts) if self.excerpts else self.text


@dataclass(frozen=True, slots=True)
class Scored:
    """A document's score, and what there is to say about it; see `RankedDocument`.

    Attributes:
        tokens: Tokens read of the query and the document, the prompt around them included; 0 where nobody counts.
        sentences: All its sentences, if they were scored.
    """

    score: float
    truncated: bool = False
    tokens: int = 0
    window: Window | None = None
    sentences: tuple[Excerpt, ...] = ()


@dataclass(frozen=True, slots=True)
class RankResult:
    """All documents of one query, best first, in two lists: every document is in exactly one of them.

    Attributes:
        query: The query.
        threshold: Documents had to score above this to be kept; None when only ranked.
        kept: Documents to pass on.
        dropped: The others.
    """

    query: str
    threshold: float | None
    kept: tuple[RankedDocument, ...]
    dropped: tuple[RankedDocument, ...]

    @property
    def texts(self) -> list[str]:
        """Texts of the kept documents, best first; of each the kept sentences only, if sentences are extracted."""
        return [document.extract for document in self.kept]

    def __len__(self) -> int:
        """How many documents are kept: a result that kept none is false."""
        return len(self.kept)

    def __iter__(self) -> Iterator[RankedDocument]:
        """The kept documents, best first."""
        return iter(self.kept)

    def __getitem__(self, place: Any) -> Any:
        """A kept document by its place, the best has 0; several of a slice."""
        return self.kept[place]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, numbers and texts: what ``rsrank rank --json`` prints."""
        return asdict(self)

    def to_pandas(self) -> Any:
        """A data frame with a row a document, best first: ``kept``, then what a `RankedDocument` has.

        Raises MissingDependencyError: pandas is not installed.
        """
        with needs("to_pandas needs pandas. Install with: pip install pandas", "", "pandas"):
            from pandas import DataFrame
        kept, names = len(self.kept), [field.name for field in fields(RankedDocument)]
        documents = enumerate(self.kept + self.dropped)
        rows = [
            [i < kept, *(getattr(document, name) for name in names)] for i, document in documents
        ]
        return DataFrame(rows, columns=["kept", *names])

    def _repr_html_(self) -> str:
        """A table in a notebook, with bars away from the threshold as on the service's page."""
        line, documents = self.threshold or 0.0, self.kept + self.dropped
        ends = [line, *(document.score for document in documents if document.score != BLANK_SCORE)]
        low, span = min(ends), (max(ends) - min(ends)) or 1.0
        rows = ""
        for place, document in enumerate(documents):
            kept, score = place < len(self.kept), max(document.score, low)
            start, width = (min(score, line) - low) / span, abs(score - line) / span
            bar = f"margin-left:{start:.1%};width:{width:.1%};height:.7em;background:{'#1b57c0' if kept else '#a8521d'}"
            text = html.escape(document.extract[:300]) + " (truncated)" * document.truncated
            rows += (
                f"<tr><td>{'kept' if kept else 'dropped'}</td><td>{document.score:+.2f}</td>"
                f'<td style="min-width:12em"><div style="{bar}"></div></td><td>{document.index}</td>'
                f'<td style="text-align:left">{text}</td></tr>'
            )
        return f"<p><b>{html.escape(self.query)}</b></p><table>{rows}</table>"

    def __str__(self) -> str:
        rule = "ranked only" if self.threshold is None else f"threshold {self.threshold:g}"
        lines = [f"{self.query!r}: {len(self.kept)} kept, {len(self.dropped)} dropped ({rule})"]
        for mark, documents in (("+", self.kept), ("-", self.dropped)):
            for doc in documents:
                text = " ".join(doc.extract.split())
                text = text if len(text) <= 88 else text[:87] + "…"
                lines.append(
                    f"{mark} {doc.score:+8.2f}  [{doc.index}] {text}{' (truncated)' * doc.truncated}"
                )
        return "\n".join(lines)


def choose(
    query: str,
    documents: Sequence[str],
    scored: Sequence[Scored],
    threshold: float | None,
    *,
    top_n: int | None = None,
    min_docs: int = 0,
    reading: Reading = WHOLE,
) -> RankResult:
    """Sort scored documents and keep the relevant ones, as `Reranker.rank` says.

    Raises ScoringError: A document has no finite score; it is named.
    """
    scored = blanks_last(documents, scored)
    for index, found in enumerate(scored):
        if not math.isfinite(found.score):
            raise ScoringError(
                f"Document {index} scored {found.score}, which can be neither kept nor dropped. "
                "Look at its text, or load the model in float32.",
                index,
            )
    blank = [
        found.score == BLANK_SCORE for found in scored
    ]  # apart: a reranker may give even lower scores
    order = sorted(
        range(len(documents)), key=lambda i: (blank[i], -scored[i].score)
    )  # stable: ties by input order
    ranked = [
        RankedDocument(
            i, documents[i], float(scored[i].score), scored[i].truncated, scored[i].window
        )
        for i in order
    ]
    relevant = sum(
        threshold is None or (doc.score > threshold and not blank[doc.index]) for doc in ranked
    )
    keep = max(relevant, min(min_docs, len(ranked)))
    keep = keep if top_n is None else min(keep, top_n)
    kept = ranked[:keep]
    if reading.extract:
        kept = [_shortened(doc, scored[doc.index].sentences, threshold, reading) for doc in kept]
    return RankResult(query, threshold, tuple(kept), tuple(ranked[keep:]))


def _shortened(
    document: RankedDocument,
    sentences: Sequence[Excerpt],
    threshold: float | None,
    reading: Reading,
) -> RankedDocument:
    """A kept document with the sentences that are kept of it: at least the best one, even below the threshold."""
    limit = -math.inf if threshold is None else threshold
    hits = [
        i for i, one in enumerate(sentences) if one.score > limit or one.score == document.score
    ]
    ends, context = [*hits, math.inf], reading.context  # which may be any number
    kept = tuple(
        one
        for i, one in enumerate(sentences)
        if ends[bisect_left(hits, i - context)] <= i + context
    )
    return replace(document, excerpts=kept, heading=reading.heading_of(document.text))


def blanks_last(documents: Sequence[str], scored: Sequence[Scored]) -> list[Scored]:
    """The same scores, with `BLANK_SCORE` for documents of nothing but white space, whatever a reranker gave them.

    Raises InputError: there are more or fewer scores than documents.
    """
    if len(scored) != len(documents):
        raise InputError(f"The reranker gave {len(scored)} scores for {len(documents)} documents.")
    return [
        found if text.strip() else replace(found, score=BLANK_SCORE)
        for text, found in zip(documents, scored, strict=True)
    ]
