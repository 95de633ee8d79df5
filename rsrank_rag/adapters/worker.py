"""One worker thread per model: a model is loaded once in a process and never runs twice at the same time.

Calls wait in the thread's queue, where a cancelled one gives up its place. The model itself is loaded by the first
call, in the thread, so that nobody holds a lock meanwhile.
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

from ..errors import needs_the_whole_package
from ..language_model.options import ModelSource
from ..reranker import Reranker
from .systems import load

Result = TypeVar("Result")


class _Worker:
    """A thread, and the model that it has loaded."""

    def __init__(self) -> None:
        self.renew()
        self.loaded: Reranker | None = None

    def renew(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rsrank")

    def run(self, source: ModelSource | Reranker, task: Callable[[Reranker], Result]) -> Result:
        if isinstance(source, Reranker):
            return task(source)
        if self.loaded is None:
            with needs_the_whole_package():
                self.loaded = load(source)
        return task(self.loaded)

    def unload(self) -> None:
        self.loaded = None
        gc.collect()  # loading leaves cycles behind
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


_workers: dict[ModelSource | int, _Worker] = {}
_lock = threading.Lock()


def submit(source: ModelSource | Reranker, task: Callable[[Reranker], Result]) -> Future[Result]:
    """Queue a task, which gets the loaded model and sees the caller's context variables, for a model's thread.

    The future holds its result, or the error that it or the loading raised; after a failed loading the next task tries
    again. A reranker that somebody else has made has a thread of its own, too.
    """
    key = _key(source)
    with _lock:
        if key not in _workers:
            _workers[key] = _Worker()
            if isinstance(source, Reranker):  # the thread ends with its reranker
                weakref.finalize(source, _workers.pop, key, None)
        worker = _workers[key]
        return worker.thread.submit(copy_context().run, worker.run, source, task)


def close(source: ModelSource | Reranker) -> None:
    """Let the model go when all that is queued is done, for all who share it. The next task loads it again."""
    with _lock:
        worker = _workers.get(_key(source))
        if worker is None or isinstance(source, Reranker):
            return
        unloaded = worker.thread.submit(worker.unload)
    unloaded.result()


def _key(source: ModelSource | Reranker) -> ModelSource | int:
    return id(source) if isinstance(source, Reranker) else source


def _after_fork() -> None:
    """A forked child inherits the models but none of the threads."""
    global _lock
    _lock = threading.Lock()
    for worker in _workers.values():
        worker.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
