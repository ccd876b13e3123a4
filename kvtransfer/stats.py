"""Counters of one worker's transfers, as Prometheus metrics labelled with the backend."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.kvtransfer.backends.interface import PageWrite, WriteState

FailureKind = Literal[
    "abort", "peer", "peer_lost", "mismatch", "deadline", "write", "lookup", "protocol", "checksum"
]
DropReason = Literal["malformed", "version", "target", "foreign", "refused", "unexpected"]
HandshakeOutcome = Literal["accepted", "refused"]

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_BYTES_PER_SECOND = tuple(step * 10.0**power for power in range(6, 12) for step in (1, 3))


class TransferStats:
    """One per worker process. Both roles have all metrics; the ones that don't apply stay at zero."""

    def __init__(self, registry: CollectorRegistry, *, backend: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"diptych_transfer_{name}", text, ["backend", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"diptych_transfer_{name}", text, ["backend", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(
                f"diptych_transfer_{name}", text, ["backend"], buckets=buckets, registry=registry
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
        self.handover_seconds = histogram(
            "handover_seconds",
            "Seconds from a prompt's last page being computed until decode was told that all are there.",
        )
        self.bandwidth = histogram(
            "write_bytes_per_second",
            "Bytes of a write by the seconds from posting it until it was done.",
            _BYTES_PER_SECOND,
        )
        self.handshake_seconds = histogram("handshake_seconds", "Seconds of a first contact with a peer.")
        self.checksum_seconds = histogram(
            "checksum_seconds", "Seconds the scheduler read pages to check them."
        )
        self._quarantined = gauge(
            "quarantined_pages", "Pages of failed rooms that the transfer library may still touch."
        ).labels(backend)
        self._rooms = gauge("rooms", "Rooms now, by session state.", "state")
        self._handshakes = counter("handshakes", "First contacts, by outcome.", "outcome")
        self._failures = counter("failures", "Failed rooms, by kind of reason.", "kind")
        self._deadlines = counter("deadline_hits", "Deadlines that passed, by session state.", "state")
        self._dropped = counter("control_dropped", "Control messages not acted on, by reason.", "reason")
        self.connections_refused = counter(
            "connections_refused", "Connections to the control port that did not prove the cluster secret."
        ).labels(backend)
        self._faults = counter("faults_injected", "Faults injected on purpose.", "where", "action")
        # From the start, so that the first one shows as growth.
        for outcome in get_args(HandshakeOutcome):
            self._handshakes.labels(backend, outcome)
        for kind in get_args(FailureKind):
            self._failures.labels(backend, kind)
        for reason in get_args(DropReason):
            self._dropped.labels(backend, reason)

    def watch(
        self,
        states: Iterable[enum.Enum],
        count: Callable[[enum.Enum], int],
        quarantined_pages: Callable[[], int],
    ) -> None:
        """Sessions to count when somebody looks. The registry must be read in the thread that owns them."""
        for state in states:
            self._rooms.labels(self._backend, state.value).set_function(lambda state=state: count(state))
        self._quarantined.set_function(quarantined_pages)

    def posted(self, write: PageWrite, seconds: float) -> None:
        self.writes.inc()
        self.pages.inc(write.num_pages)
        self.bytes.inc(write.num_bytes)
        self.descriptors.inc(write.num_descriptors)
        self.post_seconds.observe(seconds)

    def written(self, write: PageWrite) -> None:
        """A posted write is final."""
        seconds = write.finished_at - write.posted_at
        self.write_seconds.observe(seconds)
        if write.state is WriteState.DONE and seconds > 0:
            self.bandwidth.observe(write.num_bytes / seconds)

    def received(self, num_pages: int, page_bytes: int) -> None:
        self.rooms_done.inc()
        self.pages_received.inc(num_pages)
        self.bytes_received.inc(num_pages * page_bytes)

    def handshake(self, outcome: HandshakeOutcome) -> None:
        self._handshakes.labels(self._backend, outcome).inc()

    def failed(self, kind: FailureKind) -> None:
        self._failures.labels(self._backend, kind).inc()

    def deadline_hit(self, state: str) -> None:
        self._deadlines.labels(self._backend, state).inc()

    def control_dropped(self, reason: DropReason) -> None:
        self._dropped.labels(self._backend, reason).inc()

    def fault_injected(self, where: str, action: str) -> None:
        self._faults.labels(self._backend, where, action).inc()
