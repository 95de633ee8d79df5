"""Batches that fit into memory, and several of them concurrently on a CPU.

Threads that share a batch wait for one another hundreds of times a run, with sleep or other
processes in between. On a CPU, it is faster to give each of several batches a part of the threads.
"""

import gc
import logging
import os
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import Barrier, Lock
from typing import Any, Generic, TypeVar

from .prefix import padded_length

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]

# Padded tokens in a batch of more than one sequence.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 2048, "mps": 4096}

# A sequence shorter than this share of a batch's longest waits for a later batch, so that little of
# the batch is padding.
SIMILAR_LENGTH = 0.7

# While a batch is below this part of the budget, shorter sequences join it: there, padding costs
# less than another run.
SMALL_BATCH = 8

# Tokens of documents and queries that are worth a thread of their own. Below, starting the threads
# took longer than they saved. Rows with a cached prefix run the query only.
TOKENS_PER_THREAD = 96
CACHED_TOKENS_PER_THREAD = 512

# With more batches at once, threads waited for one another's Python.
MOST_CONCURRENT = 4

# Held by the call whose batches run in the worker threads.
_running = Lock()

Item = TypeVar("Item", bound=Sized)


@dataclass(eq=False)
class DoesNotFitError(Exception):
    """One sequence alone, ``ids`` as it was given, is too large for the memory."""

    ids: Any


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
        same_length: Batches hold only sequences of the same length, padded to a multiple of 32.
    """

    def __init__(
        self,
        sequences: Iterable[Item],
        budget: int,
        *,
        extra: int = 0,
        similar: float = SIMILAR_LENGTH,
        same_length: bool = False,
    ) -> None:
        self.waiting = sorted(sequences, key=len)
        self.budget = budget
        self.extra = extra
        self.similar = similar
        self.same_length = same_length
        self.retries = 0
        self._size = 0

    def __iter__(self) -> Iterator[list[Item]]:
        while self.waiting:
            retries = self.retries
            self._size = self._next_size()
            yield self.waiting[-self._size :]
            if self.retries > retries:
                # The failed run's tensors are gone by now, so their memory can be given back.
                gc.collect()
                if "torch" in sys.modules:
                    sys.modules["torch"].cuda.empty_cache()

    def _next_size(self) -> int:
        longest = len(self.waiting[-1])
        cost = longest + self.extra
        fits = max(1, min(len(self.waiting), self.budget // cost))
        if self.same_length:
            shorter = bisect_left(self.waiting, padded_length(longest), key=_padded_length_of)
            return min(fits, len(self.waiting) - shorter)
        shorter = bisect_left(self.waiting, cost * self.similar - self.extra, key=len)
        similar = len(self.waiting) - shorter
        return max(1, min(fits, max(similar, self.budget // SMALL_BATCH // cost)))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the run of the current batch: the batch is done afterwards, or comes in halves.

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
            self.retries += 1
            self.budget = (len(self.waiting[-1]) + self.extra) * half
        else:
            del self.waiting[-self._size :]


def _padded_length_of(sequence: Sized) -> int:
    return padded_length(len(sequence))


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


def concurrent_count(threads: int) -> int:
    """How many batches run concurrently on so many threads: at most one thread is left over.

    Threads that OpenMP binds to cores would all get the same cores: then 1.
    """
    if {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"} & os.environ.keys():
        return 1
    most = min(threads, MOST_CONCURRENT)
    return max(count for count in range(1, most + 1) if threads % count < 2)


def parts_of(
    documents: Sequence[Ids], extra: int, count: int, budget: int, least: int
) -> list[int]:
    """The number of the part of each row, for so many threads: parts cost about the same.

    Rows of one document are in one part. All rows are in part 0 if that is faster: where they are
    few, or one document costs most of the time.

    Args:
        documents: Token ids of each row's document.
        extra: Tokens that each row costs besides its document's.
        count: The number of threads.
        budget: As in `Batches`; there are more parts than threads if parts were much larger.
        least: Tokens that are worth a thread.
    """
    costs = Counter[Ids]()
    for document in documents:
        costs[document] += len(document) + extra
    total = costs.total()
    largest = max(costs.values(), default=0)
    if count == 1 or total <= count * max(least, largest / 1.5):
        return [0] * len(documents)
    parts = count * -(-total // (count * budget))
    spent = 0
    part_of = dict[Ids, int]()
    for document in sorted(costs, key=lambda ids: (len(ids), ids), reverse=True):
        part_of[document] = spent * parts // total
        spent += costs[document]
    return [part_of[document] for document in documents]


# The process that imported this module.
_PROCESS = os.getpid()


def use_one_thread_after_fork() -> None:
    """In a forked process, let torch compute with one thread.

    Its other threads do not survive a fork, and torch would wait for them for ever.
    """
    import torch

    if os.getpid() != _PROCESS:
        torch.set_num_threads(1)


def run_concurrently(
    run: Callable[[Batches[Item]], object], waiting: Sequence[Batches[Item]]
) -> None:
    """Run each of several ``waiting`` concurrently, unless another call is doing so.

    Errors are not raised. The caller runs what is left afterwards, alone, so that an error is
    raised only if it did not come of the other batches.
    """
    if len(waiting) > 1 and _running.acquire(blocking=False):
        futures = list[Future[object]]()
        try:
            # A RuntimeError: the interpreter ends, or no thread can be started.
            with suppress(RuntimeError):
                pool = workers(torch_threads(), os.getpid())
                for batches in waiting:
                    futures.append(pool.submit(run, batches))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
            _running.release()


def torch_threads() -> int:
    """The number of threads that torch computes with in this thread."""
    import torch

    return torch.get_num_threads()


@cache
def workers(threads: int, _process: int) -> ThreadPoolExecutor:
    """A pool with a thread for each concurrent batch, with so many threads of torch together.

    Each process has a pool of its own, because threads do not survive a fork.
    """
    import torch

    count = concurrent_count(threads)
    ready = Barrier(count, timeout=60)

    def begin() -> None:
        # Torch sets each thread's number on first use, over what was set before.
        torch.get_num_threads()
        torch.set_num_threads(threads // count)
        ready.wait()

    pool = ThreadPoolExecutor(count, "rsrank-batch", begin)
    list(pool.map(bool, range(count)))
    # The number that other threads begin with.
    torch.set_num_threads(threads)
    return pool
