"""The service's counters, in the format of Prometheus."""

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .logs import Record
from .scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

COUNTERS = {
    "pairs": ("rsrank_documents", "Documents scored, or found to have no score."),
    "tokens": ("rsrank_tokens", "Tokens read."),
    "truncated": ("rsrank_truncated_documents", "Documents whose end was not read."),
    "unscored": (
        "rsrank_unscored_documents",
        "Documents without a finite score, or too large for the memory.",
    ),
    "failed": (
        "rsrank_failed_documents",
        "Documents that could not be used, or on which the model failed.",
    ),
    "cancelled": (
        "rsrank_cancelled_documents",
        "Documents whose request went away before its answer.",
    ),
    "refused": (
        "rsrank_refused_requests",
        "Requests refused because the queue was full, or too long for their time.",
    ),
    "late": ("rsrank_late_requests", "Requests that were not answered in time."),
    "batches": ("rsrank_batches", "Batches that the model scored."),
    "restarts": ("rsrank_restarts", "Times that the model's process was replaced."),
    "busy_seconds": ("rsrank_busy_seconds", "Time that the model computed."),
    "model_memory_retries": ("rsrank_memory_retries", "Batches halved because memory ran out."),
    "model_misses": (
        "rsrank_prefix_misses",
        "Documents whose prefix was not cached.",
    ),
    "model_evictions": ("rsrank_prefix_evictions", "Prefixes that had to leave the cache."),
    "model_corrupt": ("rsrank_prefix_corrupt", "Damaged files of prefixes."),
    "model_write_errors": (
        "rsrank_prefix_write_errors",
        "Prefixes that could not be written to disk.",
    ),
}
"""Names in `Scheduler.stats`, with their names here, to which Prometheus adds ``_total``."""

GAUGES = {
    "waiting": ("rsrank_waiting_documents", "Documents of requests without an answer yet."),
    "clients": ("rsrank_waiting_clients", "Clients with such documents."),
    "tokens_per_second": ("rsrank_tokens_per_second", "The model's speed in full batches."),
}

PREFIXES: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]] = {
    "hits": (CounterMetricFamily, "rsrank_prefix_hits", "Documents whose prefix was cached."),
    "bytes": (GaugeMetricFamily, "rsrank_prefix_bytes", "Size of the cached prefixes."),
    "limit": (GaugeMetricFamily, "rsrank_prefix_limit_bytes", "Most that may be cached."),
}
"""Likewise, for each place of the prefix cache, such as ``model_disk_hits``."""


class Metrics(Collector):
    """Measures requests, and reads the backend's counters for each scrape."""

    def __init__(self, backend: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.backend = backend
        # Requests that the server's end cut off.
        self.unanswered = 0
        # How many are open; set by the server.
        self.connections: Callable[[], int] = lambda: 0
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        # Until a model is loaded, its process is "none", which does not exist.
        ProcessCollector(
            "rsrank_model",
            lambda: getattr(backend.model.loaded, "process", "none"),
            registry=self.registry,
        )
        histogram = partial(Histogram, registry=self.registry)
        text = "Time from a request's arrival to its answer."
        self._seconds = histogram(
            "rsrank_request_seconds", text, ("route", "status"), buckets=SECONDS
        )
        self._documents = histogram(
            "rsrank_request_documents", "Documents of a request.", ("route",), buckets=SIZES
        )
        text = "Time from a document's arrival to its turn."
        backend.observe_wait = histogram("rsrank_wait_seconds", text, buckets=SECONDS).observe

    def observe(self, record: Record) -> None:
        """Count a request that has been answered."""
        self._seconds.labels(record.route, str(record.status)).observe(record.seconds)
        if record.documents is not None:
            self._documents.labels(record.route).observe(record.documents)

    def collect(self) -> Iterator[Metric]:
        """Every counter and level of the backend."""
        stats = self.backend.stats()
        loaded = self.backend.model.loaded
        ready = float(self.backend.readiness() is None)
        yield GaugeMetricFamily(
            "rsrank_ready", "1 if requests are answered as they should be.", ready
        )
        yield GaugeMetricFamily("rsrank_open_connections", "Of clients, now.", self.connections())
        if loaded is not None:
            labels = {"name": loaded.description.name, "identity": loaded.description.identity}
            yield InfoMetricFamily("rsrank_model", "What is served.", labels)
        for kind, names in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name in filter(stats.__contains__, names):
                yield kind(*names[name], value=stats[name])
        for what, (kind, title, text) in PREFIXES.items():
            family = kind(title, text, labels=["place"])
            for place in ("device", "disk"):
                if (name := f"model_{place}_{what}") in stats:
                    family.add_metric([place], stats[name])
            yield family
