"""How a document and a query become one token sequence: instruction, document, separator, query, suffix.

The parts are tokenised apart and their ids joined, so that no merge over a seam can misalign the
query's tokens between the two runs. The instruction is the same in both runs and never empty: the first
token of a sequence is an attention sink with abnormal values, which cancels only if both runs share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from ..errors import BackboneError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

QUERY_RESERVE = 512  # positions kept free for the query, so that where a document is cut does not depend on the query

# A document's beginning of this many characters for each token that is read is tokenised first.
# English has about 4.5 characters a token.
CHARACTERS_PER_TOKEN = 8

# Tokens at the end of a cut text that may differ from those of the whole text. WordPiece splits
# words of at most 100 characters; merges of BPE reach less far.
CUT_MARGIN = 128


# Documents whose ids wait to be read; calls that fail leave theirs behind.
MOST_FITTING = 1024


class Template(BaseModel, extra="forbid", frozen=True):
    """The fixed text around document and query. It belongs to the artifact: B is trained with it.

    Special tokens written in these parts (``[CLS]``, ``<|im_start|>``) are recognised; in documents and
    queries they are plain text.
    """

    instruction: str = Field(
        default="Judge whether the document helps to answer the query.\nDocument: ", min_length=1
    )
    separator: str = "\nQuery: "
    query_start: str = Field(
        default="", description="Run before the query and never scored, as an encoder's [CLS]."
    )
    suffix: str = ""
    positions: Literal["query", "suffix", "query+suffix"] = "query"
    instructed: str | None = Field(
        default=None,
        exclude_if=lambda value: value is None,  # as in artifacts of earlier releases
        pattern=r"\{instruction\}",
        description="The instruction where a call brings its own, which stands at {instruction}; None: no call may.",
    )

    def with_instruction(self, instruction: str) -> Template:
        """The template for calls that bring this instruction; InputError if none may."""
        if self.instructed is None:
            raise InputError(
                "An instruction was given, and this artifact takes none: B, and zero as its threshold, are calibrated "
                "for one prompt. Leave the instruction out, or load an artifact whose template has a place for it."
            )
        if not instruction.strip():
            raise InputError("An instruction was given, and it is blank. Leave it out.")
        return self.model_copy(
            update={"instruction": self.instructed.replace("{instruction}", instruction)}
        )


@dataclass(frozen=True)
class TokenisedDocument:
    """Ids of ``instruction + document + separator``, and whether the document's end was cut off."""

    ids: tuple[int, ...]
    truncated: bool
    empty: bool


