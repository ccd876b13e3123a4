"""The prefill workers a decode worker receives from: greeting, telling them things, losing them."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass, field

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.route import RankAddress, Route
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.probe import Peer
from diptych.kvtransfer.sender_peers import mismatch_text

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillPeer:
    peer: Peer
    bootstraps: set[tuple[str, int]] = field(default_factory=set)
    """Every name under which it was looked up."""
    hello: int = 0
    """The number of the last one said to it."""
    greeted_at: float | None = None
    welcomed: bool = False


class PrefillPeers:
    def __init__(self, parts: TransferParts, *, rank: int, world_size: int) -> None:
        self._control = parts.control
        self._lookup = parts.lookup
        self._backend = parts.backend
        self._fingerprint = parts.fingerprint
        self._identity = parts.identity
        self._stats = parts.stats
        self._clock = parts.clock
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, PrefillPeer] = {}
        self._hellos = itertools.count(1)

    def from_route(self, route: Route, bootstrap: tuple[str, int]) -> PrefillPeer | None:
        """The worker process this rank talks to; None when the route has no such rank."""
        address: RankAddress | None = next((r for r in route.ranks if r.rank == self._rank), None)
        if address is None and route.ranks:
            address = route.ranks[0]
        if address is None:
            return None
        peer = Peer(address.identity, address.control_address, bootstrap)
        if peer.instance_id not in self._known:
            logger.info(
                "prefill worker %s of bootstrap service %s:%d has published %s",
                peer.instance_id, *bootstrap, json.dumps(route.published),
            )  # fmt: skip
        known = self._known.setdefault(peer.instance_id, PrefillPeer(peer))
        known.bootstraps.add(bootstrap)
        return known

    def adopt(self, fingerprint: Fingerprint) -> list[str]:
        """What peers must have in common with this worker is another now; returns whom it met before."""
        self._fingerprint = fingerprint
        return list(self._known)

    def mismatch(self, route: Route) -> str | None:
        """Why no page of that worker can be used here, or None."""
        differences = self._fingerprint.differences(route.fingerprint, here="at decode", there="at prefill")
        if route.backend != self._backend.name:
            differences.append(
                f"transfer backend: {self._backend.name} at decode, {route.backend} at prefill"
            )
        if len(route.ranks) != self._world_size:
            differences.append(f"world size: {self._world_size} at decode, {len(route.ranks)} at prefill")
        return mismatch_text(differences)

    def link(self, peer: PrefillPeer) -> None:
        """Raises `TransferError` for an address that can't be one."""
        self._control.link(peer.peer.instance_id, peer.peer.control_address)

    def greet(self, peer: PrefillPeer) -> None:
        """Say hello once; `Welcome` or `Refused` follows. Raises as `link` does."""
        if peer.greeted_at is not None:
            return
        # A link is left from when it was lost, if it was told anything since: an outage may hold it up.
        self._control.unlink(peer.peer.instance_id)
        peer.hello = next(self._hellos)
        hello = wire.Hello(
            number=peer.hello,
            identity=self._identity,
            control_address=self._control.address,
            fingerprint=self._fingerprint,
            endpoint=self._backend.endpoint(),
        )
        self.tell(peer.peer, hello)
        peer.greeted_at = self._clock()

    def unanswered(self, instance_id: str) -> None:
        """A hello has waited too long for its answer, which may be lost: the next request greets again."""
        peer = self._known.get(instance_id)
        if peer is not None and not peer.welcomed:
            peer.greeted_at = None

    def greeting(self) -> bool:
        """A first contact is under way."""
        return any(p.greeted_at is not None and not p.welcomed for p in self._known.values())

    def is_current(self, instance_id: str, hello: int | None) -> bool:
        """What that worker says of a hello is about the last one, and the contact it began."""
        peer = self._known.get(instance_id)
        return peer is not None and hello == peer.hello

    def welcome(self, instance_id: str, hello: int) -> bool:
        """False when nobody waits for it."""
        peer = self._known.get(instance_id)
        if peer is None or peer.greeted_at is None or peer.welcomed or peer.hello != hello:
            return False
        peer.welcomed = True
        self._stats.handshake("accepted")
        self._stats.handshake_seconds.observe(self._clock() - peer.greeted_at)
        return True

    def tell(self, peer: Peer, body: wire.ControlMessage) -> None:
        """Over a new link if need be. Raises `WireError` for a message that is too large."""
        self._control.link(peer.instance_id, peer.control_address)
        self._control.send(peer.instance_id, body)

    def lose(self, instance_id: str) -> Peer | None:
        """Forget it: the next request looks it up and greets it afresh. None when it wasn't known."""
        known = self._known.pop(instance_id, None)
        if known is None:
            return None
        if known.greeted_at is not None and not known.welcomed:
            self._stats.handshake("refused")
        self._control.unlink(instance_id)
        for bootstrap in known.bootstraps:
            self._lookup.invalidate(*bootstrap)
        return known.peer
