"""What the router's queue and its workers' breakers show to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.router.admission import Admission
from diptych.router.breaker import BreakerState
from diptych.router.workers import Worker

_WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SHOWN = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class QueueMetrics:
    """The queue's, in the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._depth = Gauge("diptych_router_queued", "Requests that wait for a turn now.", registry=registry)
        self._wait = Histogram(
            "diptych_router_queue_seconds",
            "How long a request that had to wait for a turn waited, whether it got one or not.",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self._turned_away = Counter(
            "diptych_router_turned_away",
            "Requests refused with 429 for want of a turn, by cause: full or timeout.",
            ["cause"],
            registry=registry,
        )

    def watch(self, admission: Admission) -> None:
        """Report its depth; read when scraped."""
        self._depth.set_function(lambda: admission.queued)

    def turned_away(self, cause: str) -> None:
        self._turned_away.labels(cause).inc()

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)


class BreakerMetrics:
    """A listener of the worker registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge(
            "diptych_router_worker_breaker",
            "A worker's circuit breaker: 0 closed, 1 half open, 2 open.",
            ["role", "worker"],
            registry=registry,
        )

    def added(self, worker: Worker) -> None:
        gauge = self._state.labels(worker.role.value, worker.url)
        gauge.set_function(lambda: _SHOWN[worker.breaker.state])

    def removed(self, worker: Worker) -> None:
        self._state.remove(worker.role.value, worker.url)
