"""Logs of the service: a line of JSON for each request, without a word of its texts."""

import logging
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

logger = logging.getLogger("rsrank_rag.service.requests")


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
    milliseconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self.started

    def write(self, level: int) -> None:
        """Log the request with the fields that are known."""
        self.milliseconds = round(1000 * self.seconds, 1)
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        del fields["started"]
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


def configure(level: str) -> logging.Handler:
    """Write the logs and warnings of this process to standard error as lines of JSON.

    Args:
        level: The lowest level, such as ``INFO``, of lines of this package and of uvicorn. Other
            packages write warnings and errors only.

    Returns:
        The handler of all lines.
    """
    ours = ("rsrank_rag", "uvicorn")
    handler = logging.StreamHandler()
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
