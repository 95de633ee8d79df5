"""Logs of the service: one line of JSON for each request and each event, never a word of a query or a document."""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

logger = logging.getLogger("rsrank_rag.service.requests")


@dataclass
class Record:
    """What is known of one request while it is answered.

    Attributes:
        id: From the client, or made.
        client: A short hash of its API key or address; it holds for one run of the service.
        method: HTTP method.
        started: On the clock of `time.perf_counter`.
        route: The route's pattern; "other" if there is none.
        status: Of the answer; 499 if the client left before there was one.
        documents: Asked to score.
        tokens: Read for it.
        kept: Documents in the answer.
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

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.started

    def write(self, level: int = logging.INFO) -> None:
        """Log it, with the fields that it has."""
        fields: dict[str, Any] = {**asdict(self), "milliseconds": round(1000 * self.seconds, 1), "started": None}
        logger.log(level, "request", extra={name: value for name, value in fields.items() if value is not None})


class TextlessFormatter(JsonFormatter):
    """JSON lines; of an exception its kind and where it arose, but not its message, which may quote a document."""

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            json_ensure_ascii=False,
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],  # uvicorn repeats its messages in colour
        )

    def formatException(  # noqa: N802 - the standard library's name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """Where it arose, and its kind."""
        return "".join(traceback.format_tb(ei[2])) + ("" if ei[0] is None else ei[0].__name__)


def configure(level: str) -> logging.Handler:
    """Write all logs and warnings of this process to the standard error stream.

    Args:
        level: Such as ``INFO``, for this package and uvicorn; of others come warnings and errors.

    Returns:
        The handler.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(TextlessFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("rsrank_rag", "uvicorn"):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    return handler