@dataclass(frozen=True)
class TokenisedQuery:
    """Ids of ``query_start + query + suffix``, of which those from ``start`` up to ``stop`` are scored."""

    ids: tuple[int, ...]
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of scored tokens, T."""
        return self.stop - self.start

    @property
    def scored(self) -> slice:
        """The scored ones."""
        return slice(self.start, self.stop)


def clean(text: str) -> str:
    r"""Join surrogate pairs and replace lone surrogates by U+FFFD: tokenizers accept only valid Unicode.

    >>> clean("a\ud83d\ude00b\ud83d")
    'a😀b�'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def private_copy(tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool) -> Tokenizer:
    """A copy that nobody else reconfigures; with or without an eye for special tokens written in the text."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BackboneError(
            f"{type(tokenizer).__name__} is not a fast tokenizer (no tokenizers backend), so its text parts "
            "cannot be tokenised safely under threads. Convert it: save the fast version beside the model."
        )
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = not special_tokens
    return copy


def _check_texts(documents: Sequence[str]) -> None:
    for index, text in enumerate(documents):
        if not isinstance(text, str):
            raise InputError(f"Document {index} must be a string, got {type(text).__name__}.")


class PromptTokenizer:
    """Tokenises the parts of a `Template` with private copies of a fast tokenizer.

    They are never reconfigured: changing padding or truncation on a shared one raises "Already borrowed" under threads.

    Args:
        tokenizer: The backbone's tokenizer (must be a fast one).
        template: Text around document and query.
        max_length: Positions the model has; for an encoder, in each of its two parts.
        shared_positions: True where document and query share one sequence of positions (causal models).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template,
        *,
        max_length: int,
        shared_positions: bool,
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.max_length, self.shared_positions = max_length, shared_positions
        self._fitting: dict[str, tuple[int, ...]] = {}
        self._text = private_copy(tokenizer, special_tokens=False)
        parts = private_copy(tokenizer, special_tokens=True)
        self.instruction, self.separator, self._query_start, self._suffix = (
            tuple(parts.encode(text, add_special_tokens=False).ids) if text else ()
            for text in (
                template.instruction,
                template.separator,
                template.query_start,
                template.suffix,
            )
        )
        if not self.instruction:
            raise InputError(
                f"The template's instruction {template.instruction!r} has no tokens; it needs one."
            )
        if "suffix" in template.positions and not self._suffix:
            raise InputError(
                f"The template scores its suffix, but {template.suffix!r} has no tokens."
            )
        self.overhead = len(self.instruction) + len(self.separator)
        self.after_document = len(self.separator)
        if max_length <= self.overhead + len(self._suffix):
            raise InputError(
                f"max_length={max_length} leaves no room for a document: the template alone has "
                f"{self.overhead + len(self._suffix)} tokens. Raise it."
            )

    @property
    def null_prefix(self) -> tuple[int, ...]:
        """Ids of the template before the query, without a document: the query-only run."""
        return self.instruction + self.separator

    def room(self, query_length: int) -> int:
        """Tokens that a document may have beside a query."""
        room = self.max_length - self.overhead
        if self.shared_positions:
            room -= max(query_length, min(QUERY_RESERVE, self.max_length // 4))
        return max(room, 1)

    def token_ends(self, document: str) -> tuple[list[int], int]:
        """Where each token of a text ends, in characters, and how many of a document are read beside a short query."""
        encoded = self._text.encode(clean(document), add_special_tokens=False)
        return [stop for _, stop in encoded.offsets], self.room(0)

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """Whether each document has more tokens than are read of it beside a short query.

        The ids of those that fit are held until `documents` takes them, so that a document is
        tokenised once. InputError names an entry that is no string.
        """
        _check_texts(documents)
        limit = self.room(0)
        long = []
        if len(self._fitting) > MOST_FITTING:
            self._fitting.clear()
        for text, ids in zip(documents, self.encode_beginnings(documents, limit), strict=True):
            long.append(len(ids) > limit)
            if len(ids) <= limit:
                self._fitting[text] = ids
        return long

    def _document_ids(self, documents: Sequence[str], room: int) -> list[tuple[int, ...]]:
        """Ids of documents: those that `too_long` holds, and the others tokenised now.

        Of a document with more than ``room`` tokens, at least the first ``room`` ids.
        """
        held = [self._fitting.pop(text, None) for text in documents]
        missing = [text for text, ids in zip(documents, held, strict=True) if ids is None]
        encoded = iter(self.encode_beginnings(missing, room))
        return [next(encoded) if ids is None else ids for ids in held]

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of texts by themselves."""
        cleaned = [clean(text) for text in texts]
        return [
            tuple(item.ids) for item in self._text.encode_batch(cleaned, add_special_tokens=False)
        ]

    def encode_beginnings(self, texts: Sequence[str], count: int) -> list[tuple[int, ...]]:
        """Ids of texts; of a long text only of a beginning that has more than ``count`` tokens.

        The first ``count`` ids are those of the whole text. Texts are cut before they are
        tokenised because a token takes some 400 bytes, so that 10 MB of text take gigabytes.
        No number of characters is enough for every text (white space has no tokens, and WordPiece
        makes one token of any very long word), so the beginning grows until it has enough tokens.
        """
        enough = count + CUT_MARGIN
        limit = CHARACTERS_PER_TOKEN * enough
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

    def query(self, query: str) -> TokenisedQuery:
        """Tokenise a query; InputError if it is no string, has no tokens, or does not fit the model by itself."""
        if not isinstance(query, str):
            raise InputError(f"A query must be a string, got {type(query).__name__}.")
        own = self.encode([query])[0]
        if not own:
            raise InputError(
                f"The query {query!r} has no tokens, so nothing can be scored. Give a non-empty query."
            )
        ids = (*self._query_start, *own, *self._suffix)
        length = len(ids) + (self.overhead + 1 if self.shared_positions else 0)
        if length > self.max_length:
            raise InputError(
                f"The query has {len(own)} tokens; with the template it needs {length} positions and the model has "
                f"{self.max_length}. Shorten the query: it is never cut, because that would change what is asked."
            )
        first, last = len(self._query_start), len(self._query_start) + len(own)
        positions = self.template.positions
        return TokenisedQuery(
            ids,
            last if positions == "suffix" else first,
            last if positions == "query" else len(ids),
        )

    def documents(
        self, documents: Sequence[str], query_length: int, *, max_tokens: int | None = None
    ) -> list[TokenisedDocument]:
        """Tokenise documents; each that is too long is cut at its end, or after ``max_tokens`` of its own.

        Up to `QUERY_RESERVE` (or a quarter of the model's positions), the query's length does not change where.
        InputError names an entry that is no string.
        """
        _check_texts(documents)
        room = self.room(query_length)
        room = room if max_tokens is None else min(room, max_tokens)
        before, after = self.instruction, self.separator
        return [
            TokenisedDocument(
                (*before, *ids[:room], *after), len(ids) > room, not (ids and text.strip())
            )
            for text, ids in zip(documents, self._document_ids(documents, room), strict=True)
        ]
