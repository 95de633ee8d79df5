"""One worker thread per model: a model is loaded once in a process and never runs twice at the same time.

Calls wait in the thread's queue, where a cancelled one gives up its place. The model itself is loaded by the first
call, in the thread, so that nobody holds a lock meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from ..prefixes.settings import PrefixCache
from ..reranker import Reranker

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelSettings:
    """Everything that decides which model is loaded and how; equal settings share one model.

    Attributes:
        name: As `RSRank.from_pretrained` takes it: ``"mini"``, a local folder or a Hub id. The others likewise.
    """

    name: str
    revision: str | None = None
    backbone: str | None = None
    device: str | None = None
    dtype: str | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    load_in_fp8: bool = False
    max_length: int | None = None
    local_files_only: bool = False
    cache_dir: str | None = None
    prefix_cache: bool | int | str | PrefixCache = True
    early_decisions: Literal["exact", "calibrated"] | None = None

    def load(self) -> Reranker:
        """Load it."""
        from ..rsrank import RSRank

        return RSRank.from_pretrained(**{field.name: getattr(self, field.name) for field in fields(self)})


class _Worker:
    """A thread, and the model that it has loaded."""

    def __init__(self) -> None:
        self.renew()
        self.loaded: Reranker | None = None

    def renew(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rsrank")

    def run(self, source: ModelSettings | Reranker, task: Callable[[Reranker], Result]) -> Result:
        if isinstance(source, Reranker):
            return task(source)
        if self.loaded is None:
            self.loaded = source.load()
        return task(self.loaded)

    def unload(self) -> None:
        self.loaded = None
        gc.collect()  # loading leaves cycles behind
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


_workers: dict[ModelSettings | int, _Worker] = {}
_lock = threading.Lock()


def submit(source: ModelSettings | Reranker, task: Callable[[Reranker], Result]) -> Future[Result]:
    """Queue a task for a model's thread.

    Args:
        source: Settings of a model that all their users share, or a reranker that somebody else has made.
        task: Gets the loaded model. It sees the caller's context variables.

    Returns:
        A future with the task's result, or with the error that it or the loading raised. After a failed loading the
        next task tries again.
    """
    key = _key(source)
    with _lock:
        if key not in _workers:
            _workers[key] = _Worker()
            if isinstance(source, Reranker):  # the thread ends with its reranker
                weakref.finalize(source, _workers.pop, key, None)
        worker = _workers[key]
        return worker.thread.submit(copy_context().run, worker.run, source, task)


def close(source: ModelSettings | Reranker) -> None:
    """Let the model go when all that is queued is done, for all who share it. The next task loads it again."""
    with _lock:
        worker = _workers.get(_key(source))
        if worker is None or isinstance(source, Reranker):
            return
        unloaded = worker.thread.submit(worker.unload)
    unloaded.result()


def _key(source: ModelSettings | Reranker) -> ModelSettings | int:
    return id(source) if isinstance(source, Reranker) else source


def _after_fork() -> None:
    """A forked child inherits the models but none of the threads."""
    global _lock
    _lock = threading.Lock()
    for worker in _workers.values():
        worker.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
