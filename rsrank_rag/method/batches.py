"""Rows, and batches of them that fit into memory."""

import gc
import logging
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..cancellation import check_cancelled
from .template import TokenisedQuery

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]

# Padded tokens in a batch of more than one sequence.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 2048, "mps": 4096}

# A sequence shorter than this share of a batch's longest waits for a later batch, so that little of
# the batch is padding.
SIMILAR_LENGTH = 0.7

# A batch takes much shorter sequences, too, while it has fewer tokens than the budget divided by
# this number, because padding then costs less than another run.
SMALL_BATCH = 8

Item = TypeVar("Item", bound=Sized)


@dataclass(frozen=True, slots=True)
class Row:
    """A document and a query as token ids, and the document's key in the prefix cache.

    If the key is empty, the prefix cache computes it.
    """

    document: Ids
    query: TokenisedQuery
    key: str = ""

    def __len__(self) -> int:
        return len(self.document)


@dataclass(eq=False)
class DoesNotFitError(Exception):
    """A single sequence is too large for the memory.

    Attributes:
        ids: The sequence, as `Batches` got it.
    """

    ids: Any


def free_memory() -> None:
    """Free objects that refer to each other, and what torch caches on the GPU."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


class Batches(Generic[Item]):
    """Sequences of similar length in batches of at most so many padded tokens.

    The longest come first, so that too large a budget shows at once. When memory runs out, the
    batch is tried again at half its size, and the smaller budget stays for the rest. Use as

        for batch in batches:
            with batches.attempt():
                run(batch)

    Args:
        sequences: Token ids, or objects with the length of their token ids.
        budget: Padded tokens: rows times the longest row's tokens. A batch has at least one row.
        extra: Tokens that each row costs besides its own.
        similar: Sequences shorter than this share of a batch's longest wait for a later one.
    """

    def __init__(
        self,
        sequences: Iterable[Item],
        budget: int,
        extra: int = 0,
        similar: float = SIMILAR_LENGTH,
    ) -> None:
        self.waiting = sorted(sequences, key=len)
        self.budget = budget
        self.extra = extra
        self.similar = similar
        self._size = 0
        self._failed = False

    def __iter__(self) -> Iterator[list[Item]]:
        while self.waiting:
            check_cancelled()
            cost = len(self.waiting[-1]) + self.extra
            fitting = min(len(self.waiting), self.budget // cost)
            shorter = bisect_left(self.waiting, cost * self.similar - self.extra, key=len)
            similar = max(len(self.waiting) - shorter, self.budget // SMALL_BATCH // cost)
            self._size = max(1, min(fitting, similar))
            self._failed = False
            yield self.waiting[-self._size :]
            if self._failed:
                # The failed run's tensors are gone by now, so their memory can be given back.
                free_memory()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context manager for the run of the current batch.

        If the run ends, its sequences are done. If memory runs out, the error is not raised, and
        the sequences come again in batches of at most half the size.

        Raises:
            DoesNotFitError: One sequence alone ran out of memory.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._size == 1:
                raise DoesNotFitError(self.waiting[-1]) from None
            half = self._size // 2
            logger.warning(
                "Out of memory with %d documents at once; going on with %d.", self._size, half
            )
            self._failed = True
            self.budget = (len(self.waiting[-1]) + self.extra) * half
        else:
            del self.waiting[-self._size :]


def device_kind(device: object) -> str:
    """The kind of a device, such as ``cuda`` of ``cuda:1``."""
    return str(device).partition(":")[0]


def token_budget_for(device: object) -> int:
    """Padded tokens of one batch that suit a device."""
    return TOKEN_BUDGET.get(device_kind(device), TOKEN_BUDGET["cpu"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    torch has an exception of its own for it; allocators, cuBLAS and MPS raise RuntimeErrors. The
    exception goes by its name, because torch need not be installed.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
