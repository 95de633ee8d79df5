"""How a document is read: whole, sentence by sentence, or in windows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from ..errors import InputError
from .spans import Span, sentences, windows

TokenEnds = Callable[[str], tuple[Sequence[int], int]]
"""Where a text's tokens end, in characters, and how many of a document are read at most."""


class ReadingOptions(TypedDict, total=False):
    """The fields of `Reading`."""

    extract: Literal["sentences"] | None
    context: int
    heading: bool
    long_documents: Literal["cut", "windows"]


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
            raise InputError(f"long_documents must be 'cut' or 'windows', got {self.long_documents!r}.")
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 0:
            raise InputError(f"context must be a number of sentences, 0 or more, got {self.context!r}.")
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


def joined(document: str, excerpts: Sequence[Excerpt]) -> str:
    """Excerpts of a document with what stands between neighbours, and a space where something is left out."""
    text, last = "", excerpts[0].start
    for excerpt in excerpts:
        between = document[last : excerpt.start]
        text += (" " if between.strip() else between) + excerpt.text
        last = excerpt.end
    return text
