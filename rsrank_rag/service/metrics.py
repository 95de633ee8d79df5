"""What the service counts, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .logs import Record
from .scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

COUNTERS = {
    "pairs": ("rsrank_documents", "Documents scored, or found to have no score."),
    "tokens": ("rsrank_tokens", "Tokens read."),
    "truncated": ("rsrank_truncated_documents", "Documents whose end was not read."),
    "unscored": ("rsrank_unscored_documents", "Documents without a finite score, or too large for the memory."),
    "failed": ("rsrank_failed_documents", "Documents that could not be used, or on which the model failed."),
    "cancelled": ("rsrank_cancelled_documents", "Documents whose request went away before their turn."),
    "refused": ("rsrank_refused_requests", "Requests refused because the queue was full."),
    "late": ("rsrank_late_requests", "Requests that were not answered in time."),
    "steps": ("rsrank_batches", "Batches that the model scored."),
    "restarts": ("rsrank_restarts", "Times that the model's process was replaced."),
    "busy_seconds": ("rsrank_busy_seconds", "Time that the model computed."),
    "model_memory_retries": ("rsrank_memory_retries", "Batches halved because memory ran out."),
    "model_misses": ("rsrank_prefix_misses", "Documents that were read because no prefix was kept."),
    "model_evictions": ("rsrank_prefix_evictions", "Prefixes that had to leave."),
    "model_corrupt": ("rsrank_prefix_corrupt", "Damaged files of prefixes."),
    "model_write_errors": ("rsrank_prefix_write_errors", "Prefixes that could not be written to disk."),
}
"""Names in `Scheduler.stats`, and what they are called here; Prometheus adds ``_total``."""

GAUGES = {
    "waiting": ("rsrank_waiting_documents", "Documents that wait for their turn."),
    "clients": ("rsrank_waiting_clients", "Clients with documents that wait."),
    "tokens_per_second": ("rsrank_tokens_per_second", "The model's speed, by estimated tokens."),
}

PLACES = ("device", "host", "disk")
"""Where prefixes are kept."""


class Metrics:
    """Measures requests, and reads the backend's counters when asked."""

    def __init__(self, backend: Scheduler) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_BackendCollector(backend))
        text = "Time from a request's arrival to its answer."
        self._seconds = Histogram(
            "rsrank_request_seconds", text, ("route", "status"), buckets=SECONDS, registry=registry
        )
        text = "Documents of a request."
        self._documents = Histogram("rsrank_request_documents", text, ("route",), buckets=SIZES, registry=registry)

    def observe(self, record: Record) -> None:
        """Count a request that has been answered."""
        self._seconds.labels(record.route, str(record.status)).observe(record.seconds)
        if record.documents is not None:
            self._documents.labels(record.route).observe(record.documents)


class _BackendCollector(Collector):
    def __init__(self, backend: Scheduler) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """Every counter and level of the backend."""
        stats = self._backend.stats()
        ready = float(self._backend.readiness() is None)
        yield GaugeMetricFamily("rsrank_ready", "1 if requests are answered as they should be.", ready)
        for name, (title, text) in COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(title, text, value=stats[name])
        for name, (title, text) in GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(title, text, value=stats[name])
        yield from _prefixes(stats)


def _prefixes(stats: Mapping[str, float]) -> Iterator[Metric]:
    hits = CounterMetricFamily("rsrank_prefix_hits", "Documents whose prefix was kept.", labels=["place"])
    held = GaugeMetricFamily("rsrank_prefix_bytes", "Size of the kept prefixes.", labels=["place"])
    found = 0.0
    for place in PLACES:
        if f"model_{place}_hits" in stats:
            found += stats[f"model_{place}_hits"]
            hits.add_metric([place], stats[f"model_{place}_hits"])
            held.add_metric([place], stats[f"model_{place}_bytes"])
    if not hits.samples:
        return
    yield hits
    yield held
    if asked := found + stats.get("model_misses", 0):
        text = "Share of documents whose prefix was kept, since the start."
        yield GaugeMetricFamily("rsrank_prefix_hit_ratio", text, value=found / asked)
