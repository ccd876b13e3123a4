"""The router's own Prometheus registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.router.queue_metrics import BreakerMetrics, QueueMetrics
from diptych.router.workers import Worker

_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    """One registry per router, so that two routers in a process don't share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue = QueueMetrics(self.registry)
        self.breakers = BreakerMetrics(self.registry)
        self.requests = Counter(
            "diptych_router_requests",
            "Requests answered, by route and status (499: the client left first).",
            ["route", "status"],
            registry=self.registry,
        )
        self.retries = Counter(
            "diptych_router_retries",
            "Attempts repeated with a fresh room, by what ended the attempt before.",
            ["route", "cause"],
            registry=self.registry,
        )
        self.leg_failures = Counter(
            "diptych_router_leg_failures",
            "Legs that ended an attempt, by worker and kind.",
            ["role", "worker", "kind"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "diptych_router_first_byte_seconds",
            "From a generating request's arrival to its first byte sent to the client.",
            ["route"],
            buckets=_FIRST_BYTE_BUCKETS,
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "diptych_router_worker_in_flight",
            "Requests a worker hasn't finished answering.",
            ["role", "worker"],
            registry=self.registry,
        )
        self._healthy = Gauge(
            "diptych_router_worker_healthy",
            "1 while a worker is given requests.",
            ["role", "worker"],
            registry=self.registry,
        )

    def added(self, worker: Worker) -> None:
        """Report this worker's load and health; read when scraped."""
        labels = (worker.role.value, worker.url)
        self._in_flight.labels(*labels).set_function(lambda: worker.in_flight)
        self._healthy.labels(*labels).set_function(lambda: float(worker.healthy))

    def removed(self, worker: Worker) -> None:
        """Its series end: workers that come and go on changing addresses must not pile up here."""
        labels = {"role": worker.role.value, "worker": worker.url}
        for metric in (self._in_flight, self._healthy, self.leg_failures):
            metric.remove_by_labels(labels)

    def exposition(self) -> bytes:
        return bytes(generate_latest(self.registry))
