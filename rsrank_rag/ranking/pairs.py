"""Pairs of a query and a document, and scores of pairs whose documents are read in parts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..cancellation import check_cancelled
from ..errors import InputError, ScoringError
from ..reading.parts import (
    EXTRACTS,
    WHOLE,
    Excerpt,
    Reading,
    Span,
    TokenEnds,
    Window,
    sections,
    windows,
)
from .results import Scored
from .rule import BLANK_SCORE


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document to score.

    Attributes:
        query: The query.
        document: The document.
        reading: How the document is read. `score_in_parts` and the service use it; rerankers read
            documents whole.
    """

    query: str
    document: str
    reading: Reading = WHOLE


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
    """The parts of a document as pairs whose documents are read whole."""
    return [
        replace(pair, document=pair.document[start:stop], reading=WHOLE) for start, stop in spans
    ]


def spans_of(pair: Pair, token_ends: TokenEnds) -> list[Span]:
    """Spans of the parts of a document; raises as `cut`."""
    spans: list[Span] = []
    for section in sections_of(pair, most_tokens(token_ends)):
        check_cancelled()
        spans += cut(pair, section, token_ends)
    return spans


def most_tokens(token_ends: TokenEnds) -> int | None:
    """The most tokens of a document that a reranker reads; None if it does not count tokens."""
    try:
        return token_ends("")[1]
    except InputError:
        return None


def sections_of(pair: Pair, max_tokens: int | None) -> list[Span]:
    """The sections of a document that `cut` cuts, one by one; see `sections`.

    Of a document that is read whole, only the first section is read, so that no document takes
    long. It has 16 characters for each token that the model reads.

    Args:
        pair: The document, and how it is read.
        max_tokens: The most tokens of a document that the model reads; None if unknown.
    """
    if not pair.reading.is_whole:
        # Sections of sentences are the same for all models.
        window_tokens = max_tokens if pair.reading.in_windows else 0
        return sections(pair.document[: pair.reading.max_characters], window_tokens or 0)
    if max_tokens is None:
        return [(0, len(pair.document))]
    return sections(pair.document, max_tokens)[:1]


def cut(pair: Pair, section: Span, token_ends: TokenEnds) -> list[Span]:
    """Cut a section of a document into its parts.

    A part is a sentence, a window or the whole document, as ``pair.reading`` says. Parts do not
    depend on other sections, and no call takes long. A section without text may have no parts.

    Args:
        pair: The document, and how it is read.
        section: One of `sections_of`.
        token_ends: As `Reranker.token_ends`.

    Returns:
        The parts, in characters of the document.

    Raises:
        InputError: The pair has windows, and the reranker cannot say where tokens end.
    """
    if pair.reading.is_whole:
        return [section]
    start, stop = section
    text = pair.document[start:stop]
    if pair.reading.extract:
        parts = EXTRACTS[pair.reading.extract](text)
    else:
        ends, limit = token_ends(text)
        if len(text) == len(pair.document) and len(ends) <= limit:
            return [section]
        parts = windows(text, ends, limit)
    return [(start + first, start + last) for first, last in parts if first < last]


def combined(pair: Pair, spans: Sequence[Span], parts: Sequence[Scored]) -> Scored:
    """The score of a document from those of its parts."""
    if not parts:
        # Nothing but white space was read.
        return Scored(BLANK_SCORE, truncated=bool(pair.document.strip()))
    end_was_cut = spans[-1][1] < len(pair.document.rstrip())
    if pair.reading.is_whole:
        return replace(parts[0], truncated=end_was_cut or parts[0].truncated)
    # A score that is not finite counts as the best, so that the caller notices it.
    best = max(
        range(len(parts)),
        key=lambda place: (not math.isfinite(parts[place].score), parts[place].score),
    )
    scored = Scored(
        parts[best].score,
        truncated=end_was_cut or any(part.truncated for part in parts),
        tokens=sum(part.tokens for part in parts),
    )
    if not pair.reading.extract:
        # A document that fits the model is one window, which is not reported.
        window = Window(*spans[best], len(spans)) if len(spans) > 1 else None
        return replace(scored, window=window)
    excerpts = []
    for (start, stop), part in zip(spans, parts, strict=True):
        excerpts.append(Excerpt(start, stop, part.score, pair.document[start:stop]))
    return replace(scored, sentences=tuple(excerpts))
