"""Texts as token ids, padded. Axes: N texts, S positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

CLS = 101
SEP = 102
QUERY_TOKENS = 62
DOCUMENT_TOKENS = 400


class Texts:
    """The encoder's tokenizer.

    Args:
        path: Its tokenizer.json.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.count = lru_cache(maxsize=None)(self._count)

    def _count(self, text: str) -> int:
        """Tokens of a text, with [CLS] and [SEP]."""
        return 2 + len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def ids(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """Token ids of [CLS] text [SEP], cut after ``most`` tokens of text."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[CLS, *item.ids[:most], SEP] for item in encoded]


def padded(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and which of them are none of the padding, both (N, S)."""
    lengths = list(map(len, ids))
    width = max(lengths)
    rows = [[*row, *[0] * (width - len(row))] for row in ids]
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.tensor(rows).to(device), valid.to(device)


def inner(valid: Tensor) -> Tensor:
    """Which tokens of [CLS] text [SEP] are the text's; all of them for an empty text."""
    own = valid.clone()
    own[:, 0] = False
    own[torch.arange(len(valid)), valid.sum(1) - 1] = False
    return own | (~own.any(1, keepdim=True) & valid)
