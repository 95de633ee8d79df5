"""Pairs of a query and a document, and scores of pairs whose documents are read in parts."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..cancellation import check_cancelled
from ..errors import ScoringError
from .parts import (
    SEGMENT,
    SEGMENT_PER_TOKEN,
    WHOLE,
    Excerpt,
    Reading,
    Span,
    TokenEnds,
    Window,
    sentences,
    windows,
)
from .ranked import Scored
from .rule import BLANK_SCORE


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document to score.

    Attributes:
        query: The query.
        document: The document.
        max_tokens: Read at most so many of the document's tokens; None for as many as fit.
        reading: How the document is read. `score_in_parts` and the service use it; rerankers read
            documents whole.
        salt: For the service only: pairs share cached prefixes with pairs of the same salt.
        cut_query: For the service only: read the first and the last part of a query that is too
            long, instead of raising an error.
    """

    query: str
    document: str
    max_tokens: int | None = None
    reading: Reading = WHOLE
    salt: str = ""
    cut_query: bool = True


def score_in_parts(
    pairs: Sequence[Pair], token_ends: TokenEnds, score: Callable[[Sequence[Pair]], list[Scored]]
) -> list[Scored]:
    """Score pairs as their `Reading` says: the score of a document is that of its best part.

    Documents are cut before anything is scored, and all parts are scored in one call.

    Args:
        pairs: What to score.
        token_ends: As `Reranker.token_ends`.
        score: Scores pairs whose documents are read whole.

    Returns:
        One `Scored` for each pair, in input order.

    Raises:
        InputError: A document cannot be read as its pair says.
        ScoringError: A part could not be scored; the position of its pair is given.
    """
    spans = [spans_of(pair, token_ends) for pair in pairs]
    parts: list[Pair] = []
    owners: list[int] = []
    for index, pair in enumerate(pairs):
        parts += parts_of(pair, spans[index])
        owners += [index] * len(spans[index])
    try:
        scored = score(parts)
    except ScoringError as error:
        error.move_to(owners[error.index])
        raise
    by_pair: list[list[Scored]] = [[] for _ in pairs]
    for owner, one in zip(owners, scored, strict=True):
        by_pair[owner].append(one)
    return [combined(*one) for one in zip(pairs, spans, by_pair, strict=True)]


def parts_of(pair: Pair, spans: Sequence[Span]) -> list[Pair]:
    """The parts of a document, or of a segment of it, as pairs whose documents are read whole."""
    if pair.reading.is_whole:
        return [pair]
    return [
        replace(pair, document=pair.document[start:stop], reading=WHOLE) for start, stop in spans
    ]


def spans_of(pair: Pair, token_ends: TokenEnds) -> list[Span]:
    """Spans of the parts of a document, or of its first ``max_tokens`` tokens; raises as `cut`."""
    spans: list[Span] = []
    segment = None
    while segment is None or not segment.is_last:
        check_cancelled()
        segment = cut(pair, token_ends, segment)
        spans += segment.spans
    return spans


@dataclass(frozen=True, slots=True)
class Segment:
    """The parts of one stretch of a document.

    Attributes:
        spans: The parts, in characters of the document. A document without sentences may have none.
        stop: Where the next segment begins, in characters.
        tokens: Tokens of the document before ``stop``; counted where ``max_tokens`` needs it.
        is_last: Whether nothing of the document is left.
    """

    spans: list[Span]
    stop: int = 0
    tokens: int = 0
    is_last: bool = False


def cut(pair: Pair, token_ends: TokenEnds, before: Segment | None = None) -> Segment:
    """Cut the next segment of a document, some 20,000 characters, into parts.

    A part is a sentence, a window or the whole document, as ``pair.reading`` says. A long document
    takes several calls, so that no call takes long. The last part of a segment may be incomplete;
    then it is left out, and the next segment begins with it.

    Args:
        pair: The document, and how it is read.
        token_ends: As `Reranker.token_ends`.
        before: The segment before this one; None for the document's first one.

    Returns:
        The parts, and where the next segment begins.

    Raises:
        InputError: The pair has windows or ``max_tokens``, and the reranker cannot say where
            tokens end.
    """
    document, reading = pair.document, pair.reading
    if reading.is_whole:
        return Segment([(0, len(document))], len(document), is_last=True)
    before = before or Segment([])
    start, length, limit = before.stop, SEGMENT, 0
    counted = reading.in_windows or bool(pair.max_tokens)
    if counted:
        limit = token_ends("")[1]
        length = max(length, SEGMENT_PER_TOKEN * limit)
    if reading.max_characters is not None:
        document = document[: reading.max_characters]
    text = document[start : start + length]
    is_last = start + length >= len(document)
    ends: Sequence[int] = token_ends(text)[0] if counted else ()
    if pair.max_tokens and before.tokens + len(ends) > pair.max_tokens:
        ends = ends[: pair.max_tokens - before.tokens]
        text = text[: ends[-1]] if ends else ""
        is_last = True
    if reading.extract:
        spans = sentences(text, 0 if start else len(reading.heading_of(text)))
    elif start and not text:
        spans = []
    elif len(ends) > limit or start:
        spans = windows(text, ends, limit)
    else:
        spans = [(0, len(text))]
    stop = len(text)
    if not is_last and len(spans) > 1:
        stop = spans.pop()[0]
    return Segment(
        [(start + first, start + last) for first, last in spans],
        start + stop,
        before.tokens + bisect_right(ends, stop),
        is_last,
    )


def combined(pair: Pair, spans: Sequence[Span], parts: Sequence[Scored]) -> Scored:
    """The score of a document from those of its parts."""
    if not parts:
        return Scored(BLANK_SCORE)
    if pair.reading.is_whole:
        return parts[0]
    # A score that is not finite counts as the best, so that the caller notices it.
    best = max(
        range(len(parts)),
        key=lambda place: (not math.isfinite(parts[place].score), parts[place].score),
    )
    end_was_cut = spans[-1][1] < len(pair.document.rstrip())
    scored = Scored(
        parts[best].score,
        truncated=end_was_cut or any(part.truncated for part in parts),
        tokens=sum(part.tokens for part in parts),
    )
    if not pair.reading.extract:
        return replace(scored, window=Window(*spans[best], len(spans)))
    excerpts = []
    for (start, stop), part in zip(spans, parts, strict=True):
        excerpts.append(Excerpt(start, stop, part.score, pair.document[start:stop]))
    return replace(scored, sentences=tuple(excerpts))
