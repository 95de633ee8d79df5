"""Pairs of a query and a document, and the scores of pairs whose documents are read in parts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import InputError, ScoringError
from .parts import WHOLE, Excerpt, Reading, Span, TokenEnds, Window, split
from .ranked import BLANK_SCORE, Scored, blanks_last


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, of which at most ``max_tokens`` are read, to be scored beside other pairs.

    Only `score_in_parts` heeds its ``reading``, and only a service its ``instruction`` and ``salt``.
    """

    query: str
    document: str
    max_tokens: int | None = None
    reading: Reading = WHOLE
    instruction: str | None = None
    salt: str = ""


def score_in_parts(
    pairs: Sequence[Pair], token_ends: TokenEnds, score: Callable[[Sequence[Pair]], list[Scored]]
) -> list[Scored]:
    """Score pairs as their `Reading` says, all parts of all documents at once; the best part's score is a document's.

    ``token_ends`` is as `Reranker.token_ends`; ``score`` scores pairs whose documents are read whole.

    Raises InputError: a document is no text, or cannot be read so; ScoringError names the pair of a part that has none.
    """
    if all(pair.reading == WHOLE for pair in pairs):
        return score(pairs)
    spans = [spans_of(index, pair, token_ends) for index, pair in enumerate(pairs)]
    cut = [
        (pair, pair.document[slice(*span)])
        for pair, own in zip(pairs, spans, strict=True)
        for span in own
    ]
    try:
        scored = score([replace(pair, document=text, reading=WHOLE) for pair, text in cut])
    except ScoringError as error:
        owner = [owner for owner, own in enumerate(spans) for _ in own][error.index]
        raise of_document(error, owner) from error
    found = iter(blanks_last([text for _, text in cut], scored))
    return [
        _whole(pair, own, [next(found) for _ in own])
        for pair, own in zip(pairs, spans, strict=True)
    ]


def of_document(error: ScoringError, index: int) -> ScoringError:
    """The same error, of the document that a part belongs to."""
    return ScoringError(
        str(error).replace(f"Document {error.index}", f"Document {index}", 1), index
    )


def spans_of(index: int, pair: Pair, token_ends: TokenEnds) -> list[Span]:
    """Where the parts of a document, or of as much of it as is to be read, begin and end."""
    if not isinstance(pair.document, str):
        raise InputError(f"Document {index} must be a string, got {type(pair.document).__name__}.")
    ends = token_ends(pair.document)[0] if pair.max_tokens and pair.reading != WHOLE else ()
    last = ends[pair.max_tokens - 1] if pair.max_tokens and len(ends) > pair.max_tokens else None
    return split(pair.document[:last], pair.reading, token_ends)


def _whole(pair: Pair, spans: Sequence[Span], found: Sequence[Scored]) -> Scored:
    """What a document scores by its parts."""
    if pair.reading == WHOLE or not spans:
        return found[0] if spans else Scored(BLANK_SCORE)
    # What is not finite counts as the best: whoever chooses has to hear of it.
    best = max(range(len(spans)), key=lambda i: (not math.isfinite(found[i].score), found[i].score))
    sentences = [
        Excerpt(*span, one.score, pair.document[slice(*span)])
        for span, one in zip(spans, found, strict=True)
    ]
    return Scored(
        found[best].score,
        spans[-1][1] < len(pair.document.rstrip()) or any(one.truncated for one in found),
        sum(one.tokens for one in found),
        None if pair.reading.extract else Window(*spans[best], len(spans)),
        tuple(sentences) if pair.reading.extract else (),
    )
