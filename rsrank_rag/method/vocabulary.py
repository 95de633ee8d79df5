"""Whether texts are written in the words of a model's vocabulary."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .batches import Row

logger = logging.getLogger(__name__)

# So many pieces of words are judged together. In English, 0.6 to 0.9 of them are whole words, in
# German, French, Polish or Hindi 0 to 0.3. Of 4,600 English queries with three passages each, from
# 33 labelled sets, two were below 0.35: lists of foreign names.
PIECES = 100
LEAST_WHOLE = 0.35

# Documents of a call that are counted.
ROWS = 3


class VocabularyCheck:
    """Warns once if most words of queries or of documents are not in a WordPiece vocabulary.

    Byte-level vocabularies, as decoders have them, serve many languages and are not checked.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        prefix: str = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._is_on = bool(prefix)
        words = []
        pieces = []
        continuations = []
        for number in range(tokenizer.get_vocab_size() if prefix else 0):
            token = tokenizer.id_to_token(number) or ""
            # A single letter is no word. Numbers and punctuation are no pieces of words.
            words.append(token.isalpha() and (len(token) > 1 or token in "ai"))
            pieces.append(token == unknown or token.removeprefix(prefix).isalpha())
            continuations.append(pieces[-1] and token.startswith(prefix))
        self._words = np.array(words)
        self._pieces = np.array(pieces)
        self._continuations = np.array(continuations)
        # Pieces of words so far, and those that are whole words.
        self._counts = {"queries": np.zeros(2), "documents": np.zeros(2)}

    def check(self, rows: Sequence["Row"]) -> None:
        """Count the pieces of words of a call's first query and first documents."""
        texts = {
            "queries": [row.query.ids for row in rows[:1]],
            "documents": [row.document for row in rows[:ROWS]],
        }
        for name, ids_of_texts in texts.items():
            if not self._is_on:
                return
            ids = np.fromiter(chain.from_iterable(ids_of_texts), dtype=np.int64)
            whole = self._words[ids]
            whole[:-1] &= ~self._continuations[ids[1:]]
            counts = self._counts[name]
            counts += np.count_nonzero(self._pieces[ids]), np.count_nonzero(whole)
            if counts[0] < PIECES:
                continue
            if counts[1] < LEAST_WHOLE * counts[0]:
                self._is_on = False
                logger.warning(
                    "Most words of the %s are not in the model's vocabulary, as if they were in "
                    "another language than the model's. Their scores mean little. For other "
                    "languages, use an artifact of a language model that was trained on them, such "
                    "as a decoder.",
                    name,
                )
            # Later texts are judged by themselves.
            counts[:] = 0
