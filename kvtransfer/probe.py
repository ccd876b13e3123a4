"""Is a silent peer gone for good? Only proof counts: a lost connection or a stall is none."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from dataclasses import dataclass

from diptych.engine.background import BackgroundPool
from diptych.kvtransfer.bootstrap.client import fetch_route
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.identity import Identity

_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of one process start of a peer."""

    identity: Identity
    control_address: str
    bootstrap: tuple[str, int] | None = None
    """`(host, port)` of its bootstrap service, for a prefill worker."""

    @property
    def instance_id(self) -> str:
        return self.identity.instance_id


def proof_of_death(peer: Peer, keys: ClusterKeys | None = None) -> str | None:
    """Blocking. Why the peer's process can't be alive, or None when it may be.

    A firewall that rejects looks like a closed port. On this host there is none between two workers; of
    another host's prefill worker its bootstrap service must say the same, or refuse too. A decode worker has
    no such witness, and needs none: writes to it end with its connections."""
    if peer.identity.is_known_dead():
        return f"process {peer.identity.pid} has ended"
    host, _, port = peer.control_address.removeprefix("tcp://").rpartition(":")
    try:
        refused = _refuses(host.strip("[]"), int(port))
        if refused and peer.identity.is_of_this_host():
            return f"{peer.control_address} refuses connections"
        if peer.bootstrap is None:
            return None
        if refused and _refuses(*peer.bootstrap):
            where = f"{peer.bootstrap[0]}:{peer.bootstrap[1]}"
            return f"{peer.control_address} and its bootstrap service {where} refuse connections"
        route = fetch_route(*peer.bootstrap, keys)
    except (OSError, TransferError):
        return None
    if all(rank.identity.instance_id != peer.instance_id for rank in route.ranks):
        return "another worker has taken its place"
    return None


def _refuses(host: str, port: int) -> bool:
    """Whether connections are refused there. Raises `OSError` when there is no answer at all."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    return False


class DeathProbe:
    """Runs `proof_of_death` off the scheduler's thread; one probe per peer at a time."""

    def __init__(self, pool: BackgroundPool, prove: Callable[[Peer], str | None] = proof_of_death) -> None:
        self._pool = pool
        self._prove = prove
        self._running: set[str] = set()
        self._verdicts: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()

    def submit(self, peer: Peer) -> None:
        if peer.instance_id not in self._running:
            self._running.add(peer.instance_id)
            self._pool.submit(self._run, peer)

    def _run(self, peer: Peer) -> None:
        verdict: str | None = None
        try:
            verdict = self._prove(peer)
        finally:
            self._verdicts.put((peer.instance_id, verdict))

    def take(self) -> list[tuple[str, str]]:
        """`(instance_id, proof)` of the peers proven dead since the last call."""
        proven: list[tuple[str, str]] = []
        while not self._verdicts.empty():
            instance_id, proof = self._verdicts.get_nowait()
            self._running.discard(instance_id)
            if proof is not None:
                proven.append((instance_id, proof))
        return proven
