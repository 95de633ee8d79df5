"""Logs of the service: one line of JSON for each request and each event, never a word of a query or a document."""

import logging
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

logger = logging.getLogger("rsrank_rag.service.requests")


@dataclass
class Record:
    """What is known of one request while it is answered."""

    id: str  # from the client, or made
    client: str  # a short hash of its API key or address, which holds for one run of the service
    method: str
    started: float = field(default_factory=time.perf_counter)
    route: str = "other"  # its pattern
    status: int = 499  # unless there is an answer before the client leaves
    documents: int | None = None  # asked to score
    tokens: int | None = None  # read for it
    kept: int | None = None  # documents in the answer

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

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the standard library's name
        """Where it arose, and its kind."""
        return "".join(traceback.format_tb(ei[2])) + ("" if ei[0] is None else ei[0].__name__)


def configure(level: str) -> logging.Handler:
    """Write all logs and warnings of this process to the standard error stream; the handler is returned.

    ``level``, such as ``INFO``, is that of this package and uvicorn; of others come warnings and errors.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(TextlessFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("rsrank_rag", "uvicorn"):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    return handler
