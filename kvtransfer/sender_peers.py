"""The decode workers a prefill worker writes to: first contact, telling them things, losing them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer import wire
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.plane import Inbound
from diptych.kvtransfer.probe import Peer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DecodePeer:
    peer: Peer
    num_pages: int
    """Of its slab."""
    hello: int
    """The number of its last one."""
    link: int
    """Made for that hello; another may have followed since."""
    lost: str = ""
    """Why no new reservation is taken from it; its writes drain, then it is forgotten."""


class DecodePeers:
    def __init__(self, parts: TransferParts) -> None:
        self._control = parts.control
        self._backend = parts.backend
        self._fingerprint = parts.fingerprint
        self._stats = parts.stats
        self._known: dict[str, DecodePeer] = {}

    def usable(self, instance_id: str) -> DecodePeer | None:
        peer = self._known.get(instance_id)
        return None if peer is None or peer.lost else peer

    def get(self, instance_id: str) -> DecodePeer | None:
        return self._known.get(instance_id)

    def adopt(self, fingerprint: Fingerprint) -> list[str]:
        """What peers must have in common with this worker is another now; returns whom it met before."""
        self._fingerprint = fingerprint
        return list(self._known)

    def hello(self, inbound: Inbound, hello: wire.Hello) -> None:
        """Check a worker that wants to receive pages; connect it and welcome it, or refuse it."""
        known = self._known.get(inbound.source)
        if known is not None and hello.number < known.hello:
            self._stats.control_dropped("unexpected")
            return
        if known is not None and known.lost:
            # It took no request, and soon will: worth another try.
            reason = f"earlier transfers to this worker are still draining ({known.lost})"
            self._stats.handshake("refused")
            self._refuse(inbound, reason, status=503)
            return
        problem = self._problem(inbound.source, hello)
        link = 0
        if problem is None:
            if known is None or hello.number > known.hello:
                # It begins afresh, and so does the way to it: an outage may have broken or held up a link
                # from before, and nobody has noticed yet.
                self._control.unlink(inbound.source)
            try:
                link = self._control.link(inbound.source, hello.control_address)
                if known is None:
                    self._backend.connect(inbound.source, hello.endpoint)
            except TransferError as error:
                problem = str(error)
        if problem is not None:
            logger.warning("decode worker at %s refused: %s", hello.control_address, problem)
            self._stats.handshake("refused")
            self._refuse(inbound, problem)
            return
        self._known[inbound.source] = DecodePeer(
            Peer(hello.identity, hello.control_address), hello.endpoint.num_pages, hello.number, link
        )
        self._stats.handshake("accepted")
        self._control.send(inbound.source, wire.Welcome(hello=hello.number))
        logger.info("decode worker at %s connected", hello.control_address)

    def _problem(self, source: str, hello: wire.Hello) -> str | None:
        if hello.identity.instance_id != source:
            return "the identity is not the sender's"
        if not hello.control_address.startswith("tcp://"):
            return f"control_address: {hello.control_address!r} is not tcp://host:port"
        return mismatch_text(
            self._fingerprint.differences(hello.fingerprint, here="at prefill", there="at decode")
        )

    def refuse_stranger(self, inbound: Inbound) -> None:
        """Answer a message that needs a handshake first."""
        known = self._known.get(inbound.source)
        why = f"the connection was given up: {known.lost}" if known else "no handshake with this worker"
        # It took nothing, and will once they have met again: worth another try.
        self._refuse(inbound, why, status=503)

    def _refuse(self, inbound: Inbound, reason: str, *, status: int = 502) -> None:
        refused = wire.Refused(reason=reason, status=status, instance_id=self._control.instance_id)
        self._control.reply(inbound, refused)

    def tell(self, instance_id: str, body: wire.ControlMessage) -> None:
        """Best effort, over a new link if need be. Raises `WireError` for a message that is too large."""
        peer = self._known.get(instance_id)
        if peer is None:
            return
        self._control.link(instance_id, peer.peer.control_address)
        self._control.send(instance_id, body)

    def is_over(self, instance_id: str, link: int) -> bool:
        """It has said hello again since that link was made."""
        peer = self._known.get(instance_id)
        return peer is not None and link < peer.link

    def lose(self, instance_id: str, reason: str) -> None:
        """Take no more reservations from it until it says hello again, and let it know."""
        peer = self._known.get(instance_id)
        if peer is not None and not peer.lost:
            logger.warning("decode worker at %s lost: %s", peer.peer.control_address, reason)
            peer.lost = reason
            lost = wire.Refused(reason=reason, instance_id=self._control.instance_id, hello=peer.hello)
            self.tell(instance_id, lost)

    def forget_lost(self, still_writing: set[str]) -> None:
        """Disconnect the lost peers to which nothing is in flight any more."""
        for instance_id, peer in list(self._known.items()):
            if peer.lost and instance_id not in still_writing:
                del self._known[instance_id]
                self._backend.disconnect(instance_id)

    def abandon(self, instance_id: str) -> None:
        """The peer is proven dead: give up the writes that still hang, and the link, which may lead to the
        process that took its address."""
        self._backend.disconnect(instance_id)
        self._control.unlink(instance_id)


def mismatch_text(differences: list[str]) -> str | None:
    """The sentence both legs get; None when nothing differs."""
    if not differences:
        return None
    return f"prefill and decode workers do not match: {'; '.join(differences)}"
