"""The service's counters, in the format of Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .scheduler import Scheduler

COUNTERS = {
    "documents": "Documents of answered requests.",
    "tokens": "Tokens read.",
    "restarts": "Times that the model's process was replaced.",
    "prefix_device_hits": "Documents whose prefix was cached in memory.",
    "prefix_disk_hits": "Documents whose prefix was cached on disk.",
    "prefix_misses": "Documents whose prefix was not cached.",
    "prefix_evictions": "Prefixes that were removed to make room.",
    "prefix_corrupt": "Damaged files of prefixes.",
    "prefix_write_errors": "Prefixes that could not be written to disk.",
}

GAUGES = {
    "ready": "1 if requests are answered.",
    "waiting_documents": "Documents of requests without an answer.",
    "prefix_device_bytes": "Size of the prefixes in memory.",
    "prefix_device_limit": "Most bytes of prefixes in memory.",
    "prefix_disk_bytes": "Size of the prefixes on disk.",
    "prefix_disk_limit": "Most bytes of prefixes on disk.",
}
"""Numbers of `Scheduler.stats` by name; in Prometheus, their names begin with ``rsrank_``."""


class Metrics(Collector):
    """The seconds of requests, and the backend's counters, which are read for each scrape."""

    def __init__(self, backend: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.backend = backend
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        # Until a model is loaded, its process is "none", which does not exist.
        model_pid = lambda: backend.model.pid or "none"  # noqa: E731
        ProcessCollector("rsrank_model", model_pid, registry=self.registry)
        self.seconds = Histogram(
            "rsrank_request_seconds",
            "Time from a request's arrival to its answer.",
            ("route", "status"),
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """Every counter and level of the backend."""
        stats = self.backend.stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"rsrank_{name}", text, stats[name])
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"rsrank_{name}", text, stats[name])
