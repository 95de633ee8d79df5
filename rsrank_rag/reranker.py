"""The contract every reranker of this package keeps: implement ``score``, inherit ``rank``."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from typing_extensions import Self, Unpack

from .errors import InputError, ScoringError, nearest
from .passages.pairs import Pair, score_in_parts, spans_of
from .passages.parts import WHOLE, Reading, ReadingOptions
from .passages.ranked import BLANK_SCORE, RankedDocument, RankResult, Scored, blanks_last, choose

# Also what is returned: users know it from here.
__all__ = [
    "BLANK_SCORE",
    "Pair",
    "RankResult",
    "RankedDocument",
    "Reranker",
    "Scored",
    "blanks_last",
    "choose",
    "score_in_parts",
]


# For rerankers that do not count: English has about 4.5 characters a token, and cross-encoders
# read 512 tokens of a document.
CHARACTERS_PER_TOKEN = 4
MOST_TOKENS = 512


class Limits(TypedDict, total=False):
    """What decides which scored documents are kept: see `Reranker.rank`."""

    threshold: float | Literal["native"] | None
    top_n: int | None
    min_docs: int


class RankOptions(Limits, ReadingOptions):
    """All that `Reranker.rank` takes."""


class Reranker(ABC):
    """Scores documents for a query, one by one, and keeps those above a threshold."""

    threshold: float | None = 0.0
    """The native one: what scores above it is relevant, by how the scores are made. None where nothing separates
    relevant from irrelevant scores (a cosine, BM25)."""

    long_documents: Literal["cut", "windows"] = "cut"
    """How `rank` reads documents that are too long for the model, unless it is told."""

    def with_instruction(self, instruction: str) -> Self:
        """The same, judging by an instruction of the caller; InputError if this reranker takes none."""
        raise InputError(
            f"An instruction was given, and {type(self).__name__} takes none. Leave it out."
        )

    def with_salt(self, salt: str) -> Self:
        """The same model; what it keeps of documents is found by callers with the same salt only."""
        return self

    @abstractmethod
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Relevance of each document to the query, in input order; above the native threshold means relevant."""

    def score_documents(
        self, query: str, documents: Sequence[str], *, show_progress: bool = False
    ) -> list[Scored]:
        """What `rank` sorts, in input order. Override it where there is more to say than a score.

        Raises:
            ScoringError: A document could not be scored.
        """
        return [Scored(score) for score in self.score(query, documents)]

    def identity(self) -> str:
        """Short hash of everything that decides a score; empty for what cannot tell."""
        return ""

    def score_pairs(self, pairs: Sequence[Pair | tuple[str, str]]) -> list[Scored]:
        """Score pairs of any queries and documents, as a service that joins the requests of many does.

        In input order, and equal to what `score` gives. Here query by query; override it where queries can share a
        batch. Plain tuples do as well: ``[("query", "document"), ...]``.

        Raises:
            InputError: This reranker cannot use a pair as it is.
            ScoringError: A pair could not be scored; its position in ``pairs`` is given.
        """
        pairs = as_pairs(pairs)
        if any(pair.max_tokens is not None for pair in pairs):
            raise InputError(
                f"{type(self).__name__} cannot cut documents after a number of tokens. Send them shorter."
            )
        places: dict[str, list[int]] = {}
        for place, pair in enumerate(pairs):
            places.setdefault(pair.query, []).append(place)
        found: dict[int, Scored] = {}
        for query, own in places.items():
            texts = [pairs[i].document for i in own]
            try:
                scored = blanks_last(texts, self.score_documents(query, texts))
            except ScoringError as error:
                raise ScoringError(error.reason, own[error.index]) from error
            found.update(zip(own, scored, strict=True))
        return [found[place] for place in range(len(pairs))]

    def token_counts(self, pairs: Sequence[Pair]) -> list[int]:
        """Tokens that the model runs to score each pair: the cost by which a service plans.

        Here an estimate from characters; override it where tokens can be counted.

        Raises:
            InputError: As `score_pairs`.
        """
        most = CHARACTERS_PER_TOKEN * MOST_TOKENS
        return [
            (len(pair.query) + min(len(pair.document), most)) // CHARACTERS_PER_TOKEN + 1
            for pair in pairs
        ]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        threshold: float | Literal["native"] | None = "native",
        top_n: int | None = None,
        min_docs: int = 0,
        show_progress: bool = False,
        **options: Unpack[ReadingOptions],
    ) -> RankResult:
        """Sort documents by score and keep the relevant ones.

        Args:
            query: The question.
            documents: Texts. Equal scores keep their order; those without text come last and never pass a threshold.
            threshold: Keep documents that score above it; by default this reranker's own (0 for RSRank). None keeps
                all: ranking alone. Minus infinity keeps all that have text.
            top_n: Keep at most this many, applied after the threshold.
            min_docs: Keep at least the best this many, even below the threshold.
            show_progress: Show a progress bar, if this reranker has one.
            **options: How documents are read: ``extract``, ``context``, ``heading``, ``long_documents``; see `Reading`.

        Raises:
            InputError: An argument out of range, or input that is not text.
            ScoringError: A document has no finite score; it is named, and nothing is returned.
        """
        documents, reading = as_list(documents), self._reading(options)
        limit = self.threshold if threshold == "native" else threshold
        check_limits(limit, top_n, min_docs)

        def score(pairs: Sequence[Pair]) -> list[Scored]:
            return self.score_documents(
                query, [pair.document for pair in pairs], show_progress=show_progress
            )

        pairs = [
            Pair(query, text, reading=how)
            for text, how in zip(documents, self._readings(documents, reading), strict=True)
        ]
        scored = score_in_parts(pairs, self.token_ends, score)
        return choose(
            query, documents, scored, limit, top_n=top_n, min_docs=min_docs, reading=reading
        )

    def _reading(self, options: ReadingOptions) -> Reading:
        """What is asked for; InputError if that is windows, and nobody counts tokens."""
        if unknown := sorted(options.keys() - ReadingOptions.__annotations__.keys()):
            raise TypeError(
                f"rank() has no argument {unknown[0]!r}.{nearest(unknown[0], RankOptions.__annotations__)}"
            )
        chosen: Any = {
            **options,
            "long_documents": options.get("long_documents") or self.long_documents,
        }
        reading = Reading(**chosen)
        if reading.long_documents == "windows":
            self.token_ends("")
        return reading

    def parts(self, documents: Sequence[str], **options: Unpack[ReadingOptions]) -> list[str]:
        """The texts that `rank` scores for documents, each once: what to read ahead of time."""
        documents, reading = as_list(documents), self._reading(options)
        parts = dict[str, None]()
        for index, how in enumerate(self._readings(documents, reading)):
            text = documents[index]
            for start, stop in spans_of(index, Pair("", text, reading=how), self.token_ends):
                parts[text[start:stop]] = None
        return list(parts)

    def _readings(self, documents: Sequence[str], reading: Reading) -> list[Reading]:
        """How each document is read: windows are for those that do not fit."""
        if not reading.in_windows:
            return [reading] * len(documents)
        return [reading if long else WHOLE for long in self.too_long(documents)]

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """Whether each document has more tokens than are read of it.

        Raises:
            InputError: As `token_ends`, or something is no text.
        """
        long = []
        for index, text in enumerate(documents):
            if not isinstance(text, str):
                raise InputError(f"Document {index} must be a string, got {type(text).__name__}.")
            ends, limit = self.token_ends(text)
            long.append(len(ends) > limit)
        return long

    def token_ends(self, document: str) -> tuple[Sequence[int], int]:
        """Where each token of a text ends, in characters, and how many of a document's are read at most.

        Raises:
            InputError: This reranker does not say.
        """
        raise InputError(
            f"{type(self).__name__} does not say where tokens end, so that documents can neither be read in windows "
            "nor be cut after a number of tokens. Leave long_documents='cut', or send shorter ones."
        )


