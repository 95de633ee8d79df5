"""Entries of value vectors on fixed tokens, which identify a language model's weights."""

from collections.abc import Sequence

import numpy as np

from ..method.batches import Ids
from ..method.formula import Array, to_numpy

# Tokens of the fixed text.
TOKENS = 9

# Entries that are taken.
ENTRIES = 64


def trial_ids(vocabulary: int) -> Ids:
    """Token ids that lie evenly in a vocabulary of this size."""
    return tuple(_spread(1, vocabulary - 1, TOKENS))


def sample_of(values: Array) -> tuple[float, ...]:
    """Entries of the last token's value vectors, of values (H, T, D)."""
    last = to_numpy(values)[:, -1].astype(np.float64).flatten()
    places = _spread(0, len(last) - 1, ENTRIES)
    return tuple(round(entry, 6) for entry in last[places].tolist())


def _spread(first: int, last: int, count: int) -> Sequence[int]:
    """Whole numbers at even distances, rounded down as float32 and `torch.linspace` round them."""
    numbers = np.arange(count, dtype=np.float32)
    step = np.float32(last - first) / np.float32(count - 1)
    from_first = first + step * numbers
    from_last = last - step * numbers[::-1]
    places: list[int] = np.where(numbers < count // 2, from_first, from_last).astype(int).tolist()
    return places
