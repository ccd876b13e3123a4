"""A control plane in memory: what is sent waits until it is delivered, one message at a time.

It does to messages what TCP under ZMQ can do: order holds within a connection only; a break loses what was
under way, or lets it arrive later, behind or before what a newer connection brings; each side notices a
break at a time of its own; an address may have been taken by another process start.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from diptych.kvtransfer import wire
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.plane import ControlPlane, Inbound, LinkDown

Frames = list[bytes]


@dataclass(eq=False)
class Connection:
    """One process start's link to an address."""

    owner: MemoryPlane
    target: str
    address: str
    made_at: float
    number: int
    """Of the links of all process starts, upwards."""
    server: MemoryPlane | None = None
    """Who answered at the address; None until something was delivered."""
    there: deque[Frames] = field(default_factory=deque)
    back: deque[Frames] = field(default_factory=deque)
    broken_at: float | None = None
    keeps: bool = True
    """What the owner put into it, before the break or until it notices, still arrives."""
    noticed: bool = False
    """The owner hears of the break with its next step."""
    closed: bool = False
    """The owner has let go of it."""

    @property
    def usable(self) -> bool:
        return self.broken_at is None and not self.closed


@dataclass(frozen=True)
class Delivery:
    """The next message of one direction of a connection."""

    connection: Connection
    is_answer: bool


class MemoryNetwork:
    def __init__(self, clock: Callable[[], float], heartbeat: float) -> None:
        self._clock = clock
        self._patience = 2 * heartbeat
        self.listeners: dict[str, MemoryPlane] = {}
        self.connections: list[Connection] = []
        self.link_numbers = itertools.count(1)

    def deliverable(self) -> list[Delivery]:
        """In a fixed order."""
        found = []
        for connection in self.connections:
            receiver = connection.server or self.listeners.get(connection.address)
            if connection.there and not (receiver is not None and receiver.stopped):
                found.append(Delivery(connection, is_answer=False))
            if connection.back and not connection.owner.stopped:
                found.append(Delivery(connection, is_answer=True))
        return found

    def deliver(self, delivery: Delivery) -> None:
        connection = delivery.connection
        if delivery.is_answer:
            connection.owner.inbox.append((connection.back.popleft(), connection, True))
            return
        if connection.server is None:
            connection.server = self.listeners.get(connection.address)
        server = connection.server
        if server is None or server.dead:
            connection.there.clear()
            self.cut(connection, keeps=False)
            return
        server.inbox.append((connection.there.popleft(), connection, False))

    def cut(self, connection: Connection, *, keeps: bool) -> None:
        """`keeps`: the receiver's kernel already has what the owner sent."""
        if connection.broken_at is None:
            connection.broken_at = self._clock()
            connection.keeps = keeps
            connection.back.clear()
            if not keeps:
                connection.there.clear()

    def kill(self, plane: MemoryPlane, *, keeps: bool) -> None:
        """`keeps`: what the dead sent last still arrives."""
        plane.dead = True
        plane.inbox.clear()
        del self.listeners[plane.address]
        for connection in self.connections:
            if connection.owner is plane:
                connection.closed = True
                connection.back.clear()
                if not keeps:
                    connection.there.clear()
            elif connection.server is plane:
                answers = list(connection.back) if keeps else []
                self.cut(connection, keeps=False)
                connection.back.extend(answers)

    @property
    def at_rest(self) -> bool:
        """Nothing is left to arrive or to be noticed."""
        open_ones = [c for c in self.connections if not c.closed and not c.owner.dead]
        return not self.deliverable() and all(
            c.broken_at is None and (c.server is not None or c.address in self.listeners) for c in open_ones
        )

    def tick(self) -> None:
        """Heartbeats: who runs notices within two of them that its peer is gone or silent."""
        limit = self._clock() - self._patience
        for connection in self.connections:
            peer = connection.server or self.listeners.get(connection.address)
            if peer is None and connection.made_at <= limit:
                self.cut(connection, keeps=False)
            if peer is not None and peer.stopped_at is not None and peer.stopped_at <= limit:
                self.cut(connection, keeps=True)
                connection.noticed = True
            if connection.broken_at is not None and connection.broken_at <= limit:
                connection.noticed = True
        self.connections = [c for c in self.connections if not c.closed or c.there or c.back]


class MemoryPlane(ControlPlane):
    """The end of one process start."""

    def __init__(self, network: MemoryNetwork, instance_id: str, address: str) -> None:
        self.instance_id = instance_id
        self.address = address
        self.stopped_at: float | None = None
        self.dead = False
        self.inbox: list[tuple[Frames, Connection, bool]] = []
        self._network = network
        self._links: dict[str, Connection] = {}
        network.listeners[address] = self

    @property
    def stopped(self) -> bool:
        return self.stopped_at is not None

    @property
    def has_news(self) -> bool:
        return bool(self.inbox) or any(link.noticed for link in self._links.values())

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return []

    def next_deadline(self) -> float | None:
        return None

    def link(self, target: str, address: str) -> int:
        if not address.startswith("tcp://memory:"):
            raise TransferError(f"control address {address!r}")
        if target not in self._links:
            number = next(self._network.link_numbers)
            connection = Connection(self, target, address, self._network._clock(), number)
            self._links[target] = connection
            self._network.connections.append(connection)
        return self._links[target].number

    def unlink(self, target: str) -> None:
        connection = self._links.pop(target, None)
        if connection is not None:
            self._let_go(connection)

    def _let_go(self, connection: Connection) -> None:
        connection.closed = True
        connection.back.clear()
        self.inbox = [entry for entry in self.inbox if not (entry[2] and entry[1] is connection)]

    def send(self, target: str, body: wire.ControlMessage) -> None:
        self._put(self._links[target], wire.encode(self.instance_id, target, body))

    @staticmethod
    def _put(connection: Connection, frames: Frames) -> None:
        if connection.usable or (connection.keeps and not connection.closed):
            connection.there.append(frames)

    def reply(self, inbound: Inbound, body: wire.ControlMessage) -> None:
        connection = inbound.via
        assert isinstance(connection, Connection)
        self._answer(connection, wire.encode(self.instance_id, inbound.source, body))

    def _answer(self, connection: Connection, frames: Frames) -> None:
        if connection.owner is self:
            self._put(connection, frames)
        elif connection.usable:
            connection.back.append(frames)

    def step(self) -> list[Inbound | LinkDown]:
        inbox, self.inbox = self.inbox, []
        news: list[Inbound | LinkDown] = []
        for frames, connection, is_answer in inbox:
            envelope = wire.decode(frames)
            if envelope.target == self.instance_id:
                link = connection.target if is_answer else None
                news.append(Inbound(envelope.source, envelope.body, connection, link))
            elif not is_answer and not isinstance(envelope.body, wire.Refused):
                refused = wire.Refused(reason="replaced", status=503, instance_id=self.instance_id)
                self._answer(connection, wire.encode(self.instance_id, envelope.source, refused))
        for target, connection in list(self._links.items()):
            if connection.noticed:
                del self._links[target]
                self._let_go(connection)
                news.append(LinkDown(target, "connection lost", connection.number))
        return news

    def close(self) -> None:
        return
