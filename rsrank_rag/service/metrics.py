"""The service's counters, in the format of Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .logs import RequestRecord
from .scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

COUNTERS = {
    "documents": "Documents that were scored or got an error.",
    "failed_documents": "Documents that got an error instead of a score.",
    "truncated_documents": "Documents whose end was not read.",
    "cancelled_documents": "Documents whose client left, or whose request was late.",
    "refused_requests": "Requests that had too many tokens, or while too many tokens waited.",
    "late_requests": "Requests that were not answered in time.",
    "tokens": "Tokens read.",
    "restarts": "Times that the model's process was replaced.",
    "prefix_misses": "Documents whose prefix was not cached.",
    "prefix_evictions": "Prefixes that were removed to make room.",
    "prefix_corrupt": "Damaged files of prefixes.",
    "prefix_write_errors": "Prefixes that could not be written to disk.",
}
"""Counters by name, without the ``_total`` that Prometheus adds. `Scheduler.stats` names those of
the prefix cache without ``prefix_``."""

PREFIXES = {
    "hits": (CounterMetricFamily, "hits", "Documents whose prefix was cached."),
    "bytes": (GaugeMetricFamily, "bytes", "Size of the cached prefixes."),
    "limit_bytes": (GaugeMetricFamily, "limit", "Most that may be cached."),
}
"""Numbers of both places of the prefix cache: kind, name in `Scheduler.stats`, description."""


class Metrics(Collector):
    """Measures requests, and reads the backend's counters for each scrape."""

    def __init__(self, backend: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.backend = backend
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        # Until a model is loaded, its process is "none", which does not exist.
        model_pid = lambda: backend.model.pid or "none"  # noqa: E731
        ProcessCollector("rsrank_model", model_pid, registry=self.registry)
        self._seconds = Histogram(
            "rsrank_request_seconds",
            "Time from a request's arrival to its answer.",
            ("route", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has been answered."""
        self._seconds.labels(record.route, str(record.status)).observe(record.seconds)

    def collect(self) -> Iterator[Metric]:
        """Every counter and level of the backend."""
        stats = self.backend.stats()
        text = "Documents of requests without an answer."
        yield GaugeMetricFamily("rsrank_waiting_documents", text, stats["waiting"])
        is_ready = float(self.backend.readiness() is None)
        yield GaugeMetricFamily("rsrank_ready", "1 if requests are answered.", is_ready)
        for name, text in COUNTERS.items():
            value = stats[name.removeprefix("prefix_")]
            yield CounterMetricFamily(f"rsrank_{name}", text, value)
        for name, (kind, key, text) in PREFIXES.items():
            family = kind(f"rsrank_prefix_{name}", text, labels=["place"])
            for place in ("device", "disk"):
                family.add_metric([place], stats[f"{place}_{key}"])
            yield family
