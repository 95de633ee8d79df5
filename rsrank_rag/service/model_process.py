"""The model's own process; it is replaced when it dies, hangs, or does not finish loading."""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from ..errors import RSRankError
from ..reranker import Reranker
from .engine import DeviceLostError, Engine
from .messages import Description, Task, unavailable

logger = logging.getLogger(__name__)

# Seconds for a load, which may download a model of many gigabytes.
LOAD_SECONDS = 1800.0

# Seconds without an answer after which the process is killed and replaced.
HANG_SECONDS = 300.0

# Seconds for which the end of a killed process is awaited. A GPU's driver may hold it longer.
KILL_SECONDS = 5.0


class ProcessLostError(Exception):
    """The model's process died, or was killed because it did not answer."""


def answer_calls(connection: Connection, make: Callable[[], Reranker], name: str) -> None:
    """Load the model, send its description or the error, and do tasks until the connection ends."""
    with contextlib.suppress(EOFError, OSError):
        try:
            engine = Engine(make())
            description = engine.describe()
        except RSRankError as error:
            connection.send(error)
            return
        except Exception as error:
            logger.exception("The model could not be loaded.")
            text = f"{name} could not be loaded ({type(error).__name__}: {error})."
            connection.send(RSRankError(text))
            return
        connection.send(description)
        while True:
            tasks = connection.recv()
            connection.send((engine.run(tasks), engine.reranker.stats()))


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
    trim_regularly()
    # The default lock is shared between processes, and leaks when this process is killed.
    tqdm.set_lock(threading.RLock())
    if prepare is not None:
        prepare()
    try:
        answer_calls(connection, make, name)
    except DeviceLostError as error:
        logger.error("The device is lost (%s); the model's process ends.", error)
        # CUDA could wait for the device at a regular end.
        logging.shutdown()
        os._exit(1)


def trim_regularly(seconds: float = 20.0) -> None:
    """Give freed memory back to the system again and again, from a thread, if glibc is in use.

    glibc by itself keeps freed memory in pieces, into which texts of other lengths do not fit.
    """
    trim = None
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def run() -> None:
        while trim is not None:
            time.sleep(seconds)
            trim(0)

    threading.Thread(target=run, name="rsrank-trim", daemon=True).start()


class ModelProcess:
    """The process that holds the model. One call at a time.

    Args:
        make: Loads the model. It must be picklable, and so must the model's results.
        name: What the model is called.
        prepare: Called in the process before all else, such as to set up its logs.
    """

    def __init__(
        self,
        make: Callable[[], Reranker],
        name: str,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.make = make
        self.name = name
        self.prepare = prepare
        self._process: Any = None
        self._connection: Any = None

    @property
    def pid(self) -> int | None:
        """The process's number; None if there is no process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Description:
        """Load the model in a new process, instead of one that is gone; gives its description.

        Raises:
            RSRankError: The model cannot be loaded, the process died, or it did not finish in time.
        """
        self.kill()
        self._connection, theirs = multiprocessing.Pipe()
        started = time.monotonic()
        self._process = self._launch(theirs)
        try:
            answer = await self._call(self._connection.recv, LOAD_SECONDS)
        except ProcessLostError:
            raise unavailable(
                f"The process that was to hold {self.name} ended while it was loading."
            ) from None
        if isinstance(answer, RSRankError):
            self.kill()
            raise answer
        logger.info("%s was loaded in %.1f s.", self.name, time.monotonic() - started)
        description: Description = answer
        return description

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

    async def run(self, tasks: Sequence[Task]) -> tuple[list[Any], Mapping[str, int]]:
        """The results of tasks as `Engine.run` gives them, and the reranker's counters.

        Raises:
            ProcessLostError: The process died, or was killed because it did not answer.
        """
        connection = self._connection

        def exchange() -> Any:
            connection.send(tasks)
            return connection.recv()

        results, stats = await self._call(exchange, HANG_SECONDS)
        return results, stats

    async def _call(self, exchange: Callable[[], Any], seconds: float) -> Any:
        """Exchange messages in a thread, because large ones block."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(exchange), seconds)
        except (EOFError, OSError, asyncio.TimeoutError) as error:
            logger.error("The model's process is lost (%s).", type(error).__name__)
            self.kill()
            raise ProcessLostError from None

    def kill(self) -> None:
        """End the process, whatever it is doing. A call that waits raises ProcessLostError."""
        if self._process is not None:
            self._process.kill()
            self._process.join(KILL_SECONDS)
            self._process = None
