"""The model in a process of its own, so that its death is nobody else's: it is missed, ended if it hangs, replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from ..reranker import Reranker
from .backend import Description, UnavailableError
from .engine import Canary, DeviceLostError, Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready.

    Attributes:
        process: Number of the process it lives in.
        description: What it is.
        complaint: What is wrong with how it ranks the canary; None if nothing is.
    """

    process: int
    description: Description
    complaint: str | None


class Holder:
    """Holds a model where it was loaded: in this process, or, as `_holder`, in one of its own."""

    engine: Engine

    def load(self, make: Callable[[], Reranker], name: str, canary: Canary | None) -> Loaded:
        """Load the model and try it out."""
        self.engine = Engine(make(), name)
        complaint = None if canary is None else self.engine.check(canary)
        return Loaded(os.getpid(), self.engine.description, complaint)

    def call(self, method: str, argument: Any) -> Any:
        """Call a method of the `Engine`."""
        return getattr(self.engine, method)(argument)


_holder = Holder()


def load(make: Callable[[], Reranker], name: str, canary: Canary | None) -> Loaded:
    """See `Holder.load`."""
    return _holder.load(make, name, canary)


def call(method: str, argument: Any) -> Any:
    """See `Holder.call`. If the device is lost, the process ends, and whoever waits for it replaces it."""
    try:
        return _holder.call(method, argument)
    except DeviceLostError as error:
        logger.error("The device is lost (%s); the model's process ends.", error)
        os._exit(1)


def begin(prepare: Callable[[], object] | None) -> None:
    """Make this process one that ends with its parent, and not before; then do what else it takes."""
    # Ctrl-C and a service manager reach the whole group, but the parent needs this process to finish its work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    ends: Callable[[], object] = parent.join

    def end_with_parent() -> None:
        ends()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()


class ModelProcess:
    """Where the model is: a process that can be replaced, or a thread of this one.

    Args:
        loading: Arguments of `Holder.load`; picklable, and so must the model's results be, unless ``in_process``.
        longest_step: Seconds after which the process is taken for hung and ended.
        in_process: Use a thread.
        prepare: Called in the process before all else.
    """

    def __init__(
        self,
        loading: tuple[Callable[[], Reranker], str, Canary | None],
        longest_step: float,
        in_process: bool = False,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.loading, self.longest_step, self.in_process, self.prepare = loading, longest_step, in_process, prepare
        self.loaded: Loaded | None = None
        self._pool: Executor | None = None
        holder = Holder()
        self._load, self._call = (holder.load, holder.call) if in_process else (load, call)

    async def start(self) -> None:
        """Load the model, in a new process in the place of one that is gone.

        Raises:
            UnavailableError: The process ended meanwhile.
            Exception: Whatever loading raises.
        """
        self.end(wait=False)
        if self.in_process:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rsrank-serve")
        else:
            context = multiprocessing.get_context("spawn")  # a forked copy of threads and CUDA would not work
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=begin, initargs=(self.prepare,))
        name, started = self.loading[1], time.perf_counter()
        try:
            self.loaded = await asyncio.get_running_loop().run_in_executor(self._pool, self._load, *self.loading)
        except BrokenProcessPool:
            raise UnavailableError(f"The process that was to hold {name} ended while it was loading.") from None
        logger.info("%s was loaded in %.1f s.", name, time.perf_counter() - started)

    async def call(self, method: str, argument: Any) -> Any:
        """Call a method of the `Engine`.

        Raises:
            BrokenProcessPool: The process died, or was ended because it hung.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._call, method, argument)
        done, _ = await asyncio.wait([future], timeout=self.longest_step)
        if not done:
            logger.error("The model's process has not answered for %g seconds and is ended.", self.longest_step)
            if not self.in_process and self.loaded is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended just now
                    os.kill(self.loaded.process, signal.SIGKILL)
        return await future

    def is_gone(self) -> bool:
        """Whether the process has ended; where one cannot ask, the next call tells."""
        if self.in_process or self.loaded is None or os.name != "posix":
            return False
        try:
            os.kill(self.loaded.process, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self, wait: bool = True) -> None:
        """Let the model go, after what it is doing if that is to be waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait)
            self._pool = None
