"""What a scheduler process counts. The frontend serves it under /metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class EngineMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.prefill_tokens = Counter(
            "diptych_prefill_tokens_total", "Prompt tokens run through the model here", registry=registry
        )
        self.decode_tokens = Counter(
            "diptych_decode_tokens_total", "Tokens produced by decode steps here", registry=registry
        )
        self.cached_tokens = Counter(
            "diptych_cached_tokens_total", "Prompt tokens served from the prefix cache", registry=registry
        )
        self.prefill_seconds = Counter(
            "diptych_prefill_step_seconds_total", "Time in prefill steps", registry=registry
        )
        self.decode_seconds = Counter(
            "diptych_decode_step_seconds_total", "Time in decode steps", registry=registry
        )
        self.retractions = Counter(
            "diptych_retractions_total", "Requests parked because the pool ran short", registry=registry
        )
        self.finished = Counter(
            "diptych_finished_requests_total", "Samples that ended, by reason", ["reason"], registry=registry
        )
        self.accounting_errors = Counter(
            "diptych_pool_accounting_errors_total",
            "Idle checks that found page counts that do not add up",
            registry=registry,
        )
        self._pages = Gauge("diptych_pool_pages", "KV pages by state", ["state"], registry=registry)
        self._running = Gauge("diptych_running_requests", "Requests in the decode batch", registry=registry)
        self._waiting = Gauge("diptych_waiting_requests", "Requests not yet running", registry=registry)

    def follow(self, load: Callable[[], dict[str, int]]) -> None:
        """Read the gauges from the scheduler's load whenever somebody asks."""
        for state in ("total", "free", "cached", "held", "quarantined"):
            self._pages.labels(state).set_function(lambda state=state: load()[f"pages_{state}"])
        self._running.set_function(lambda: load()["num_running_reqs"])
        self._waiting.set_function(lambda: load()["num_waiting_reqs"])

    def exposition(self) -> str:
        text: bytes = generate_latest(self._registry)
        return text.decode()
