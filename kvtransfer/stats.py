"""Counters of one worker's transfers, as Prometheus metrics labelled with the backend."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.kvtransfer.backends.interface import PageWrite

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class TransferStats:
    """One per worker process. Both roles have all metrics; the ones that don't apply stay at zero."""

    def __init__(self, registry: CollectorRegistry, *, backend: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"diptych_transfer_{name}", text, ["backend", *labels], registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(
                f"diptych_transfer_{name}", text, ["backend"], buckets=_SECONDS, registry=registry
            )
            return made.labels(backend)

        self._backend = backend
        self.writes = counter("writes", "Page writes posted to a peer.").labels(backend)
        self.pages = counter("pages", "Pages posted to a peer.").labels(backend)
        self.bytes = counter("bytes", "Bytes posted to a peer.").labels(backend)
        self.descriptors = counter(
            "descriptors", "Transfer descriptors after joining adjacent pages."
        ).labels(backend)
        self.pages_received = counter("pages_received", "Pages that peers wrote into this slab.").labels(
            backend
        )
        self.bytes_received = counter("bytes_received", "Bytes that peers wrote into this slab.").labels(
            backend
        )
        self.rooms_done = counter("rooms_done", "Rooms whose every page arrived.").labels(backend)
        self.post_seconds = histogram("post_seconds", "Seconds the scheduler spent posting one write.")
        self.write_seconds = histogram("write_seconds", "Seconds from posting a write until it was final.")
        self.handshake_seconds = histogram("handshake_seconds", "Seconds of a first contact with a peer.")
        quarantined = Gauge(
            "diptych_transfer_quarantined_pages",
            "Pages of failed rooms that a write may still touch.",
            ["backend"],
            registry=registry,
        )
        self.quarantined_pages = quarantined.labels(backend)
        self._handshakes = counter("handshakes", "First contacts, by outcome.", "outcome")
        self._failures = counter("failures", "Failed rooms, by kind of reason.", "kind")
        self._deadlines = counter("deadline_hits", "Deadlines that passed, by session state.", "state")
        self._dropped = counter("control_dropped", "Control messages not acted on, by reason.", "reason")

    def posted(self, write: PageWrite, seconds: float) -> None:
        self.writes.inc()
        self.pages.inc(write.num_pages)
        self.bytes.inc(write.num_bytes)
        self.descriptors.inc(write.num_descriptors)
        self.post_seconds.observe(seconds)

    def received(self, num_pages: int, page_bytes: int) -> None:
        self.rooms_done.inc()
        self.pages_received.inc(num_pages)
        self.bytes_received.inc(num_pages * page_bytes)

    def handshake(self, outcome: str) -> None:
        """`accepted` or `refused`."""
        self._handshakes.labels(self._backend, outcome).inc()

    def failed(self, kind: str) -> None:
        """`abort`, `peer`, `peer_lost`, `mismatch`, `deadline`, `write`, `lookup` or `protocol`."""
        self._failures.labels(self._backend, kind).inc()

    def deadline_hit(self, state: str) -> None:
        self._deadlines.labels(self._backend, state).inc()

    def control_dropped(self, reason: str) -> None:
        """`malformed`, `version`, `target`, `foreign`, `refused` or `unexpected`."""
        self._dropped.labels(self._backend, reason).inc()
