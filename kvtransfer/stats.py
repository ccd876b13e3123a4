"""Counters of one worker's transfers, as Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry


class TransferStats:
    def __init__(self, registry: CollectorRegistry, *, backend: str) -> None:
        raise NotImplementedError
