"""The embedded tokens of an encoder, which its graphs take.

Axes: N rows, S tokens of a text, C hidden size.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ...method.arrays import Numbers
from ...method.batches import Ids
from ...method.prefix import attention_band

WEIGHTS = "model.safetensors"
WORDS = "embeddings.word_embeddings.weight"
PLACES = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"

# What is added to the attention of tokens that are seen, and of others.
ZERO = np.float32(0)
HIDDEN = np.float32(-1e9)


class Embeddings:
    """The tables of words and positions; ``folder`` holds the encoder's weights."""

    def __init__(self, folder: Path) -> None:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            # The table stays in the dtype of its file: it is nearly half of the weights.
            self.words = file.get_tensor(WORDS)
            places, types = (file.get_tensor(name).astype(np.float32) for name in (PLACES, TYPES))
        self.places = places + types[0]

    def feeds(
        self, texts: Sequence[Ids], attention_window: int | None, *, banded: bool = True
    ) -> dict[str, Numbers]:
        """The inputs of `Encoder.alone`: embedded tokens with padding, lengths, and the bias.

        Args:
            texts: Token ids of N texts.
            attention_window: As in `LanguageModel`; without it, there is no bias.
            banded: Whether tokens attend to this window only, or to all of their text.
        """
        lengths = np.array(list(map(len, texts)), np.int32)
        longest = int(lengths.max())
        ids = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        embedded = self.words[ids].astype(np.float32) + self.places[:longest]
        feeds = {"embedded": embedded, "lengths": lengths}
        if attention_window is not None:
            seen = np.ones((longest, longest), bool)
            if banded:
                seen = attention_band(longest, longest, attention_window)
            feeds["bias"] = np.where(seen, ZERO, HIDDEN)[None, None]
        return feeds
