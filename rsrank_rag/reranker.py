"""The contract of every reranker: implement ``score``, and inherit ``rank``."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import Self, Unpack

from .errors import InputError, ScoringError, check_choice, check_names, check_text
from .ranking.explanation import Explanation
from .ranking.pairs import Pair, parts_of, score_in_parts, spans_of
from .ranking.results import RankedDocument, RankResult, Scored, blanks_last, choose
from .ranking.rule import BLANK_SCORE, Fallback, Limits, Native, Rule
from .reading.documents import DocumentLike, InputDocument, as_documents
from .reading.parts import SECTION, WHOLE, LongDocuments, Reading, ReadingOptions
from .texts import CHARACTERS_PER_TOKEN

# Users import the types of results from here.
__all__ = [
    "BLANK_SCORE",
    "Fallback",
    "Limits",
    "Native",
    "Pair",
    "RankResult",
    "RankedDocument",
    "Reranker",
    "Rule",
    "Scored",
    "score_in_parts",
]

# For rerankers that do not count tokens: cross-encoders read 512 tokens of a document.
MOST_TOKENS = 512

# Metadata fields that are read by default.
TITLE = ("title",)

PairLike = Pair | tuple[str, ...]
"""A pair, or ``(query, document)``."""


Scale = Literal["raw", "normalised"]
"""Scores as the model gives them, or between 0 and 1; 0.5 is the native threshold."""


class RankOptions(Limits, ReadingOptions, total=False):
    """All options of `Reranker.rank`."""

    metadata_fields: Sequence[str]
    scores: Scale


@dataclass(frozen=True, slots=True)
class RankCall:
    """The checked arguments of one call of `Reranker.rank`.

    Attributes:
        query: The query.
        documents: The documents, with what is read before their texts.
        texts: What is read of each document. With ``extract``, each sentence is read by itself.
        reading: How they are read.
        options: The arguments that the caller has set.
    """

    query: str
    documents: Sequence[InputDocument]
    texts: Sequence[str]
    reading: Reading
    options: RankOptions

    @classmethod
    def of(
        cls,
        query: str,
        documents: Iterable[DocumentLike],
        options: RankOptions,
        long_documents: LongDocuments = "cut",
    ) -> Self:
        """Check arguments. ``long_documents`` is the reranker's default.

        Raises:
            InputError: An argument out of range, or input that is not text.
            TypeError: There is no such argument.
        """
        check_names("rank", options, RankOptions.__annotations__)
        check_text("A query", query)
        check_choice("scores", options.get("scores", "raw"), "raw", "normalised")
        fields = options.get("metadata_fields", TITLE)
        if isinstance(fields, str):
            raise InputError("metadata_fields must be a list of names, such as ['title'].")
        # A limit that is out of range is an error before anything is scored or sent.
        Rule(threshold=0.0).with_limits(options)
        reading = Reading.of(options, long_documents)
        read = as_documents(documents, () if reading.extract else fields)
        return cls(query, read, [document.read for document in read], reading, options)

    def result(self, scored: Sequence[Scored], native: Rule, query_truncated: bool) -> RankResult:
        """The documents with their scores, kept or dropped by the rule.

        Args:
            scored: One for each document.
            native: The reranker's own rule.
            query_truncated: See `RankResult`.

        Raises:
            InputError: There are more or fewer scores than documents.
            ScoringError: A document has no finite score; its position is given.
        """
        result = choose(
            self.query,
            self.documents,
            blanks_last(self.texts, scored),
            native.with_limits(self.options),
            reading=self.reading,
            query_truncated=query_truncated,
        )
        if self.options.get("scores") == "normalised":
            return result.normalised(native.threshold)
        return result


class Reranker(ABC):
    """Scores documents for a query, one by one, and keeps those that its rule keeps."""

    threshold: float | None = 0.0
    """The native threshold: a score above it means relevant. None where no threshold separates
    relevant from irrelevant scores (a cosine, BM25)."""

    max_gap: float | None = None
    """The native gap: documents further below the best one are dropped; None for no gap."""

    fallback: Fallback | None = None
    """What is kept of a list in which no document scores above the threshold; None for nothing."""

    labelled_data: tuple[str, ...] = ()
    """Names of the labelled sets that trained the weights or chose the threshold."""

    long_documents: LongDocuments = "cut"
    """How `rank` reads documents that are too long for the model, by default."""

    def with_salt(self, salt: str) -> Self:
        """The same reranker with a prefix cache that only callers with the same salt share."""
        return self

    @abstractmethod
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Score documents for one query.

        Args:
            query: The query.
            documents: The documents.

        Returns:
            One finite score for each document, in input order. A score above `threshold` means
            that the document is relevant.

        Raises:
            InputError: This reranker cannot use the query.
            ScoringError: A document could not be scored; its position is given.
        """

    def score_pairs(self, pairs: Sequence[PairLike]) -> list[Scored]:
        """Score pairs of any queries and documents, in input order. `rank` and the service call it.

        Documents are read whole, whatever `Pair.reading` says. This method scores one query after
        the other. A subclass can override it to share batches between queries.

        Args:
            pairs: Pairs, or tuples: ``[("query", "document"), ...]``.

        Raises:
            InputError: This reranker cannot use a pair.
            ScoringError: A pair could not be scored; its position in ``pairs`` is given.
        """
        pairs = as_pairs(pairs)
        scored: dict[int, Scored] = {}
        for query, places in by_query(pairs).items():
            try:
                scores = self.score_documents(query, [pairs[place].document for place in places])
            except ScoringError as error:
                error.move_to(places[error.index])
                raise
            scored.update(zip(places, scores, strict=True))
        return [scored[place] for place in range(len(pairs))]

    def score_documents(self, query: str, documents: Sequence[str]) -> list[Scored]:
        """Score documents for one query, and say how each document was read.

        `score_pairs` calls this method once for each query. A subclass overrides it to fill other
        fields of `Scored` than the score.

        Raises:
            InputError: `score` returned more or fewer scores than there are documents.
        """
        scores = self.score(query, documents)
        return blanks_last(documents, [Scored(score) for score in scores])

    def token_costs(self, pairs: Sequence[Pair]) -> list[int]:
        """The cost of scoring each pair, in tokens.

        A pair that costs N tokens takes about as long as running N tokens. A service plans by these
        costs. This method estimates them from characters. Override it where tokens can be counted.

        Raises:
            InputError: As `score_pairs`.
        """
        costs = []
        for pair in pairs:
            document = min(len(pair.document), CHARACTERS_PER_TOKEN * MOST_TOKENS)
            costs.append((len(pair.query) + document) // CHARACTERS_PER_TOKEN + 1)
        return costs

    def rank(
        self,
        query: str,
        documents: Iterable[DocumentLike],
        **options: Unpack[RankOptions],
    ) -> RankResult:
        """Sort documents by score and keep the relevant ones.

        The paper's rule is ``max_gap=None, fallback=None``: each score decides by itself.

        Args:
            query: The question. Of one that is too long for the model, the first and the last part
                are read, and `RankResult.query_truncated` says so.
            documents: Texts, or dictionaries or objects with a text; see `DocumentLike`. Their ids
                and metadata come back. Equal scores keep their order. Texts of white space come
                last and never pass a threshold.
            **options: These keywords:

                - ``threshold``: Keep documents that score above it; by default this reranker's own
                  (0 for RSRank). None keeps all: ranking alone.
                - ``max_gap``: Of these, keep documents at most so far below the best one; by
                  default this reranker's own. None for no gap.
                - ``fallback``: What is kept if no document scores above the threshold; by default
                  this reranker's own. Such documents are `RankedDocument.weak`. None for nothing.
                - ``top_n``: Keep at most this many, the best ones.
                - ``metadata_fields``: Metadata that are read before the text, one value a line;
                  by default the title. A title that is none (a file name) is not read.
                - ``scores``: "raw" (default), or "normalised": between 0 and 1, where 0.5 is the
                  native threshold. Limits are always raw.
                - ``extract``, ``context``, ``long_documents``, ``max_characters``: how
                  documents are read; see `Reading`.

        Raises:
            InputError: An argument out of range, or input that is not text.
            ScoringError: A document has no finite score; it is named, and nothing is returned.
            TypeError: There is no such argument.
        """
        call = RankCall.of(query, documents, options, self.long_documents)
        native = self.native_rule
        # A limit without effect is an error before anything is scored.
        native.with_limits(options)
        read = self.fit_query(query)
        pairs = self._pairs(read, call.texts, call.reading)
        if all(pair.reading == WHOLE and len(pair.document) <= SECTION for pair in pairs):
            scored = self.score_pairs(pairs)
        else:
            scored = score_in_parts(pairs, self.token_ends, self.score_pairs)
        return call.result(scored, native, read != query)

    @property
    def native_rule(self) -> Rule:
        """The rule of `rank` without arguments."""
        return Rule(self.threshold, self.max_gap, self.fallback)

    def fit_query(self, query: str) -> str:
        """The query as `rank` reads it: of one that is too long, the first and the last part.

        This method returns the whole query, for rerankers that take queries of any length.
        """
        return query

    def parts(
        self, documents: Iterable[DocumentLike], **options: Unpack[ReadingOptions]
    ) -> list[str]:
        """The texts that `rank` scores for documents, each once, for `RSRank.index`.

        Texts of white space are left out, because they get `BLANK_SCORE` without the model.
        """
        check_names("parts", options, ReadingOptions.__annotations__)
        reading = Reading.of(options, self.long_documents)
        parts = dict[str, None]()
        texts = [one.read for one in as_documents(documents, () if reading.extract else TITLE)]
        for pair in self._pairs("", texts, reading):
            for part in parts_of(pair, spans_of(pair, self.token_ends)):
                if part.document.strip():
                    parts[part.document] = None
        return list(parts)

    def _pairs(self, query: str, documents: Sequence[str], reading: Reading) -> list[Pair]:
        """Pairs of a query and documents; documents that fit the model are not read in windows.

        A document of more than `SECTION` characters is cut into sections first, as in the service.
        """
        pairs = [Pair(query, text, reading=reading) for text in documents]
        if reading.in_windows:
            for place, is_long in enumerate(self.too_long(documents)):
                if not is_long and len(documents[place]) <= SECTION:
                    pairs[place] = Pair(query, documents[place])
        return pairs

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """Whether each document has more tokens than the model reads of a document.

        Raises:
            InputError: As `token_ends`.
        """
        long = []
        for text in documents:
            ends, limit = self.token_ends(text)
            long.append(len(ends) > limit)
        return long

    def explain(self, query: str, document: str) -> Explanation:
        """Take a score apart; see `RSRank.explain`.

        Raises:
            InputError: This reranker cannot take its scores apart.
        """
        raise InputError("This reranker cannot take its scores apart. RSRank models can.")

    def stats(self) -> dict[str, int]:
        """Counters of the prefix cache since this reranker was loaded; none without a cache."""
        return {}

    def token_ends(self, document: str) -> tuple[Sequence[int], int]:
        """Where each token of a text ends, in characters, and how many tokens are read at most.

        Raises:
            InputError: This reranker does not count tokens.
        """
        raise InputError(
            f"{type(self).__name__} does not say where tokens end, so that documents can neither "
            "be read in windows nor be cut after a number of tokens. Leave long_documents='cut', "
            "or send shorter ones."
        )


def by_query(pairs: Sequence[Pair]) -> dict[str, list[int]]:
    """The places of each query's pairs."""
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair.query, []).append(place)
    return places


def as_list(documents: Iterable[DocumentLike]) -> list[str]:
    """What is read of documents: their texts, after their titles.

    Raises:
        InputError: As `as_documents`.
    """
    return [document.read for document in as_documents(documents, TITLE)]


def as_pairs(pairs: Iterable[PairLike]) -> list[Pair]:
    """Pairs, some of which may be tuples.

    Raises:
        InputError: An entry is no pair and no tuple of two, or holds what is not text.
    """
    result = []
    for place, pair in enumerate(pairs):
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            pair = Pair(*pair)
        if not isinstance(pair, Pair):
            raise InputError(f"Pair {place} must be (query, document), got {pair!r:.60}.")
        if not (isinstance(pair.query, str) and isinstance(pair.document, str)):
            check_text("A query", pair.query)
            check_text(f"Document {place}", pair.document)
        result.append(pair)
    return result
