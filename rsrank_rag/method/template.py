"""Texts to token ids: instruction, document, separator, query, suffix.

The parts are tokenised apart and their ids joined, so that no merge of two parts can misalign the
query's tokens between the two runs. The instruction is the same in both runs and never empty: the
first token of a sequence is an attention sink with abnormal values, which cancels only if both runs
share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from ..errors import BackboneError, InputError
from ..texts import CHARACTERS_PER_TOKEN, encodable
from .vocabulary import VocabularyCheck

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

# Positions that are free for the query, so that the query does not decide where a document is cut.
QUERY_RESERVE = 512

# Of a long document, this many characters are tokenised first for each token that the model can
# read, which is enough for most texts.
BEGINNING_PER_TOKEN = 2 * CHARACTERS_PER_TOKEN

# Tokens at the end of a cut text that may differ from those of the whole text. WordPiece splits
# words of at most 100 characters; merges of BPE reach less far.
CUT_MARGIN = 128

# Characters of recent documents whose ids are remembered, because a call counts tokens before it
# scores. A character takes at most 4 bytes, and an id 36.
RECENT_CHARACTERS = 500_000


class Template(BaseModel, extra="forbid", frozen=True):
    """The fixed text around document and query. It belongs to the artifact: B is trained with it.

    Special tokens written in these parts (``[CLS]``, ``<|im_start|>``) are recognised; in documents
    and queries they are plain text.
    """

    instruction: str = Field(
        default="Judge whether the document helps to answer the query.\nDocument: ", min_length=1
    )
    separator: str = "\nQuery: "
    query_start: str = ""
    """Text before the query that is never scored, such as an encoder's [CLS]."""
    suffix: str = ""
    """Text after the query."""
    positions: Literal["query", "suffix", "query+suffix"] = "query"
    """The scored tokens: those of the query, of the suffix, or of both."""


@dataclass(frozen=True)
class TokenisedDocument:
    """Ids of ``instruction + document + separator``.

    ``truncated``: the document's end was cut off. ``empty``: it has no text.
    """

    ids: tuple[int, ...]
    truncated: bool
    empty: bool


@dataclass(frozen=True)
class TokenisedQuery:
    """Ids of ``query_start + query + suffix``; the ``length`` ids from ``start`` on are scored."""

    ids: tuple[int, ...]
    start: int
    length: int

    @property
    def scored(self) -> slice:
        """The scored tokens."""
        return slice(self.start, self.start + self.length)


