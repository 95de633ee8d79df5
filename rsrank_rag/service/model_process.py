"""The model's own process; it is replaced when it dies, hangs, or does not finish loading."""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..errors import RSRankError
from ..reranker import Reranker
from .engine import Engine, ProcessLostError
from .messages import Description, Task

logger = logging.getLogger(__name__)

# Seconds for a load, which may download a model of many gigabytes.
LOAD_SECONDS = 1800.0

# Seconds without an answer after which the process is killed and replaced.
HANG_SECONDS = 300.0


def answer_calls(connection: Connection, make: Callable[[], Reranker]) -> None:
    """Load the model at the first message, and do the tasks of later messages.

    The answers are the model's description, and results with counters. An error that is sent
    instead of an answer is the last message.
    """
    connection.recv()
    try:
        engine = Engine(make())
    except Exception as error:
        if not isinstance(error, RSRankError):
            text = f"The model could not be loaded ({type(error).__name__}: {error})."
            error = RSRankError(text)
        connection.send(error)
        return
    connection.send(engine.describe())
    while True:
        tasks = connection.recv()
        try:
            connection.send((engine.run(tasks), engine.reranker.stats()))
        except ProcessLostError as error:
            connection.send(error)
            return


def run_model_process(connection: Connection, make: Callable[[], Reranker]) -> None:
    """What the model's process does. It ends with its parent, and not before."""
    # Ctrl-C and a service manager reach the whole group of processes, but the parent needs this
    # process to finish its work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        threading.Thread(target=give_memory_back, daemon=True).start()
    # The parent has ended.
    with contextlib.suppress(EOFError, OSError):
        answer_calls(connection, make)


def give_memory_back(seconds: float = 20.0) -> None:
    """Give freed memory back to the system again and again, without an end.

    glibc by itself keeps freed memory in pieces, into which texts of other lengths do not fit.
    """
    library = ctypes.CDLL(None)
    # There are other libraries than glibc.
    while hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
        time.sleep(seconds)


class ModelProcess:
    """The process that holds the model. One call at a time.

    Args:
        make: Loads the model. It must be picklable, and so must the model's results.
    """

    def __init__(self, make: Callable[[], Reranker]) -> None:
        self.make = make
        # The process's number; None if there is no process.
        self.pid: int | None = None
        self._process: Any = None
        self._connection: Any = None

    async def start(self) -> Description:
        """Load the model in a new process, instead of one that is gone.

        Raises:
            RSRankError: The model cannot be loaded.
        """
        self._connection, theirs = multiprocessing.Pipe()
        self._process = self._launch(theirs)
        description: Description = await self._call(None, LOAD_SECONDS)
        return description

    def _launch(self, connection: Connection) -> Any:
        # A forked copy of threads and CUDA would not work.
        process = multiprocessing.get_context("spawn").Process(
            target=run_model_process, args=(connection, self.make), daemon=True
        )
        process.start()
        connection.close()
        self.pid = process.pid
        return process

    async def run(self, tasks: Sequence[Task]) -> Any:
        """The results of tasks as `Engine.run` gives them, and the reranker's counters.

        Raises:
            ProcessLostError: The process died, was killed because it did not answer, or has lost
                its device.
        """
        return await self._call(tasks, HANG_SECONDS)

    async def _call(self, message: Any, seconds: float) -> Any:
        """Send a message, and wait for the answer in a thread."""
        connection = self._connection

        def exchange() -> Any:
            connection.send(message)
            return connection.recv()

        try:
            answer = await asyncio.wait_for(asyncio.to_thread(exchange), seconds)
        except (EOFError, OSError, asyncio.TimeoutError) as error:
            answer = ProcessLostError(f"The model's process is lost ({type(error).__name__}).")
        if isinstance(answer, Exception):
            self.kill()
            raise answer
        return answer

    def kill(self) -> None:
        """End the process, whatever it is doing. A call that waits raises ProcessLostError."""
        if self._process is not None:
            self._process.kill()
            # A GPU's driver may hold it longer.
            self._process.join(5.0)
            self._process = self.pid = None
