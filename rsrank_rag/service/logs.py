"""Logs of the service: lines of JSON, without a word of the texts of requests."""

import json
import logging
import os
import select
import traceback
from contextlib import suppress
from typing import Any

STDERR = 2

# Characters of a traceback: a pipe that takes anything takes all of a line with so many.
MOST_TRACEBACK = 2_000


class StderrHandler(logging.Handler):
    """Writes lines of JSON to standard error, and drops them while nobody reads there.

    So neither the event loop nor the model waits for a reader.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        # The disk of a log file may be full.
        with suppress(OSError):
            if select.select([], [STDERR], [], 0)[1]:
                os.write(STDERR, line_of(record).encode() + b"\n")


def line_of(record: logging.LogRecord) -> str:
    """A record as JSON. Its attribute ``fields`` has more fields of the line.

    Exceptions are logged without their message, which may quote a document.
    """
    line: dict[str, Any] = {
        "time": logging.Formatter().formatTime(record),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    if record.exc_info and record.exc_info[0]:
        kind, _, place = record.exc_info
        line["exc_info"] = "".join(traceback.format_tb(place))[-MOST_TRACEBACK:] + kind.__name__
    return json.dumps(line)


def configure() -> None:
    """Write the logs and warnings of this process to standard error as lines of JSON.

    This package and uvicorn write lines of INFO and above, other packages warnings and errors.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[StderrHandler()], force=True)
    for name in ("rsrank_rag", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
