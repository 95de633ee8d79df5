"""How a document is read: whole, sentence by sentence or in windows; where these begin and end."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_args

from typing_extensions import Self

from ..errors import InputError, check_choice, check_count
from ..texts import CHARACTERS_PER_TOKEN, encodable

Span = tuple[int, int]
"""A part of a text: its first character, and the first character after it."""

TokenEnds = Callable[[str], tuple[Sequence[int], int]]
"""Where a text's tokens end, in characters, and how many tokens of a document are read at most."""

# Characters that are split into sentences at once: the time of sentencex grows with the square of
# their number on some texts (quotes), to 4 ms for so many.
CHUNK = 4_000

# Characters of a long document that are cut into parts at once. One core tokenises so many in
# about 0.02 s, and a service answers others between two sections.
SECTION = 20_000

# A section has at least so many characters for each token of a window, so that it holds several
# windows.
SECTION_PER_TOKEN = 4 * CHARACTERS_PER_TOKEN

# Characters of a document that are read in windows or sentences: some 40 pages. One core reads them
# with `mini` in about 3 s.
MAX_CHARACTERS = 100_000

# Windows share up to 1 / OVERLAP of their tokens with the window before.
OVERLAP = 4

# Tokens by which a window is shorter than the limit: a text that is tokenised by itself, without
# its neighbours, may have a few tokens more.
SEAM = 4


Extract = Literal["sentences"]
"""The parts to which a document may shrink; see `Reading`. `EXTRACTS` has a function for each."""

LongDocuments = Literal["cut", "windows"]
"""How a document that is too long is read; see `Reading`."""


class ReadingOptions(TypedDict, total=False):
    """The fields of `Reading`. None for ``long_documents`` is what the reranker does by default."""

    extract: Extract | None
    context: int
    long_documents: LongDocuments | None
    max_characters: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """How documents are read.

    Args:
        extract: "sentences": score each sentence by itself, and keep those that reach the rule's
            bar instead of whole documents. A document without one is dropped.
        context: Keep also this many sentences before and after each kept sentence.
        long_documents: "windows": read a document that is too long for the model in overlapping
            windows; the best one's score counts. "cut": read its beginning. Sentences that are too
            long are always cut.
        max_characters: Of a document in windows or sentences, read at most so many characters, so
            that one book does not hold up a call for minutes. None: all.

    Raises:
        InputError: A value that is out of range or has no effect.
    """

    extract: Extract | None = None
    context: int = 0
    long_documents: LongDocuments = "cut"
    max_characters: int | None = MAX_CHARACTERS

    def __post_init__(self) -> None:
        check_choice("extract", self.extract, *get_args(Extract), None)
        check_choice("long_documents", self.long_documents, "cut", "windows")
        check_count("context", self.context, 0)
        if self.max_characters is not None:
            check_count("max_characters", self.max_characters, 1)
        if self.extract is None and self.context:
            raise InputError("context has no effect without extract='sentences'.")

    @classmethod
    def of(cls, options: ReadingOptions, default: LongDocuments = "cut") -> Self:
        """The reading with these options. ``default`` replaces None for ``long_documents``."""
        names = options.keys() & ReadingOptions.__annotations__.keys()
        fields: Any = {name: options.get(name) for name in names}
        return cls(**{**fields, "long_documents": options.get("long_documents") or default})

    @property
    def is_whole(self) -> bool:
        """Whether documents are read as one part each, or their beginnings."""
        return self.extract is None and self.long_documents == "cut"

    @property
    def in_windows(self) -> bool:
        """Whether documents that are too long are read in windows."""
        return self.extract is None and self.long_documents == "windows"


WHOLE = Reading()
"""Each document at once; of one that is too long, the beginning."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A sentence of a document with its score: the characters from ``start`` to before ``end``."""

    start: int
    end: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """The best window of a document: characters from ``start`` to before ``end``.

    ``count`` is the number of windows that the document was read in.
    """

    start: int
    end: int
    count: int

    def without(self, before: int) -> Self:
        """The window in the text that follows so many characters."""
        return replace(self, start=max(self.start - before, 0), end=max(self.end - before, 0))


