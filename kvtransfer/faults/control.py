"""A control plane whose messages get lost, late, doubled, out of order, held or broken."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from diptych.kvtransfer import wire
from diptych.kvtransfer.faults.corruption import corrupt
from diptych.kvtransfer.faults.injector import Injector
from diptych.kvtransfer.plane import ControlPlane, FramePlane, Inbound, LinkDown


class FaultyControl(ControlPlane):
    """Around the real one. A message that leaves or arrives late does so only while the link it was meant
    for, or came by, still exists; later messages overtake those that are delayed or held."""

    def __init__(self, inner: FramePlane, faults: Injector) -> None:
        """The inner plane is this one's to close."""
        self._inner = inner
        self._faults = faults
        self.instance_id = inner.instance_id
        self.address = inner.address
        self._linked: dict[str, int] = {}
        """The number of the link to each."""
        self._arrived: list[Inbound | LinkDown] = []

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return self._inner.pollables()

    def next_deadline(self) -> float | None:
        if self._arrived:
            return 0.0
        candidates = (self._inner.next_deadline(), self._faults.next_deadline())
        return min((c for c in candidates if c is not None), default=None)

    def link(self, target: str, address: str) -> int:
        self._linked[target] = self._inner.link(target, address)
        return self._linked[target]

    def unlink(self, target: str) -> None:
        self._linked.pop(target, None)
        self._inner.unlink(target)

    # ---- out ------------------------------------------------------------------------------------------

    def send(self, target: str, body: wire.ControlMessage) -> None:
        link = self._linked[target]

        def deliver(frames: list[bytes]) -> None:
            if self._linked.get(target) == link:
                self._inner.send_frames(target, frames)

        self._leave(target, body, deliver)

    def reply(self, inbound: Inbound, body: wire.ControlMessage) -> None:
        self._leave(inbound.source, body, lambda frames: self._inner.reply_frames(inbound, frames))

    def _leave(self, peer: str, body: wire.ControlMessage, deliver: Callable[[list[bytes]], None]) -> None:
        frames = wire.encode(self.instance_id, peer, body)
        kind, room = kind_of(body), room_of(body)
        rule = self._faults.decide("send", kind, room)
        if rule is None:
            deliver(frames)
            self._faults.overtaken("send", peer)
            return
        match rule.action:
            case "drop":
                return
            case "duplicate":
                deliver(frames)
                deliver(frames)
            case "corrupt":
                deliver(corrupt(frames, rule.how, self._faults.random))
            case _:
                self._faults.hold(rule, lambda: deliver(frames), kind=kind, room=room, peer=peer)

    # ---- in -------------------------------------------------------------------------------------------

    def step(self) -> list[Inbound | LinkDown]:
        self._faults.run_due()
        for news in self._inner.step():
            if isinstance(news, LinkDown):
                self._linked.pop(news.target, None)
                self._arrived.append(news)
            else:
                self._arrive(news)
        arrived, self._arrived = self._arrived, []
        return arrived

    def _arrive(self, inbound: Inbound) -> None:
        kind, room = kind_of(inbound.body), room_of(inbound.body)
        link = None if inbound.link is None else self._linked.get(inbound.link)
        rule = self._faults.decide("receive", kind, room)
        if rule is None:
            self._deliver(inbound, link)
            self._faults.overtaken("receive", inbound.source)
            return
        match rule.action:
            case "drop":
                return
            case "duplicate":
                self._deliver(inbound, link)
                self._deliver(inbound, link)
            case _:
                self._faults.hold(
                    rule, lambda: self._deliver(inbound, link), kind=kind, room=room, peer=inbound.source
                )

    def _deliver(self, inbound: Inbound, link: int | None) -> None:
        if inbound.link is not None and self._linked.get(inbound.link) != link:
            return
        if isinstance(inbound.body, wire.Reserve):
            for page in inbound.body.pages:
                self._faults.destinations[inbound.source, page] = inbound.body.room
        self._arrived.append(inbound)

    def close(self) -> None:
        self._inner.close()


def kind_of(body: wire.ControlMessage) -> str:
    """The tag of the message on the wire."""
    tag = type(body).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def room_of(body: wire.ControlMessage) -> int | None:
    """None for messages between workers that are about no request."""
    if isinstance(body, wire.Hello | wire.Welcome | wire.Refused):
        return None
    return body.room
