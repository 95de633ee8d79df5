"""Batches that fit into memory: sorted by length, cut by a token budget, halved when memory runs out."""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ScoringError

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]

TOKEN_BUDGET = {"cuda": 16384, "cpu": 2048, "mps": 4096}
"""Padded tokens in one batch, by device. A batch holds at least one sequence."""

ALIKE = 0.7
"""How short a sequence may be beside a batch's longest, so that little of the batch is padding."""

SMALL = 8
"""... but not while the batch is below this part of the budget: there, padding costs less than another run."""


Item = TypeVar("Item", bound=Sized)
"""Token ids, or what has as many."""


class DoesNotFitError(Exception):
    """Even one sequence alone is too large for the memory.

    Attributes:
        ids: The sequence, as it was given.
    """

    def __init__(self, ids: Any) -> None:
        super().__init__(f"{len(ids)} tokens do not fit")
        self.ids = ids


def run_batches(
    sequences: Sequence[Item],
    run: Callable[[list[Item]], None],
    *,
    budget: int,
    extra: int = 0,
    alike: float = ALIKE,
    done: Callable[[int], object] = int,
    halved: Callable[[int], object] = int,
) -> int:
    """Hand all sequences to ``run`` in batches of at most ``budget`` padded tokens (at least one sequence).

    Only sequences of like length share a batch. The longest come first, so that too large a budget shows at once; when
    memory runs out, the batch is tried again at half its size and the smaller budget stays for the rest.

    Args:
        sequences: Token ids.
        run: Handles one batch; called again with fewer sequences when it runs out of memory.
        budget: Rows times the longest row's tokens.
        extra: Tokens that each row costs beside its own.
        alike: Sequences shorter than this share of a batch's longest wait for a later one.
        done: Told how many sequences each batch had.
        halved: Told how many sequences a batch had that ran out of memory.

    Returns:
        The budget that fitted.

    Raises:
        DoesNotFitError: One sequence alone runs out of memory.
    """
    waiting = sorted(sequences, key=len)
    while waiting:
        cost = len(waiting[-1]) + extra
        similar = len(waiting) - bisect_left(waiting, cost * alike - extra, key=len)
        size = max(1, min(len(waiting), budget // cost, max(similar, budget // SMALL // cost)))
        if _fits(run, waiting[-size:]):
            del waiting[-size:]
            done(size)
            continue
        # The failed run's frames and tensors are gone by now, so their memory can be given back.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if size == 1:
            raise DoesNotFitError(waiting[-1])
        halved(size)
        budget = cost * (size // 2)
        logger.warning("Out of memory with %d documents at once; going on with %d.", size, size // 2)
    return budget


def _fits(run: Callable[[list[Item]], None], batch: list[Item]) -> bool:
    try:
        run(batch)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def token_budget_for(device: torch.device) -> int:
    """Padded tokens of one batch that suit a device."""
    return TOKEN_BUDGET.get(device.type, 2048)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own exception; allocators, cuBLAS and MPS also raise plain RuntimeErrors."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def compute_each(
    sequences: Sequence[Ids], compute: Callable[[list[Ids]], Tensor], *, budget: int
) -> tuple[list[Tensor], int]:
    """What a model gives for each sequence, computed in batches; equal sequences are computed once.

    Args:
        sequences: Token ids.
        compute: One batch of N sequences -> (N, ...).
        budget: As in `run_batches`.

    Returns:
        One result a sequence, in input order, and the budget that fitted.

    Raises:
        ScoringError: A sequence does not fit into memory even alone; its position is given.
    """
    found: dict[Ids, Tensor] = {}

    def run(batch: list[Ids]) -> None:
        found.update(zip(batch, compute(batch), strict=True))

    try:
        budget = run_batches(list(dict.fromkeys(sequences)), run, budget=budget)
    except DoesNotFitError as error:
        index = sequences.index(error.ids)
        raise ScoringError(
            f"Document {index} ({len(error.ids)} tokens with the prompt) does not fit into memory even by itself. Pass "
            "a smaller max_length, or load the model in 8-bit or on another device.",
            index,
        ) from None
    return [found[ids] for ids in sequences], budget


def pad_right(batch: Sequence[Ids], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (N, T) and their mask (N, T). Padding on the right leaves the positions of real tokens alone."""
    longest = max(map(len, batch))
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in batch], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch], device=device)
    return ids, mask
