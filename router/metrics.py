"""The router's own Prometheus registry."""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from diptych.httpserver.refusals import Cause
from diptych.router.histogram import RouteHistogram, Series
from diptych.router.queue_metrics import BreakerMetrics, QueueMetrics
from diptych.router.workers import Worker

_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_GAP_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3)
_WHOLE_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)


@dataclasses.dataclass(frozen=True, slots=True)
class RouteTimes:
    """The histograms of one generating route, in seconds."""

    first_byte: Series
    first_token: Series
    gap: Series
    whole: Series

    def began(self, seconds: float, *, streams: bool) -> None:
        """The first byte has gone to the client."""
        self.first_byte.observe(seconds)
        if streams:
            self.first_token.observe(seconds)


class RouterMetrics:
    """One registry per router, so that two routers in a process don't share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue = QueueMetrics(self.registry)
        self.breakers = BreakerMetrics(self.registry)
        self._requests = Counter(
            "diptych_router_requests",
            "Requests answered, by route and status (499: the client left first).",
            ["route", "status"],
            registry=self.registry,
        )
        self.broken_answers = Counter(
            "diptych_router_broken_answers",
            "Answers that failed after their head had gone out (with a 200, as a rule), by error code.",
            ["route", "code"],
            registry=self.registry,
        )
        self._connections_refused = Counter(
            "diptych_router_connections_refused",
            "Clients' connections that ended in an error before a request reached a route, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.retries = Counter(
            "diptych_router_retries",
            "Attempts repeated with a fresh room, by what ended the attempt before.",
            ["route", "cause"],
            registry=self.registry,
        )
        self.retries_exhausted = Counter(
            "diptych_router_retries_exhausted",
            "Requests that failed though another attempt was safe: --max-retries were made.",
            ["route"],
            registry=self.registry,
        )
        self.leg_failures = Counter(
            "diptych_router_leg_failures",
            "Legs that ended an attempt, by worker and kind.",
            ["role", "worker", "kind"],
            registry=self.registry,
        )
        self._worker_requests = Counter(
            "diptych_router_worker_requests",
            "Legs sent, by worker: each attempt counts once for either side.",
            ["role", "worker"],
            registry=self.registry,
        )
        self._first_byte = RouteHistogram(
            "diptych_router_first_byte_seconds",
            "From a generating request's arrival to its first byte sent to the client.",
            _FIRST_BYTE_BUCKETS,
            self.registry,
        )
        self._ttft = RouteHistogram(
            "diptych_router_time_to_first_token_seconds",
            "The same of streams alone.",
            _FIRST_BYTE_BUCKETS,
            self.registry,
        )
        self._gap = RouteHistogram(
            "diptych_router_inter_token_latency_seconds",
            "Between two pieces of a stream: a token each, unless the client or the network is slow.",
            _GAP_BUCKETS,
            self.registry,
        )
        self._whole = RouteHistogram(
            "diptych_router_request_seconds",
            "From a generating request's arrival to its last byte sent to the client, of complete answers.",
            _WHOLE_BUCKETS,
            self.registry,
        )
        self._times: dict[str, RouteTimes] = {}
        # To look a series up by its labels costs more than to count.
        self._answered: dict[tuple[str, int], Counter] = {}
        self._sent_to: dict[Worker, Counter] = {}
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

    def times(self, route: str) -> RouteTimes:
        """Where one route's times go."""
        if (known := self._times.get(route)) is None:
            known = self._times[route] = RouteTimes(
                *(h.of(route) for h in (self._first_byte, self._ttft, self._gap, self._whole))
            )
        return known

    def answered(self, route: str, status: int) -> None:
        """A request to this route is over."""
        if (series := self._answered.get((route, status))) is None:
            series = self._answered[route, status] = self._requests.labels(route, str(status))
        series.inc()

    def connection_refused(self, cause: Cause) -> None:
        self._connections_refused.labels(cause.value).inc()

    def sent_to(self, *workers: Worker) -> None:
        """A leg goes to each of them."""
        for worker in workers:
            if (series := self._sent_to.get(worker)) is not None:  # else it was removed a moment ago
                series.inc()

    def added(self, worker: Worker) -> None:
        """Report this worker's load and health; read when scraped."""
        labels = (worker.role.value, worker.url)
        self._sent_to[worker] = self._worker_requests.labels(*labels)
        self._in_flight.labels(*labels).set_function(lambda: worker.in_flight)
        self._healthy.labels(*labels).set_function(lambda: float(worker.healthy))

    def removed(self, worker: Worker) -> None:
        """Its series end: workers that come and go on changing addresses must not pile up here."""
        labels = {"role": worker.role.value, "worker": worker.url}
        del self._sent_to[worker]
        for metric in (self._in_flight, self._healthy, self.leg_failures, self._worker_requests):
            metric.remove_by_labels(labels)

    def exposition(self) -> bytes:
        return bytes(generate_latest(self.registry))
