"""One worker thread per model: a process loads a model once and runs one call of it at a time.

Calls wait in the thread's queue; a cancelled call leaves the queue. The first call loads the model,
in the thread, so that no lock is held while a model loads.
"""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from ..backends.options import ModelSource
from ..errors import needs_torch
from ..method.batches import free_memory
from ..reranker import Reranker
from .kinds import load

Result = TypeVar("Result")

# By process id, too: a forked child has its parent's models, and none of its parent's threads.
_threads: dict[tuple[int, ModelSource | int], ThreadPoolExecutor] = {}
_models: dict[ModelSource, Reranker] = {}


def submit(source: ModelSource | Reranker, task: Callable[[Reranker], Result]) -> Future[Result]:
    """Queue a task for a model's thread. It gets the model and the caller's context variables.

    The future holds the task's result, or the error that the task or the loading raised. After a
    failed loading, the next task loads again. A `Reranker` object has a thread of its own, too.
    """
    return _thread(source).submit(copy_context().run, _run, source, task)


def close(source: ModelSource | Reranker) -> None:
    """Free a model and its thread after the tasks in its queue, for all adapters that share it.

    The next task loads the model again. A `Reranker` object belongs to its maker and stays.
    """
    if not isinstance(source, Reranker):
        _thread(source).submit(_unload, source).result()
        # A thread ends when nobody holds its executor and its queue is empty.
        _threads.pop(_key(source), None)


def _key(source: ModelSource | Reranker) -> tuple[int, ModelSource | int]:
    return os.getpid(), id(source) if isinstance(source, Reranker) else source


def _thread(source: ModelSource | Reranker) -> ThreadPoolExecutor:
    key = _key(source)
    executor = _threads.get(key)
    if executor is None:
        # Of two callers at the same time, the second gets the thread of the first. This needs no
        # lock, which a forked child could inherit while it is held.
        made = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rsrank")
        executor = _threads.setdefault(key, made)
        if isinstance(source, Reranker):
            # The thread ends with its reranker.
            weakref.finalize(source, _threads.pop, key, None)
    return executor


def _run(source: ModelSource | Reranker, task: Callable[[Reranker], Result]) -> Result:
    """Run a task with the model, which is loaded if it is not."""
    if isinstance(source, Reranker):
        return task(source)
    if source not in _models:
        with needs_torch():
            _models[source] = load(source)
    return task(_models[source])


def _unload(source: ModelSource) -> None:
    """Free a model and its memory on the device."""
    _models.pop(source, None)
    # Loading leaves reference cycles, which hold the model until they are collected.
    free_memory()
