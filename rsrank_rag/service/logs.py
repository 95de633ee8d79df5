"""Logs of the service: a line of JSON for each request, without a word of its texts."""

import logging
import os
import queue
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

logger = logging.getLogger("rsrank_rag.service.requests")

STDERR = 2

# Lines that wait for a reader of standard error.
MOST_LINES = 1_000

# Seconds for which the last lines are waited for when the process ends.
FLUSH_SECONDS = 1.0


@dataclass
class RequestRecord:
    """One request, while it is answered.

    Attributes:
        id: The client's ``X-Request-ID``, or a random number.
        client: A hash of the client's API key or address. The hash differs in each run of the
            service.
        method: The HTTP method.
        started: When the request came, in seconds of `time.perf_counter`.
        route: The pattern of the path, or "other".
        status: The HTTP status; 499 if the client leaves before the answer.
        documents: Documents to score.
        tokens: Tokens read.
        kept: Documents in the answer.
        bytes: Bytes of the body and the answer that were counted.
        is_answered: Whether an answer has begun.
        milliseconds: From the request's arrival to its answer.
    """

    id: str
    client: str
    method: str
    started: float = field(default_factory=time.perf_counter)
    route: str = "other"
    status: int = 499
    documents: int | None = None
    tokens: int | None = None
    kept: int | None = None
    bytes: int = 0
    is_answered: bool = False
    milliseconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self.started

    def write(self, level: int) -> None:
        """Log the request with the fields that are known."""
        self.milliseconds = round(1000 * self.seconds, 1)
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        del fields["started"], fields["is_answered"]
        logger.log(level, "request", extra=fields)


class TextlessFormatter(JsonFormatter):
    """JSON lines. Exceptions are logged without their message, which may quote a document."""

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            json_ensure_ascii=False,
            # uvicorn repeats its messages in colour.
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],
        )

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the standard library's name
        """The traceback and the kind of the exception."""
        return "".join(traceback.format_tb(ei[2])) + getattr(ei[0], "__name__", "")


class StderrHandler(logging.Handler):
    """Writes lines to standard error from a thread. Lines beyond `MOST_LINES` are dropped.

    So neither the event loop nor the model waits for a reader that has stopped reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines = queue.Queue[bytes](MOST_LINES)
        threading.Thread(target=self._write, name="rsrank-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        line = self.format(record).encode("utf-8", "replace") + b"\n"
        with suppress(queue.Full):
            self.lines.put_nowait(line)

    def flush(self) -> None:
        """Wait until the lines have been written, but not for long. Python calls it at its end."""
        end = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            line = self.lines.get()
            # Nobody may read, or the disk of a log file may be full.
            with suppress(OSError):
                while line:
                    line = line[os.write(STDERR, line) :]
            self.lines.task_done()


def configure(level: str) -> logging.Handler:
    """Write the logs and warnings of this process to standard error as lines of JSON.

    Args:
        level: The lowest level, such as ``INFO``, of lines of this package and of uvicorn. Other
            packages write warnings and errors only.

    Returns:
        The handler of all lines.
    """
    ours = ("rsrank_rag", "uvicorn")
    handler = StderrHandler()
    handler.setFormatter(TextlessFormatter())
    # A library may have set a lower level for its own logger.
    handler.addFilter(
        lambda record: record.levelno >= logging.WARNING or record.name.startswith(ours)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ours:
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    return handler
