"""The control plane of one worker: one inbound ROUTER, one outbound link per peer."""

from __future__ import annotations

import itertools
import logging

import zmq

from diptych.kvtransfer import wire
from diptych.kvtransfer.cluster import ClusterKeys
from diptych.kvtransfer.gatekeeper import Gatekeeper
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.link import PeerLink, set_common_options
from diptych.kvtransfer.plane import FramePlane, Inbound, LinkDown
from diptych.kvtransfer.stats import TransferStats

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_STEP = 256
_CLOSE_LINGER_MS = 200


class ControlEndpoint(FramePlane):
    def __init__(
        self,
        identity: Identity,
        host: str,
        port: int,
        heartbeat_interval: float,
        stats: TransferStats,
        keys: ClusterKeys | None = None,
    ) -> None:
        """Bind `host:port`, or any free port for 0. With `keys` only peers that have the same are listened to
        and spoken to. Raises `zmq.ZMQError` when the address is taken or isn't local."""
        self.instance_id = identity.instance_id
        self._heartbeat_interval = heartbeat_interval
        self._stats = stats
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        set_common_options(self._router, heartbeat_interval)
        if keys is not None:
            Gatekeeper(self._context, self._router, keys, stats)
        netloc = f"[{host}]" if ":" in host else host
        self._router.setsockopt(zmq.IPV6, int(":" in host))
        try:
            if port:
                self._router.bind(f"tcp://{netloc}:{port}")
            else:
                port = self._router.bind_to_random_port(f"tcp://{netloc}")
        except zmq.ZMQError:
            self._router.close(0)
            self._context.term()
            raise
        self.port = port
        """The one that is bound, never 0."""
        self.address = f"tcp://{netloc}:{port}"
        self._links: dict[str, PeerLink] = {}
        self._link_numbers = itertools.count(1)

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        sockets: list[zmq.Socket[bytes] | int] = [self._router]
        for link in self._links.values():
            sockets += [link.socket, link.monitor]
        return sockets

    def next_deadline(self) -> float | None:
        return None

    def link(self, target: str, address: str) -> int:
        if target not in self._links:
            self._links[target] = PeerLink(
                self._context,
                address,
                target,
                next(self._link_numbers),
                self._heartbeat_interval,
                self._keys,
            )
        return self._links[target].number

    def unlink(self, target: str) -> None:
        self._close_link(target, _CLOSE_LINGER_MS)

    def _close_link(self, target: str, linger_ms: int) -> None:
        link = self._links.pop(target, None)
        if link is not None:
            link.close(linger_ms)

    def send(self, target: str, body: wire.ControlMessage) -> None:
        self.send_frames(target, wire.encode(self.instance_id, target, body))

    def send_frames(self, target: str, frames: list[bytes]) -> None:
        self._links[target].send(frames)

    def reply(self, inbound: Inbound, body: wire.ControlMessage) -> None:
        self.reply_frames(inbound, wire.encode(self.instance_id, inbound.source, body))

    def reply_frames(self, inbound: Inbound, frames: list[bytes]) -> None:
        assert isinstance(inbound.via, bytes | PeerLink)
        self._answer(inbound.via, frames)

    def _answer(self, via: bytes | PeerLink, frames: list[bytes]) -> None:
        if isinstance(via, PeerLink):
            # Unless it was closed, or another has taken its place, since the message came.
            if self._links.get(via.target) is via:
                via.send(frames)
            return
        try:
            self._router.send_multipart([via, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # A peer that asks and doesn't read gets no answer; its own deadline ends it.
            logger.warning("answer to a control message dropped: %s", error)

    def step(self) -> list[Inbound | LinkDown]:
        news: list[Inbound | LinkDown] = []
        for _ in range(_MAX_MESSAGES_PER_STEP):
            if not self._router.poll(0):
                break
            routing_id, *frames = self._router.recv_multipart()
            self._read(frames, routing_id, news)
        for link in list(self._links.values()):
            for _ in range(_MAX_MESSAGES_PER_STEP):
                if not link.socket.poll(0):
                    break
                self._read(link.socket.recv_multipart(), link, news)
            reason = link.check()
            if reason is not None:
                self._close_link(link.target, 0)
                news.append(LinkDown(link.target, reason, link.number))
        return news

    def _read(self, frames: list[bytes], via: bytes | PeerLink, news: list[Inbound | LinkDown]) -> None:
        try:
            envelope = wire.decode(frames)
        except wire.VersionMismatch as error:
            logger.warning("control message refused: %s", error)
            self._stats.control_dropped("version")
            if isinstance(via, PeerLink):
                via.fail(str(error))
            else:
                self._refuse(via, "", str(error))
            return
        except wire.WireError as error:
            logger.warning("control message dropped: %s", error)
            self._stats.control_dropped("malformed")
            return
        if envelope.target != self.instance_id:
            self._stats.control_dropped("target")
            # Never answer a refusal with a refusal.
            if not isinstance(via, PeerLink) and not isinstance(envelope.body, wire.Refused):
                self._refuse(via, envelope.source, "the addressee has been replaced by a new worker process")
            return
        link = via.target if isinstance(via, PeerLink) else None
        news.append(Inbound(envelope.source, envelope.body, via, link))

    def _refuse(self, via: bytes, source: str, reason: str) -> None:
        # Nobody ran anything for this message: worth another try once the new process is known.
        refusal = wire.Refused(reason=reason, status=503, instance_id=self.instance_id)
        self._answer(via, wire.encode(self.instance_id, source, refusal))

    def close(self) -> None:
        for target in list(self._links):
            self.unlink(target)
        if not self._router.closed:
            self._router.close(_CLOSE_LINGER_MS)
            self._context.term()
