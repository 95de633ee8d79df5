"""Batches that fit into memory: sorted by length, cut by a token budget, halved when memory runs out."""

import gc
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]

TOKEN_BUDGET = {
    "cuda": 16384,
    "cpu": 2048,
    "mps": 4096,
}  # padded tokens in a batch of more than one sequence
ALIKE = 0.7  # how short a sequence may be beside a batch's longest, so that little of the batch is padding
FEW = 8  # ... but not while the batch is below this part of the budget: there, padding costs less than another run.

Item = TypeVar("Item", bound=Sized)  # token ids, or what has as many


@dataclass(eq=False)
class DoesNotFitError(Exception):
    """Even one sequence alone, ``ids`` as it was given, is too large for the memory."""

    ids: Any


class Batches(Generic[Item]):
    """Sequences of like length in batches of at most so many padded tokens (at least one sequence).

    The longest come first, so that too large a budget shows at once; when memory runs out, the batch is tried again at
    half its size and the smaller budget stays for the rest. To be used as

        for batch in batches:
            with batches.attempt():
                run(batch)

    Args:
        sequences: Token ids, or what has as many.
        budget: Rows times the longest row's tokens.
        extra: Tokens that each row costs beside its own.
        alike: Sequences shorter than this share of a batch's longest wait for a later one.
    """

    def __init__(
        self, sequences: Iterable[Item], budget: int, *, extra: int = 0, alike: float = ALIKE
    ) -> None:
        self.waiting = sorted(sequences, key=len)
        self.budget, self.extra, self.alike = budget, extra, alike
        self.halved: list[
            int
        ] = []  # sizes of batches that ran out of memory; of several if they share it
        self._size = 0

    def __iter__(self) -> Iterator[list[Item]]:
        while self.waiting:
            cost = len(self.waiting[-1]) + self.extra
            like = len(self.waiting) - bisect_left(
                self.waiting, cost * self.alike - self.extra, key=len
            )
            few = self.budget // FEW // cost
            self._size = max(1, min(len(self.waiting), self.budget // cost, max(like, few)))
            failed = len(self.halved)
            yield self.waiting[-self._size :]
            if len(self.halved) > failed:
                # The failed run's frames and tensors are gone by now, so their memory can be given back.
                gc.collect()
                torch.cuda.empty_cache()  # nothing where there is none

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the batch that the loop is at: it is done afterwards, or comes again in halves.

        Raises DoesNotFitError where one sequence alone runs out of memory.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._size == 1:
                raise DoesNotFitError(self.waiting[-1]) from None
            self.halved.append(self._size)
            self.budget = (len(self.waiting[-1]) + self.extra) * (self._size // 2)
            logger.warning(
                "Out of memory with %d documents at once; going on with %d.",
                self._size,
                self._size // 2,
            )
        else:
            del self.waiting[-self._size :]


def token_budget_for(device: torch.device) -> int:
    """Padded tokens of one batch that suit a device."""
    return TOKEN_BUDGET.get(device.type, 2048)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own exception; allocators, cuBLAS and MPS also raise plain RuntimeErrors."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    signs = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
