"""How a document is read: whole, sentence by sentence, or in windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from ..errors import InputError
from .spans import Span, sentences, windows

TokenEnds = Callable[[str], tuple[Sequence[int], int]]
"""Where a text's tokens end, in characters, and how many of a document are read at most."""


class ReadingOptions(TypedDict, total=False):
    """How documents are read: see `Reading`."""

    extract: Literal["sentences"] | None
    context: int
    heading: bool | Sequence[int]
    long_documents: Literal["cut", "windows"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How documents are read.

    Args:
        extract: "sentences": score each sentence by itself, and keep those above the threshold instead of whole
            documents. A document without one is dropped.
        context: Keep so many sentences before and after each such one, too.
        heading: Whether documents begin with a line that is read with each of their parts, and kept with any of them;
            or how many characters of each document are so read.
        long_documents: "windows": read what is too long for the model in windows that overlap, and score it by the
            best one. "cut": read its beginning.

    Raises:
        InputError: A value that cannot be used.
    """

    extract: Literal["sentences"] | None = None
    context: int = 0
    heading: bool | Sequence[int] = False
    long_documents: Literal["cut", "windows"] = "cut"

    def __post_init__(self) -> None:
        if self.extract not in (None, "sentences"):
            raise InputError(f"extract must be 'sentences' or None, got {self.extract!r}.")
        if self.long_documents not in ("cut", "windows"):
            raise InputError(f"long_documents must be 'cut' or 'windows', got {self.long_documents!r}.")
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 0:
            raise InputError(f"context must be a number of sentences, 0 or more, got {self.context!r}.")
        if self.context and self.extract is None:
            raise InputError(f"context={self.context} has no effect without extract='sentences'.")

    @property
    def in_parts(self) -> bool:
        """Whether any document may be read otherwise than whole."""
        return self.extract is not None or self.long_documents == "windows"

    def of(self, *indices: int) -> Reading:
        """The reading of some of the documents."""
        return self if isinstance(self.heading, bool) else replace(self, heading=[self.heading[i] for i in indices])

    def check(self, count: int) -> None:
        """Refuse headings of another number of documents with an InputError."""
        if not isinstance(self.heading, bool) and len(self.heading) != count:
            raise InputError(f"heading has {len(self.heading)} lengths for {count} documents. Give one for each.")

    def heading_of(self, document: str, index: int = 0) -> str:
        """The beginning of a document that is read with each part, its line break included."""
        if isinstance(self.heading, bool):
            return document[: document.find("\n") + 1] if self.heading else ""
        return document[: self.heading[index]]


WHOLE = Reading()
"""Each document at once, by its beginning where it is too long."""


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


@dataclass(frozen=True, slots=True)
class Part:
    """What is read at once of a document: its heading, if there is one, and a window or a sentence, or both.

    Attributes:
        text: As it is read.
        span: Where it stands in the document, without the heading.
        sentence: The sentence it is or belongs to, if sentences are extracted.
    """

    text: str
    span: Span
    sentence: Span | None = None


def split(document: str, reading: Reading, token_ends: TokenEnds) -> Iterator[Part]:
    """The parts of a document; none if it is to be read by sentences and has none.

    Raises:
        InputError: Windows are asked for, and nobody counts tokens.
        MissingDependencyError: sentencex is not installed.
    """
    heading = reading.heading_of(document)
    body = document[len(heading) :]
    whole = sentences(body) if reading.extract else [(0, len(body))]
    for start, stop in whole:
        sentence = (len(heading) + start, len(heading) + stop) if reading.extract else None
        for first, last in _windows(heading, body[start:stop], reading, token_ends):
            span = len(heading) + start + first, len(heading) + start + last
            yield Part(heading + document[slice(*span)], span, sentence)


def _windows(heading: str, text: str, reading: Reading, token_ends: TokenEnds) -> list[Span]:
    if reading.long_documents == "cut":
        return [(0, len(text))]
    ends, room = token_ends(heading + text)
    if len(ends) <= room:
        return [(0, len(text))]
    before = sum(end <= len(heading) for end in ends)
    return windows(text, [end - len(heading) for end in ends[before:]], max(room - before, room // 2))


def joined(document: str, excerpts: Sequence[Excerpt]) -> str:
    """Excerpts of a document with what stands between neighbours, and a space where something is left out."""
    text, last = "", excerpts[0].start
    for excerpt in excerpts:
        between = document[last : excerpt.start]
        text += (" " if between.strip() else between) + excerpt.text
        last = excerpt.end
    return text
