"""Whether texts are written in the words of a model's vocabulary."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# So many pieces of words are judged together. In English, 0.1 to 0.4 of them belong to words that
# are not in the vocabulary, in German, French, Polish or Hindi 0.7 to 1. Of 4,600 English queries
# with three passages each, from 33 labelled sets, two were above 0.65: lists of foreign names.
PIECES = 100
MOST_BROKEN = 0.65

# Rows of a call that are counted.
ROWS = 3

# Kinds of tokens: no word (numbers, punctuation), a word or the beginning of one, a single letter
# or an unknown character, and the continuation of a word.
OTHER, WORD, LETTER, CONTINUATION = range(4)


class VocabularyCheck:
    """Warns once if most words of queries or of documents are not in a WordPiece vocabulary.

    Byte-level vocabularies, as decoders have them, serve many languages and are not checked.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)
        self._is_done = not prefix
        self._kinds = np.zeros(0, dtype=np.int8)
        if prefix:
            tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
            unknown = getattr(tokenizer.model, "unk_token", None)
            self._kinds = np.array([_kind(token, prefix, unknown) for token in tokens])
        # Pieces of words so far, and those of broken words.
        self._counts = {"queries": np.zeros(2), "documents": np.zeros(2)}

    def check(self, name: str, texts: Sequence[Sequence[int]]) -> None:
        """Count the ids of some texts; ``name`` is "queries" or "documents"."""
        if self._is_done:
            return
        ids = np.fromiter(chain.from_iterable(texts[:ROWS]), dtype=np.int64)
        kinds = self._kinds[ids]
        # A word that goes on is no word of the vocabulary.
        is_begun = (kinds[:-1] == WORD) & (kinds[1:] == CONTINUATION)
        counts = self._counts[name]
        counts[0] += np.count_nonzero(kinds)
        counts[1] += np.count_nonzero(is_begun) + np.count_nonzero(kinds >= LETTER)
        pieces, broken = counts
        if pieces >= PIECES and broken > MOST_BROKEN * pieces:
            self._is_done = True
            logger.warning(
                "Most words of the %s are not in the model's vocabulary, as if they were in "
                "another language than the model's. Their scores mean little. For other languages, "
                "use an artifact of a language model that was trained on them, such as a decoder.",
                name,
            )
        elif pieces >= PIECES:
            # Later texts are judged by themselves.
            counts[:] = 0


def _kind(token: str, prefix: str, unknown: str | None) -> int:
    if token == unknown:
        return LETTER
    if token.startswith(prefix):
        return CONTINUATION if token.removeprefix(prefix).isalpha() else OTHER
    if not token.isalpha():
        return OTHER
    return LETTER if len(token) == 1 and token not in "ai" else WORD