def sentences(text: str) -> list[Span]:
    r"""Spans of the sentences, in order, without white space around them.

    Together they hold everything but white space.

    >>> text = "Dr. Smith left. He was late!\r\nWhy?"
    >>> [text[start:stop] for start, stop in sentences(text)]
    ['Dr. Smith left.', 'He was late!', 'Why?']
    """
    from sentencex import get_sentence_boundaries

    # sentencex fails on white space of several bytes.
    plain = encodable(re.sub(r"[^\S\r\n]", " ", text))
    spans: list[Span] = []
    begin = 0
    while begin < len(text):
        # "en" for all languages: the marks that end a sentence are those of all languages, and
        # only abbreviations differ.
        boundaries = get_sentence_boundaries("en", plain[begin : begin + CHUNK])
        last = boundaries[-1]["start_index"]
        if begin + CHUNK < len(text) and last > CHUNK // 2:
            # The chunk may end within its last sentence. A sentence that begins in the first half
            # of the chunk is cut, so that no character is split more than twice.
            boundaries.pop()
        for one in boundaries:
            start, stop = stripped(text, begin + one["start_index"], begin + one["end_index"])
            if start < stop:
                spans.append((start, stop))
        begin += boundaries[-1]["end_index"]
    return spans


EXTRACTS: dict[Extract, Callable[[str], list[Span]]] = {"sentences": sentences}
"""Functions from a text to the spans of its parts, in order."""


def sections(text: str, window_tokens: int = 0) -> list[Span]:
    """Spans of a long text that are cut into parts one by one. Together they hold the whole text.

    In its last quarter, a section ends after a line, or else a sentence, or else white space.

    Args:
        text: A document.
        window_tokens: Tokens of a window; 0 if the parts are no windows.
    """
    size = max(SECTION, SECTION_PER_TOKEN * window_tokens)
    spans: list[Span] = []
    start = 0
    while len(text) - start > size:
        stop = start + size
        earliest = stop - size // 4
        for mark in ("\n", ". ", "\u3002", " "):
            place = text.rfind(mark, earliest, stop)
            if place >= 0:
                stop = place + len(mark)
                break
        spans.append((start, stop))
        start = stop
    spans.append((start, len(text)))
    return spans


def stripped(text: str, start: int, stop: int) -> Span:
    """A span without the white space around it."""
    part = text[start:stop]
    return start + len(part) - len(part.lstrip()), stop - len(part) + len(part.rstrip())


def windows(text: str, ends: Sequence[int], limit: int) -> list[Span]:
    """Overlapping spans that hold all of a text, each of at most ``limit`` tokens.

    They begin and end with sentences, or within a sentence that is too long for a window.

    Args:
        text: A document of more than ``limit`` tokens.
        ends: Where its tokens end, in characters.
        limit: The most tokens of a window.
    """
    size = max(limit - SEAM, 1)
    shared = size // OVERLAP
    # Number of tokens before the end of each sentence.
    cuts = [bisect_right(ends, stop) for _, stop in sentences(text)]
    cuts.append(len(ends))
    spans: list[Span] = []
    first, start = 0, 0
    while len(ends) - first > size:
        # The last sentence that fits, if the window then has more than the next one repeats.
        last = first + size
        place = bisect_right(cuts, last)
        if place and cuts[place - 1] > first + shared:
            last = cuts[place - 1]
        spans.append(stripped(text, start, ends[last - 1]))
        # The next window begins with the first sentence that it may repeat.
        first = cuts[bisect_left(cuts, last - shared)]
        if first > last:
            first = last - shared
        start = ends[first - 1]
    spans.append(stripped(text, start, len(text)))
    return spans


def joined(document: str, excerpts: Sequence[Excerpt]) -> str:
    """Excerpts, in their order, with the white space that stands before each in the document."""
    text = ""
    end = excerpts[0].start
    for excerpt in excerpts:
        between = document[end : excerpt.start]
        if between.strip():
            # Other parts are left out.
            between = between[len(between.rstrip()) :] or " "
        text += between + excerpt.text
        end = excerpt.end
    return text
