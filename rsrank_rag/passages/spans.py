"""Where the sentences and the windows of a text begin and end, in characters."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..errors import needs

Span = tuple[int, int]  # from a character to before another

CHUNK = 10_000  # characters that are split at once: the time it takes can grow with their square (measured on lists)
OVERLAP = 4  # windows share up to 1 / `OVERLAP` of their tokens with the one before
SEAM = 4  # tokens by which a window is shorter than it might be: split apart from its neighbours, it may have some more


def sentences(text: str, begin: int = 0) -> list[Span]:
    r"""Spans of a text's sentences, in order, without white space around them; together they hold all from ``begin``.

    >>> text = "Dr. Smith left. He was late!\r\nWhy?"
    >>> [text[start:stop] for start, stop in sentences(text)]
    ['Dr. Smith left.', 'He was late!', 'Why?']

    Raises:
        MissingDependencyError: sentencex is not installed.
    """
    install = "which is not installed. Install with: pip install 'sentencex>=1.0.32'"
    with needs(f"Sentences are found by sentencex, {install}", "", "sentencex"):
        from sentencex import get_sentence_boundaries
    plain = encodable(re.sub(r"[^\S\r\n]", " ", text))  # sentencex fails on white space of several bytes
    found: list[Span] = []
    while begin < len(text):
        chunk = plain[begin : begin + CHUNK]
        # English stands for all: the marks that end a sentence are those of all languages, only abbreviations differ.
        spans = [(begin + one["start_index"], begin + one["end_index"]) for one in get_sentence_boundaries("en", chunk)]
        if begin + CHUNK < len(text) and len(spans) > 1:
            spans.pop()  # it may go on
        found += (stripped(text, *span) for span in spans)
        begin = spans[-1][1]
    return [(start, stop) for start, stop in found if start < stop]


def encodable(text: str) -> str:
    """A text of the same length with U+FFFD for each half of a surrogate pair, which nothing can encode."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


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
