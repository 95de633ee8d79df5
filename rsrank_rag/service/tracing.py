"""Spans of requests for OpenTelemetry, joined to the caller's ``traceparent``; nothing where it is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope

from .. import __version__
from .logs import Record

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]


@contextmanager
def request_span(scope: Scope, headers: Headers, record: Record, model: str) -> Iterator[None]:
    """A span around one request, with the names of OpenTelemetry's conventions for HTTP and generative AI.

    No path that a client made up is in it, no text, and no exception's message, which may quote one.
    """
    if trace is None:
        yield
        return
    server = scope.get("server") or (None, None)
    first = {
        "http.request.method": record.method,
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
        **({} if server[0] is None else {"server.address": str(server[0]), "server.port": int(server[1] or 0)}),
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
            span.set_attributes({"http.route": record.route, "http.response.status_code": record.status})
            if record.documents is not None:
                span.set_attributes({"gen_ai.operation.name": "rerank", "gen_ai.response.model": model})
                span.set_attribute("gen_ai.usage.input_tokens", record.tokens or 0)
            if record.status >= 500:
                span.set_attribute("error.type", str(record.status))
                span.set_status(trace.StatusCode.ERROR)
