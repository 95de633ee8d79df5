"""Batches side by side on a CPU: rows in shares of about the same cost, each of which a thread of its own runs.

Threads that share a batch wait for one another hundreds of times, with sleep or other processes in between.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from threading import Barrier, Lock

import torch

from .batching import ALIKE, Batches, Ids
from .scoring import Row

LEAST, LEAST_KEPT = 96, 512  # tokens, documents' included, that are worth a thread of their own
_running = Lock()  # by the call whose shares run in the workers


def at_once(threads: int) -> int:
    """How many batches run side by side on so many threads: at most one thread is left over.

    More than four would wait for one another's Python; and threads that OpenMP binds would all get the same cores.
    """
    most = 1 if {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"} & os.environ.keys() else min(threads, 4)
    return max(count for count in range(1, most + 1) if threads % count < 2)


def shares(
    rows: Sequence[Row],
    together: int,
    room: int,
    budget: int,
    least: int = LEAST,
    alike: float = ALIKE,
) -> list[Batches[Row]]:
    """Rows for so many threads, the longest first, in one share where all threads are better spent on each batch.

    All rows of a document are in one share. `room`, `budget`, `alike`: as `Batches` has them.
    """
    costs = Counter[Ids]()
    for row in rows:
        costs[row.document] += len(row) + room
    total, spent, first = costs.total(), 0, dict[Ids, int]()
    several = together > 1 and total > together * max(least, max(costs.values(), default=0) / 1.5)
    found: list[list[Row]] = [
        [] for _ in range(together * -(-total // (together * budget)) if several else 1)
    ]
    for row in sorted(rows, key=lambda row: (len(row), row.document), reverse=True):
        found[first.setdefault(row.document, spent * len(found) // total)].append(row)
        spent += len(row) + room
    return [Batches(share, budget, extra=room, alike=alike) for share in found if share]


def run_all(run: Callable[[Batches[Row]], object], waiting: Sequence[Batches[Row]]) -> None:
    """Run shares: several at once, unless another call's are running. What an error leaves waiting is run alone."""
    if len(waiting) > 1 and _running.acquire(blocking=False):
        futures = list[Future[object]]()
        try:
            with suppress(RuntimeError):  # the interpreter ends, or there is no room for threads
                for share in waiting:
                    futures.append(workers(torch.get_num_threads()).submit(run, share))
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
            _running.release()
    for share in waiting:
        run(
            share
        )  # nothing, where it has run; an error comes again here, unless it came of what ran beside it


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """As many threads as batches run at once, with so many of torch's threads together."""
    count = at_once(threads)
    ready = Barrier(count, timeout=60)

    def begin() -> None:
        torch.get_num_threads()  # each thread's number is set on its first use, over what was set before
        torch.set_num_threads(threads // count)
        ready.wait()

    pool = ThreadPoolExecutor(count, "rsrank-batch", begin)
    list(pool.map(bool, range(count)))
    torch.set_num_threads(threads)  # what other threads will begin with
    return pool


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=workers.cache_clear)
