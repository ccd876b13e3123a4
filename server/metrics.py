"""What the frontend counts. Each app has its own registry: one process may hold several in tests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.httpserver.refusals import Cause

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_ITL = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3)
_E2E = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)


class FrontendMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "diptych_http_requests",
            "HTTP requests answered, by route and status (499: the client left).",
            ["route", "status"],
            registry=self.registry,
        )
        self._connections_refused = Counter(
            "diptych_http_connections_refused",
            "Connections that ended in an error before a request reached a route, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.bootstrap_refused = Counter(
            "diptych_bootstrap_refused",
            "Requests to the bootstrap service that did not prove the cluster secret.",
            registry=self.registry,
        )
        self.running = Gauge(
            "diptych_frontend_running_samples", "Samples handed to the scheduler.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "diptych_frontend_prompt_tokens", "Prompt tokens of admitted samples.", registry=self.registry
        )
        self.output_tokens = Counter(
            "diptych_frontend_output_tokens", "Tokens of output.", registry=self.registry
        )
        self.finished = Counter(
            "diptych_frontend_finished_samples", "Samples ended, by why.", ["reason"], registry=self.registry
        )
        self.ttft = Histogram(
            "diptych_frontend_time_to_first_token_seconds",
            "From admission to the first token.",
            buckets=_TTFT,
            registry=self.registry,
        )
        self.itl = Histogram(
            "diptych_frontend_inter_token_latency_seconds",
            "Between tokens of one sample.",
            buckets=_ITL,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "diptych_frontend_request_seconds",
            "From admission to the end of a sample.",
            buckets=_E2E,
            registry=self.registry,
        )

    def connection_refused(self, cause: Cause) -> None:
        self._connections_refused.labels(cause.value).inc()

    def text(self) -> str:
        """Prometheus text exposition."""
        text: bytes = generate_latest(self.registry)
        return text.decode()