def as_list(documents: Iterable[str]) -> list[str]:
    """Documents as a list, whatever iterable they came in; InputError for one string, or what is no iterable."""
    if isinstance(documents, (str, bytes)):
        raise InputError("documents must be a list of strings, got one string. Put it in a list.")
    if isinstance(documents, Mapping) or hasattr(
        documents, "columns"
    ):  # they would be read as the names in them
        raise InputError(
            f"documents must be a list of strings, got {type(documents).__name__}. Pass the texts in it."
        )
    try:
        return list(documents)
    except TypeError:
        raise InputError(
            f"documents must be a list of strings, got {type(documents).__name__}."
        ) from None


def as_pairs(pairs: Iterable[Pair | tuple[str, ...]]) -> list[Pair]:
    """Pairs, whatever tuples they came in; InputError where something is no pair."""
    found = []
    for place, pair in enumerate(pairs):
        if not (isinstance(pair, Pair) or (isinstance(pair, (tuple, list)) and len(pair) == 2)):
            raise InputError(f"Pair {place} must be (query, document), got {pair!r:.60}.")
        found.append(pair if isinstance(pair, Pair) else Pair(*pair))
    return found


def check_limits(
    threshold: float | Literal["native"] | None, top_n: int | None, min_docs: int
) -> None:
    """Refuse limits of `Reranker.rank` that are out of range, or contradict each other, with an InputError."""
    threshold = None if threshold == "native" else threshold
    for name, value, kinds in (
        ("threshold", threshold, (int, float, type(None))),
        ("top_n", top_n, (int, type(None))),
        ("min_docs", min_docs, (int,)),
    ):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InputError(
                f"{name} must be a number{' or None' if type(None) in kinds else ''}, got {value!r}."
            )
    if threshold is not None and math.isnan(threshold):
        raise InputError("threshold is NaN. Give a number, or None to rank without dropping.")
    if top_n is not None and top_n < 1:
        raise InputError(f"top_n must be at least 1 or None, got {top_n}.")
    if min_docs < 0:
        raise InputError(f"min_docs must be 0 or more, got {min_docs}.")
    if top_n is not None and min_docs > top_n:
        raise InputError(f"min_docs={min_docs} asks for more documents than top_n={top_n} allows.")