def private_copy(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, *, special_tokens: bool
) -> Tokenizer:
    """A copy that no other code reconfigures.

    Args:
        tokenizer: A fast tokenizer, of transformers or of tokenizers.
        special_tokens: Whether special tokens written in a text are recognised.

    Raises:
        BackboneError: It is not a fast tokenizer.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise BackboneError(
            f"{type(tokenizer).__name__} is not a fast tokenizer (no tokenizers backend), so its "
            "text parts cannot be tokenised safely under threads. Convert it: save the fast "
            "version in the model's folder."
        )
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = not special_tokens
    return copy


class PromptTokenizer:
    """Tokenises the parts of a `Template` with private copies of a fast tokenizer.

    The copies are never reconfigured. To change padding or truncation of a tokenizer that threads
    share raises "Already borrowed".

    Args:
        tokenizer: The backbone's tokenizer (must be a fast one).
        template: Text around document and query.
        max_length: Positions the model has; for an encoder, in each of its two parts.
        shared_positions: True where document and query share one sequence of positions, as in
            causal models.

    Raises:
        InputError: The template has no instruction, scores an empty suffix, or leaves no positions
            for a document.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | Tokenizer,
        template: Template,
        *,
        max_length: int,
        shared_positions: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length
        self.shared_positions = shared_positions
        self._recent: dict[str, tuple[int, ...]] = {}
        self._text = private_copy(tokenizer, special_tokens=False)
        self._template = private_copy(tokenizer, special_tokens=True)
        self.words = VocabularyCheck(self._text)
        self.instruction = self._template_ids(template.instruction)
        self.separator = self._template_ids(template.separator)
        self._query_start = self._template_ids(template.query_start)
        self._suffix = self._template_ids(template.suffix)
        if not self.instruction:
            raise InputError(
                f"The template's instruction {template.instruction!r} has no tokens; it needs one."
            )
        if "suffix" in template.positions and not self._suffix:
            raise InputError(
                f"The template scores its suffix, but {template.suffix!r} has no tokens."
            )
        # Ids of the template before the query, without a document.
        self.null_prefix = self.instruction + self.separator
        self.overhead = len(self.null_prefix)
        self.after_document = len(self.separator)
        # The most tokens that a query may have. If document and query share the positions, the
        # template around the document and one token of the document have some, too.
        self.query_limit = max_length - len(self._query_start) - len(self._suffix)
        if shared_positions:
            self.query_limit -= self.overhead + 1
        if self.query_limit < 1 or max_length <= self.overhead:
            taken = self.overhead + len(self._query_start) + len(self._suffix)
            raise InputError(
                f"max_length={max_length} leaves no room for a document and a query: the template "
                f"alone has {taken} tokens. Give a larger max_length."
            )

    def _template_ids(self, text: str) -> tuple[int, ...]:
        # Some tokenizers make a token of an empty text.
        return tuple(self._template.encode(text, add_special_tokens=False).ids) if text else ()

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self._text.get_vocab_size())

    def document_limit(self, query_length: int) -> int:
        """Tokens that a document may have with a query of so many tokens."""
        limit = self.max_length - self.overhead
        if self.shared_positions:
            limit -= max(query_length, min(QUERY_RESERVE, self.max_length // 4))
        return max(limit, 1)

    def token_ends(self, document: str) -> tuple[list[int], int]:
        """Where each token of a text ends, in characters, and how many tokens are read at most.

        The second number is `document_limit` with a short query.
        """
        (encoded,) = self._encoded([document])
        return [stop for _, stop in encoded.offsets], self.document_limit(0)

    def span_of(self, document: str, length: int, start: int, stop: int) -> tuple[int, int]:
        """Some of the ``length`` positions of a document's prompt as a span of its characters.

        The span has no white space around it, and nothing of the template.
        """
        token_ends, _ = self.token_ends(document)
        # How far the document has been read before each position.
        ends = [0] * (len(self.instruction) + 1) + token_ends[: length - self.overhead]
        first = ends[min(start, len(ends) - 1)]
        part = document[first : ends[min(stop, len(ends) - 1)]]
        first += len(part) - len(part.lstrip())
        return first, first + len(part.strip())

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """Whether each document has more tokens than are read of it beside a short query.

        A query is short if it takes at most `QUERY_RESERVE` tokens or a quarter of the positions.
        """
        limit = self.document_limit(0)
        return [len(ids) > limit for ids in self._document_ids(documents)]

    def _document_ids(self, documents: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of documents; of a document that is too long, one more than the limit.

        The ids of recent documents are remembered.
        """
        # Other threads may replace the dictionary, so it is not changed once it is an attribute.
        recent = dict(self._recent)
        missing = [text for text in dict.fromkeys(documents) if text not in recent]
        limit = self.document_limit(0)
        if missing:
            for text, ids in zip(missing, self.encode_beginnings(missing, limit), strict=True):
                recent[text] = ids[: limit + 1]
        ids_of_documents = [recent[text] for text in documents]
        characters = sum(map(len, recent))
        while characters > RECENT_CHARACTERS:
            oldest = next(iter(recent))
            characters -= len(oldest)
            del recent[oldest]
        self._recent = recent
        return ids_of_documents

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of texts by themselves."""
        return [tuple(encoded.ids) for encoded in self._encoded(texts)]

    def _encoded(self, texts: Sequence[str]) -> list[Encoding]:
        try:
            return self._text.encode_batch(texts, add_special_tokens=False)
        # A text has half of a surrogate pair.
        except (TypeError, UnicodeError):
            plain = [encodable(text) for text in texts]
            return self._text.encode_batch(plain, add_special_tokens=False)

    def encode_beginnings(self, texts: Sequence[str], count: int) -> list[tuple[int, ...]]:
        """Ids of texts; of a long text only of a beginning that has more than ``count`` tokens.

        The first ``count`` ids are those of the whole text. Texts are cut before they are
        tokenised because a token takes some 400 bytes, so that 10 MB of text take gigabytes.
        No number of characters is enough for every text (white space has no tokens, and WordPiece
        makes one token of any very long word), so the beginning grows until it has enough tokens.
        """
        enough = count + CUT_MARGIN
        limit = BEGINNING_PER_TOKEN * enough
        ids = self.encode([text[:limit] for text in texts])
        for index, text in enumerate(texts):
            length = limit
            while len(ids[index]) < enough and length < len(text):
                length *= 4
                ids[index] = self.encode([text[:length]])[0]
        return ids

    def text_of(self, ids: Sequence[int]) -> list[str]:
        """Readable text of each id."""
        return [
            self._text.decode([i], skip_special_tokens=False) or str(self._text.id_to_token(i))
            for i in ids
        ]

    def fit_query(self, query: str) -> str:
        """The query; of one that is too long, the first and the last part.

        Where document and query share the model's positions, half of them stay for the document.
        """
        ends, _ = self.token_ends(query)
        if len(ends) <= self.query_limit:
            return query
        query = encodable(query)
        part = self.query_limit // (4 if self.shared_positions else 2)
        cut = query
        # The two parts, joined and tokenised again, may have more tokens than before.
        while part and len(self.encode([cut])[0]) > self.query_limit:
            cut = f"{query[: ends[part - 1]]}\n{query[ends[-part - 1] :]}"
            part -= 1
        return cut

    def query(self, query: str) -> TokenisedQuery:
        """Tokenise a query.

        Raises:
            InputError: It has no tokens, or does not fit the model by itself.
        """
        ids = self.encode([query])[0]
        if not ids:
            raise InputError(
                f"The query {query!r} has no tokens, so nothing can be scored. "
                "Give a non-empty query."
            )
        first = len(self._query_start)
        last = first + len(ids)
        every = (*self._query_start, *ids, *self._suffix)
        if len(ids) > self.query_limit:
            raise InputError(
                f"The query has {len(ids)} tokens; with the template it needs "
                f"{self.max_length + len(ids) - self.query_limit} positions and the model has "
                f"{self.max_length}. Shorten the query, or use rank, which reads both of its ends."
            )
        positions = self.template.positions
        start = last if positions == "suffix" else first
        stop = last if positions == "query" else len(every)
        return TokenisedQuery(every, start, stop - start)

    def documents(self, documents: Sequence[str], query_length: int) -> list[TokenisedDocument]:
        """Tokenise documents; a document that is too long is cut at its end.

        The place of the cut does not depend on the query if the query has at most `QUERY_RESERVE`
        tokens and at most a quarter of the model's positions.

        Args:
            documents: Texts.
            query_length: Tokens of the query.
        """
        limit = self.document_limit(query_length)
        tokenised = []
        for text, ids in zip(documents, self._document_ids(documents), strict=True):
            prompt = (*self.instruction, *ids[:limit], *self.separator)
            empty = not ids or not text.strip()
            tokenised.append(TokenisedDocument(prompt, len(ids) > limit, empty))
        return tokenised
