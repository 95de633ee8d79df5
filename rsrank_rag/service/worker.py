"""The model in a process of its own, so that its death is nobody else's: it is missed, ended if it hangs, replaced."""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tqdm import tqdm

from ..errors import RSRankError
from ..reranker import Reranker
from .backend import Description, UnavailableError
from .engine import Canary, DeviceLostError, Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready."""

    process: int  # number of the process it lives in
    description: Description
    complaint: str | None  # what is wrong with how it ranks the canary; None if nothing is


_here = (
    threading.local()
)  # ``engine``: the model of this thread, which is the only one that uses it


def load(make: Callable[[], Reranker], name: str, canary: Canary | None) -> bytes:
    """Load the model into this thread and try it out; gives a `Loaded` as `_answer` packs it."""

    def loaded() -> Loaded:
        try:
            _here.engine = Engine(make(), name)
        except RSRankError:
            raise
        except (
            BaseException
        ) as error:  # its message can be told: no client's text has been seen yet
            raise RSRankError(
                f"{name} could not be loaded ({type(error).__name__}: {error})."
            ) from error
        complaint = None if canary is None else _here.engine.check(canary)
        return Loaded(os.getpid(), _here.engine.description, complaint)

    return _answer(loaded)


def call(method: str, argument: Any) -> bytes:
    """Call a method of this thread's `Engine`; gives what it returns as `_answer` packs it.

    If the device is lost, a process of the model's own ends, and whoever waits for it replaces it.
    """
    return _answer(lambda: getattr(_here.engine, method)(argument))


def _answer(work: Callable[[], object]) -> bytes:
    """What work returns, or the RSRankError that is to be raised, pickled: nothing else leaves this thread.

    SystemExit would end the other side's event loop, a panic in Rust (no Exception) its queue, and what cannot be
    pickled, or not be read again, the pool.
    """
    try:
        return bytes(ForkingPickler.dumps((work(), None)))
    except DeviceLostError as error:
        if multiprocessing.parent_process() is not None:
            logger.error("The device is lost (%s); the model's process ends.", error)
            os._exit(1)
        return bytes(ForkingPickler.dumps((None, RSRankError("The device is lost."))))
    except BaseException as error:
        if isinstance(error, RSRankError):
            with contextlib.suppress(Exception):
                packed = bytes(ForkingPickler.dumps((None, error)))
                ForkingPickler.loads(packed)
                return packed
        logger.exception("The model failed.")
        return bytes(
            ForkingPickler.dumps((None, RSRankError(f"The model failed ({type(error).__name__}).")))
        )


def trim_regularly(seconds: float = 20.0) -> bool:
    """Give freed memory back to the system again and again, from a thread; whether the C library can (glibc).

    By itself it keeps what was freed, in pieces that texts of other lengths do not fit into.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False

    def run() -> None:
        while True:
            time.sleep(seconds)
            trim(0)  # ctypes lets other threads run meanwhile

    threading.Thread(target=run, name="rsrank-trim", daemon=True).start()
    return True


def begin(prepare: Callable[[], object] | None) -> None:
    """Make this process one that ends with its parent, and not before; then do what else is asked for."""
    # Ctrl-C, a service manager and a closed terminal reach the whole group, but the parent needs this process to finish
    # its work.
    for name in vars(signal).keys() & {"SIGINT", "SIGTERM", "SIGHUP"}:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    trim_regularly()
    tqdm.set_lock(
        threading.RLock()
    )  # its own is shared between processes, and leaks when this one is killed
    if prepare is not None:
        prepare()


def _unpacked(answer: bytes) -> Any:
    found, error = ForkingPickler.loads(answer)
    if error is not None:
        raise error
    return found


class ModelProcess:
    """The process that the model lives in, which can be replaced; arguments as of `Scheduler`.

    ``loading`` are the arguments of `load`: picklable, and so must the model's results be.
    """

    def __init__(
        self,
        loading: tuple[Callable[[], Reranker], str, Canary | None],
        longest_step: float,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.loading, self.longest_step, self.prepare = loading, longest_step, prepare
        self.loaded: Loaded | None = None
        self.load_seconds = 0.0  # that the last load took
        self.hangs = False  # no answer for ``longest_step`` seconds
        self._pool: Executor | None = None

    async def start(self) -> None:
        """Load the model, in a new process in the place of one that is gone; raises RSRankError."""
        self.end(wait=False)
        self._pool = self._new_pool()
        name, started = self.loading[1], time.perf_counter()
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self._pool, load, *self.loading
            )
        except BrokenProcessPool:
            raise UnavailableError(
                f"The process that was to hold {name} ended while it was loading."
            ) from None
        self.loaded, self.load_seconds = _unpacked(answer), time.perf_counter() - started
        logger.info("%s was loaded in %.1f s.", name, self.load_seconds)

    def _new_pool(self) -> Executor:
        context = multiprocessing.get_context(
            "spawn"
        )  # a forked copy of threads and CUDA would not work
        return ProcessPoolExecutor(
            1, mp_context=context, initializer=begin, initargs=(self.prepare,)
        )

    async def call(self, method: str, argument: Any) -> Any:
        """Call a method of the `Engine`.

        Raises RSRankError: from the model, or instead of whatever else it raised; BrokenProcessPool: the process died,
        or was ended because it hung.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, call, method, argument)
        done, _ = await asyncio.wait([future], timeout=self.longest_step)
        if not done:
            logger.error("The model has not answered for %g seconds.", self.longest_step)
            self.hangs = True
            self.kill()
        try:
            return await asyncio.to_thread(
                _unpacked, await future
            )  # for very many sentences takes seconds
        finally:
            self.hangs = False

    def kill(self) -> None:
        """End the model's process, whatever it is doing."""
        if self.loaded is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.loaded.process, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether the process has ended; where one cannot ask, the next call tells."""
        if self.loaded is None or os.name != "posix":
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.loaded.process, 0)
            return False
        return True

    def end(self, wait: bool = True) -> None:
        """Let the model go, after what it is doing if that is to be waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait)
            self._pool = None
