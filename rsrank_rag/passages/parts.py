"""How a document is read, whole, sentence by sentence or in windows, and where these begin and end, in characters."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..errors import InputError, needs

Span = tuple[int, int]  # from a character to before another

CHUNK = 10_000  # characters that are split at once: the time it takes can grow with their square (measured on lists)
OVERLAP = 4  # windows share up to 1 / `OVERLAP` of their tokens with the one before
SEAM = 4  # tokens by which a window is shorter than it might be: split apart from its neighbours, it may have some more

TokenEnds = Callable[[str], tuple[Sequence[int], int]]
"""Where a text's tokens end, in characters, and how many of a document are read at most."""


class ReadingOptions(TypedDict, total=False):
    """The fields of `Reading`."""

    extract: Literal["sentences"] | None
    context: int
    heading: bool
    long_documents: Literal["cut", "windows"] | None  # None: as the reranker does


@dataclass(frozen=True, slots=True)
class Reading:
    """How documents are read.

    Args:
        extract: "sentences": score each sentence by itself, and keep those above the threshold instead of whole
            documents. A document without one is dropped.
        context: Keep so many sentences before and after each of them, too.
        heading: Documents begin with a line that is kept with any of their sentences, and scored with none.
        long_documents: "windows": read what is too long for the model in windows that overlap, and score it by the
            best one; what `RSRank.rank` does. "cut": read its beginning; what services and others do. Where sentences
            are extracted, those that are too long are cut.

    Raises:
        InputError: A value that cannot be used, or has no effect.
    """

    extract: Literal["sentences"] | None = None
    context: int = 0
    heading: bool = False
    long_documents: Literal["cut", "windows"] = "cut"

    def __post_init__(self) -> None:
        if self.extract not in (None, "sentences"):
            raise InputError(f"extract must be 'sentences' or None, got {self.extract!r}.")
        if self.long_documents not in ("cut", "windows"):
            raise InputError(
                f"long_documents must be 'cut' or 'windows', got {self.long_documents!r}."
            )
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 0:
            raise InputError(
                f"context must be a number of sentences, 0 or more, got {self.context!r}."
            )
        if self.extract is None and (self.context or self.heading):
            raise InputError("context and heading have no effect without extract='sentences'.")

    def heading_of(self, document: str) -> str:
        """The line that a document begins with, its line break included, if that is a heading."""
        return document[: document.find("\n") + 1] if self.heading else ""


WHOLE = Reading()  # each document at once, by its beginning where it is too long


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A sentence of a document: from character ``start`` to before ``end``, with a score of its own."""

    start: int
    end: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a document that scored best, of ``count`` it was read in: from ``start`` to before ``end``."""

    start: int
    end: int
    count: int


def split(document: str, reading: Reading, token_ends: TokenEnds) -> list[Span]:
    """Where the parts of a document begin and end; none if it is to be read by sentences and has none.

    Raises InputError: windows are asked for, and nobody counts tokens; MissingDependencyError: sentencex is not
    installed.
    """
    if reading.extract:
        return sentences(document, len(reading.heading_of(document)))
    ends, room = token_ends(document) if reading.long_documents == "windows" else ((), 0)
    return windows(document, ends, room) if len(ends) > room else [(0, len(document))]


def sentences(text: str, begin: int = 0) -> list[Span]:
    r"""Spans of a text's sentences, in order, without white space around them; together they hold all from ``begin``.

    Raises MissingDependencyError: sentencex is not installed.

    >>> text = "Dr. Smith left. He was late!\r\nWhy?"
    >>> [text[start:stop] for start, stop in sentences(text)]
    ['Dr. Smith left.', 'He was late!', 'Why?']
    """
    install = "which is not installed. Install with: pip install 'sentencex>=1.0.32'"
    with needs(f"Sentences are found by sentencex, {install}", "", "sentencex"):
        from sentencex import get_sentence_boundaries
    plain = encodable(
        re.sub(r"[^\S\r\n]", " ", text)
    )  # sentencex fails on white space of several bytes
    found: list[Span] = []
    while begin < len(text):
        chunk = plain[begin : begin + CHUNK]
        # English stands for all: the marks that end a sentence are those of all languages, only abbreviations differ.
        spans = [
            (begin + one["start_index"], begin + one["end_index"])
            for one in get_sentence_boundaries("en", chunk)
        ]
        if begin + CHUNK < len(text) and len(spans) > 1:
            spans.pop()  # it may go on
        found += (stripped(text, *span) for span in spans)
        begin = spans[-1][1]
    return [(start, stop) for start, stop in found if start < stop]


def encodable(text: str) -> str:
    """As long a text, with U+FFFD for each half of a surrogate pair, which JSON can spell and nothing can encode."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def stripped(text: str, start: int, stop: int) -> Span:
    """A span without the white space around it."""
    part = text[start:stop]
    return start + len(part) - len(part.lstrip()), stop - len(part) + len(part.rstrip())


def windows(text: str, ends: Sequence[int], room: int) -> list[Span]:
    """Overlapping spans of at most so many tokens that hold all of a text; they begin and end with sentences.

    Where a sentence is too long for that, they begin and end with any token.

    Args:
        text: What does not fit.
        ends: Where its tokens end, in characters.
        room: The most tokens of a window.
    """
    room = max(room - SEAM, 1)
    shared = room // OVERLAP
    # Tokens before the end of each sentence.
    cuts = [*(bisect_right(ends, stop) for _, stop in sentences(text)), len(ends)]
    spans, first = [], 0
    while len(ends) - first > room:
        place = bisect_right(cuts, first + room)
        last = cuts[place - 1] if place and cuts[place - 1] > first + shared else first + room
        spans.append(stripped(text, ends[first - 1] if first else 0, ends[last - 1]))
        cut = cuts[bisect_left(cuts, last - shared)]
        first = cut if cut <= last else last - shared
    return [*spans, stripped(text, ends[first - 1] if first else 0, len(text))]


def joined(document: str, excerpts: Sequence[Excerpt]) -> str:
    """Excerpts of a document with what stands between neighbours, and a space where something is left out."""
    text, last = "", excerpts[0].start
    for excerpt in excerpts:
        between = document[last : excerpt.start]
        text += (" " if between.strip() else between) + excerpt.text
        last = excerpt.end
    return text
