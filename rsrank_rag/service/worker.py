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

# A later load may take LATER_LOAD seconds, plus TIMES_FIRST times the seconds of the first load.
# The files are on disk then, but the machine may be busy.
LATER_LOAD = 60.0
TIMES_FIRST = 5.0

# Share of a call's time limit. If a call has no answer after that time, the service is not ready.
SILENCE = 0.1


class ProcessLostError(Exception):
    """The model's process died, or was killed because it did not answer."""


def answer_calls(connection: Connection, make: Callable[[], Reranker], name: str) -> None:
    """Answer calls of `Engine` methods until the connection ends. The first one loads the model.

    Answers are pairs of a result and an error, one of which is None. Only RSRankErrors are sent:
    SystemExit or a panic in Rust would end the other side's event loop, and messages of foreign
    errors may quote a document.
    """
    engine: Engine | None = None
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = connection.recv()
            try:
                engine = engine or Engine(make(), name)
                connection.send((getattr(engine, method)(*arguments), None))
            except DeviceLostError as error:
                logger.error("The device is lost (%s); the model's process ends.", error)
                os._exit(1)
            except RSRankError as error:
                connection.send((None, error))
            except BaseException as error:
                logger.exception("The model failed.")
                text = f"The model failed ({type(error).__name__})."
                if engine is None:
                    # The message can be shown, because no client's text has been seen yet.
                    text = f"{name} could not be loaded ({type(error).__name__}: {error})."
                connection.send((None, RSRankError(text)))


def run_model_process(
    connection: Connection,
    make: Callable[[], Reranker],
    name: str,
    prepare: Callable[[], object] | None,
) -> None:
    """What the model's process does. It ends with its parent, and not before."""
    # Ctrl-C and a service manager reach the whole group of processes, but the parent needs this
    # process to finish its work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    trim_regularly()
    # The default lock is shared between processes, and leaks when this process is killed.
    tqdm.set_lock(threading.RLock())
    if prepare is not None:
        prepare()
    answer_calls(connection, make, name)


def trim_regularly(seconds: float = 20.0) -> None:
    """Give freed memory back to the system again and again, from a thread, if glibc is in use.

    glibc by itself keeps freed memory in pieces, into which texts of other lengths do not fit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def run() -> None:
        while trim is not None:
            time.sleep(seconds)
            trim(0)

    threading.Thread(target=run, name="rsrank-trim", daemon=True).start()


@dataclass
class ModelProcess:
    """The process that holds the model. One call at a time.

    Args:
        make: Loads the model. It must be picklable, and so must the model's results.
        name: What the model is called.
        canary: Scored after each load; None for none.
        prepare: Called in the process before all else, such as to set up its logs.
        hang_seconds: Seconds without an answer after which the process is killed.

    Attributes:
        description: The model; None before the first load.
        seconds: Seconds that the last call took.
        hangs: Whether a call has had no answer for a tenth of its time limit.
    """

    make: Callable[[], Reranker]
    name: str
    canary: Canary | None
    prepare: Callable[[], object] | None
    hang_seconds: float
    description: Description | None = None
    seconds: float = 0.0
    hangs: bool = False
    _load_limit: float = FIRST_LOAD
    _process: Any = None
    _connection: Any = None

    @property
    def pid(self) -> int | None:
        """The process's number; None if there is no process."""
        pid: int | None = getattr(self._process, "pid", None)
        return pid

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
        try:
            self.description = await self.call("describe", self.canary, limit=self._load_limit)
        except ProcessLostError:
            raise UnavailableError(
                f"The process that was to hold {self.name} ended while it was loading."
            ) from None
        if self._load_limit == FIRST_LOAD:
            self._load_limit = LATER_LOAD + TIMES_FIRST * self.seconds
        logger.info("%s was loaded in %.1f s.", self.name, self.seconds)

    def _launch(self, connection: Connection) -> Any:
        # A forked copy of threads and CUDA would not work.
        process = multiprocessing.get_context("spawn").Process(
            target=run_model_process,
            args=(connection, self.make, self.name, self.prepare),
            daemon=True,
        )
        process.start()
        connection.close()
        return process

    async def call(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        """Call a method of the `Engine`.

        Args:
            method: Its name.
            arguments: Its arguments.
            limit: Seconds after which the process is killed; None for ``hang_seconds``.

        Raises:
            RSRankError: The model's own error, or one in place of any other error.
            ProcessLostError: The process died, or was killed because it did not answer.
        """
        limit = limit or self.hang_seconds

        def exchange() -> tuple[Any, RSRankError | None]:
            # In a thread: large messages block, and unpickling very many sentences takes seconds.
            started = time.perf_counter()
            self._connection.send((method, arguments))
            answer: tuple[Any, RSRankError | None] = self._connection.recv()
            self.seconds = time.perf_counter() - started
            return answer

        exchanged = asyncio.ensure_future(asyncio.to_thread(exchange))
        # A batch takes a fraction of a second, so /ready reports a long silence before it is ended.
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
        if self._process is not None:
            self._connection.close()
            self._process.join()
            self._process = None
