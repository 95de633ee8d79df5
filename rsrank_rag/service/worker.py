"""The model's own process; it is replaced when it dies, hangs, or does not finish loading."""

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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from ..errors import RSRankError
from ..reranker import Reranker
from .backend import Description, UnavailableError
from .engine import Canary, DeviceLostError, Engine

logger = logging.getLogger(__name__)

# Seconds for the first load, which may download a model of many gigabytes.
FIRST_LOAD = 1800.0

# Seconds for a later load, and how often the time of the first one that load may take besides.
# The files are on disk then, but the machine may be busy.
LATER_LOAD = 60.0
TIMES_FIRST = 5.0

# The first call to the model's process; others name methods of `Engine`.
LOAD = "load"

# Part of the time limit after which the service is not ready.
SILENCE = 0.1


class ProcessLostError(Exception):
    """The model's process died, or was killed because it did not answer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready: its process, its description, and its canary's failure, if any."""

    process: int
    description: Description
    complaint: str | None


@dataclass(frozen=True)
class Loading:
    """How the model is loaded; picklable.

    Attributes:
        make: Loads the model.
        name: What the model is called.
        canary: Scored after each load; None for none.
        prepare: Called in the model's process first, such as to set up its logs.
    """

    make: Callable[[], Reranker]
    name: str
    canary: Canary | None
    prepare: Callable[[], object] | None = None

    def __call__(self) -> tuple[Engine, Loaded]:
        """Load the model and try it out; every error becomes an RSRankError."""
        try:
            engine = Engine(self.make(), self.name)
        except RSRankError:
            raise
        except BaseException as error:
            # The message can be shown, because no client's text has been seen yet.
            text = f"{self.name} could not be loaded ({type(error).__name__}: {error})."
            raise RSRankError(text) from error
        complaint = None if self.canary is None else engine.check(self.canary)
        return engine, Loaded(os.getpid(), engine.description, complaint)


def answer_calls(connection: Connection, loading: Loading) -> None:
    """Load the model, then answer calls of `Engine` methods until None comes.

    Answers are pairs of a result and an error, one of which is None. Only RSRankErrors are sent:
    SystemExit or a panic in Rust would end the other side's event loop, and messages of foreign
    errors may quote a document.
    """
    engine: Engine | None = None

    def answer(method: str, argument: object) -> Any:
        nonlocal engine
        if method == LOAD:
            engine, loaded = loading()
            return loaded
        return getattr(engine, method)(argument)

    with connection, contextlib.suppress(EOFError, OSError):
        while (call := connection.recv()) is not None:
            try:
                connection.send((answer(*call), None))
            except DeviceLostError as error:
                logger.error("The device is lost (%s); the model's process ends.", error)
                os._exit(1)
            except RSRankError as error:
                connection.send((None, error))
            except BaseException as error:
                logger.exception("The model failed.")
                name = type(error).__name__
                connection.send((None, RSRankError(f"The model failed ({name}).")))


def main(connection: Connection, loading: Loading) -> None:
    """What the model's process does. It ends with its parent, and not before."""
    # Ctrl-C, a service manager and a closed terminal reach the whole group of processes, but the
    # parent needs this process to finish its work.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    trim_regularly()
    # The default lock is shared between processes, and leaks when this process is killed.
    tqdm.set_lock(threading.RLock())
    if loading.prepare is not None:
        loading.prepare()
    answer_calls(connection, loading)


def trim_regularly(seconds: float = 20.0) -> bool:
    """Give freed memory back to the system again and again, from a thread.

    glibc by itself keeps freed memory in pieces, into which texts of other lengths do not fit.
    Returns whether the C library can do this.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False

    def run() -> None:
        while True:
            time.sleep(seconds)
            trim(0)

    threading.Thread(target=run, name="rsrank-trim", daemon=True).start()
    return True


class ModelProcess:
    """The process that holds the model. One call at a time.

    Args:
        loading: How the model is loaded.
        hang_seconds: Seconds without an answer after which the process is killed.
    """

    def __init__(self, loading: Loading, hang_seconds: float) -> None:
        self.loading = loading
        self.hang_seconds = hang_seconds
        self.loaded: Loaded | None = None
        self.load_seconds = 0.0
        self.hangs = False
        self._process: Any = None
        self._connection: Connection | None = None

    async def start(self) -> None:
        """Load the model in a new process, instead of one that is gone.

        Raises:
            RSRankError: The model cannot be loaded.
            UnavailableError: The process died, or did not finish in time.
        """
        self.kill()
        await asyncio.to_thread(self.end)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = self._launch(theirs)
        limit = LATER_LOAD + TIMES_FIRST * self.load_seconds if self.loaded else FIRST_LOAD
        started = time.perf_counter()
        try:
            loaded: Loaded = await self._answer(LOAD, None, limit)
        except ProcessLostError:
            raise UnavailableError(
                f"The process that was to hold {self.loading.name} ended while it was loading."
            ) from None
        seconds = time.perf_counter() - started
        if self.loaded is None:
            self.load_seconds = seconds
        self.loaded = loaded
        logger.info("%s was loaded in %.1f s.", self.loading.name, seconds)

    def _launch(self, connection: Connection) -> Any:
        # A forked copy of threads and CUDA would not work.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=main, args=(connection, self.loading), daemon=True)
        process.start()
        connection.close()
        return process

    async def call(self, method: str, argument: Any) -> Any:
        """Call a method of the `Engine`.

        Raises:
            RSRankError: The model's own error, or one in place of any other error.
            ProcessLostError: The process died, or was killed because it did not answer.
        """
        return await self._answer(method, argument, self.hang_seconds)

    async def _answer(self, method: str, argument: Any, limit: float) -> Any:
        connection = self._connection
        assert connection is not None

        def exchange() -> tuple[Any, RSRankError | None]:
            # In a thread: large messages block, and unpickling very many sentences takes seconds.
            connection.send((method, argument))
            answer: tuple[Any, RSRankError | None] = connection.recv()
            return answer

        exchanged = asyncio.ensure_future(asyncio.to_thread(exchange))
        # A batch takes a tenth of a second, so a long silence is told before it is ended.
        for seconds in (SILENCE * limit, (1 - SILENCE) * limit):
            done, _ = await asyncio.wait([exchanged], timeout=seconds)
            self.hangs = not done
        if self.hangs:
            logger.error("The model has not answered for %g seconds.", limit)
            self.kill()
        try:
            result, error = await exchanged
        except (EOFError, OSError):
            raise ProcessLostError from None
        finally:
            self.hangs = False
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process is not None and not self._process.is_alive()

    def end(self) -> None:
        """Let the model go after what it is doing. Blocks."""
        if self._process is not None and self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join()
            self._connection.close()
            self._process = None
            self._connection = None
