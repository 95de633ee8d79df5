"""One worker thread per model: a process loads a model once and runs one call of it at a time.

Calls wait in the thread's queue; a cancelled call leaves the queue. The first call loads the model,
in the thread, so that no lock is held while a model loads.
"""

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from ..errors import needs_torch
from ..language_model.options import ModelSource
from ..reranker import Reranker
from .systems import load

Result = TypeVar("Result")


class Worker:
    """A thread and the model that it loaded."""

    def __init__(self) -> None:
        self.loaded: Reranker | None = None
        self.start_thread()

    def start_thread(self) -> None:
        """Start an empty queue for this process."""
        self.process = os.getpid()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rsrank")

    def run(
        self,
        source: ModelSource | Reranker,
        instruction: str | None,
        task: Callable[[Reranker], Result],
    ) -> Result:
        """Run a task with the model, which is loaded if it is not."""
        if isinstance(source, Reranker):
            reranker = source
        else:
            if self.loaded is None:
                with needs_torch():
                    self.loaded = load(source)
            reranker = self.loaded
        if instruction is not None:
            reranker = reranker.with_instruction(instruction)
        return task(reranker)

    def unload(self) -> None:
        """Free the model and its memory on the device."""
        self.loaded = None
        # Loading leaves reference cycles, which hold the model until they are collected.
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


_workers: dict[ModelSource | int, Worker] = {}
# By process id: a forked child must not wait for a lock that a thread of its parent held.
_locks: dict[int, threading.Lock] = {}


def submit(
    source: ModelSource | Reranker,
    instruction: str | None,
    task: Callable[[Reranker], Result],
) -> Future[Result]:
    """Queue a task for a model's thread. It gets the model and the caller's context variables.

    The future holds the task's result, or the error that the task or the loading raised. After a
    failed loading, the next task loads again. A `Reranker` object has a thread of its own, too.
    """
    with _lock():
        worker = _worker(source)
        return worker.thread.submit(copy_context().run, worker.run, source, instruction, task)


def close(source: ModelSource | Reranker) -> None:
    """Free a model after the tasks in its queue, for all adapters that share it.

    The next task loads the model again. A `Reranker` object belongs to its maker and stays.
    """
    if isinstance(source, Reranker):
        return
    with _lock():
        if source not in _workers:
            return
        worker = _worker(source)
        unloaded = worker.thread.submit(worker.unload)
    unloaded.result()


def _lock() -> threading.Lock:
    return _locks.setdefault(os.getpid(), threading.Lock())


def _key(source: ModelSource | Reranker) -> ModelSource | int:
    if isinstance(source, Reranker):
        return id(source)
    return source


def _worker(source: ModelSource | Reranker) -> Worker:
    key = _key(source)
    worker = _workers.get(key)
    if worker is None:
        worker = _workers[key] = Worker()
        if isinstance(source, Reranker):
            # The thread ends with its reranker.
            weakref.finalize(source, _workers.pop, key, None)
    if worker.process != os.getpid():
        # A forked child inherits the model, and none of the threads.
        worker.start_thread()
    return worker
