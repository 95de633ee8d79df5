"""Logs of the service, a line of JSON for each request and event, and spans; never a word of a query or a document."""

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from starlette.datastructures import Headers
from starlette.types import Scope

from .. import __version__

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]

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
        fields: dict[str, Any] = {
            **asdict(self),
            "milliseconds": round(1000 * self.seconds, 1),
            "started": None,
        }
        logger.log(
            level,
            "request",
            extra={name: value for name, value in fields.items() if value is not None},
        )


class TextlessFormatter(JsonFormatter):
    """JSON lines; of an exception its kind and where it arose, but not its message, which may quote a document."""

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            json_ensure_ascii=False,
            reserved_attrs=[
                *RESERVED_ATTRS,
                "color_message",
            ],  # uvicorn repeats its messages in colour
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


@contextmanager
def request_span(scope: Scope, headers: Headers, record: Record, model: str) -> Iterator[None]:
    """A span around one request, joined to the caller's ``traceparent``, if OpenTelemetry is installed.

    Names are those of its conventions for HTTP and generative AI. No path that a client made up is in it, no text, and
    no exception's message, which may quote one.
    """
    if trace is None:
        yield
        return
    server = scope.get("server") or (None, None)
    first = {
        "http.request.method": record.method,
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
        **(
            {}
            if server[0] is None
            else {"server.address": str(server[0]), "server.port": int(server[1] or 0)}
        ),
    }
    with trace.get_tracer("rsrank_rag", __version__).start_as_current_span(
        record.method,
        propagate.extract(dict(headers)),
        trace.SpanKind.SERVER,
        first,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        finally:
            span.update_name(f"{record.method} {record.route}")
            span.set_attributes(
                {"http.route": record.route, "http.response.status_code": record.status}
            )
            if record.documents is not None:
                span.set_attributes(
                    {"gen_ai.operation.name": "rerank", "gen_ai.response.model": model}
                )
                span.set_attribute("gen_ai.usage.input_tokens", record.tokens or 0)
            if record.status >= 500:
                span.set_attribute("error.type", str(record.status))
                span.set_status(trace.StatusCode.ERROR)
