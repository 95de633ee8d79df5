"""What several of the systems do with batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...errors import ScoringError
from ...method.batching import Batches, DoesNotFitError, Ids


def compute_each(
    sequences: Sequence[Ids], compute: Callable[[list[Ids]], Tensor], *, budget: int
) -> tuple[list[Tensor], int]:
    """What a model gives for each sequence, computed in batches; equal sequences are computed once.

    `compute`: one batch of N sequences -> (N, ...).

    Returns:
        One result a sequence, in input order, and the budget that fitted.

    Raises:
        ScoringError: A sequence does not fit into memory even alone; its position is given.
    """
    found: dict[Ids, Tensor] = {}
    batches = Batches(list(dict.fromkeys(sequences)), budget)
    try:
        for batch in batches:
            with batches.attempt():
                found.update(zip(batch, compute(batch), strict=True))
    except DoesNotFitError as error:
        index = sequences.index(error.ids)
        raise ScoringError(
            f"Document {index} ({len(error.ids)} tokens with the prompt) does not fit into memory even by itself. Pass "
            "a smaller max_length, or load the model in 8-bit or on another device.",
            index,
        ) from None
    return [found[ids] for ids in sequences], batches.budget


def pad_right(batch: Sequence[Ids], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (N, T) and their mask (N, T). Padding on the right leaves the positions of real tokens alone."""
    rows = [torch.tensor(row) for row in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)
