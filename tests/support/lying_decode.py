"""Decode workers made by hand that tell a prefill worker what they like."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import torch

from diptych.kvtransfer import wire
from diptych.kvtransfer.backends.interface import Endpoint, TransferBackend
from diptych.kvtransfer.backends.registry import make_backend
from diptych.kvtransfer.bootstrap.route import Route
from support.hand_made import HandMadePeer
from support.tiny_model import HEAD_DIM, KV_HEADS, LAYERS

PAGE_SIZE = 16
PAGE_BYTES = LAYERS * 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM * 4
NUM_PAGES = 32
"""Of the liar's slab."""
PROMPT = [1000 + 7 * i for i in range(40)]
PAGES = [5, 6, 9]
"""Where the liar wants the prompt's three pages when it tells the truth."""

leases = itertools.count(1)
hellos = itertools.count(1)


class Stranger(HandMadePeer):
    """A decode worker that tells the prefill worker what it likes."""

    num_pages = NUM_PAGES
    """Of its slab, as it said."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self._route = route
        (rank,) = route.ranks
        self._prefill, self._address = rank.identity.instance_id, rank.control_address

    def tell(self, body: wire.ControlMessage) -> None:
        self.send(self._address, self._prefill, body)

    def hello(self, endpoint: Endpoint, **lies: Any) -> None:
        self.num_pages = endpoint.num_pages
        hello = wire.Hello(
            number=next(hellos),
            identity=self.identity,
            control_address=self.address,
            fingerprint=self._route.fingerprint,
            endpoint=endpoint,
        )
        self.tell(msgspec.structs.replace(hello, **lies))

    def reserve(self, room: int, **lies: Any) -> wire.Reserve:
        """Of the truth, but for the lies."""
        truth = wire.Reserve(room=room, lease=next(leases), pages=PAGES, num_prompt_tokens=len(PROMPT))
        reserve = msgspec.structs.replace(truth, **lies)
        self.tell(reserve)
        return reserve

    def refused(self, reserve: wire.Reserve) -> wire.Abort:
        """The answer to a reservation that is not honoured."""
        abort = self.receive(wire.Abort)
        drained = self.receive(wire.RoomDrained)
        assert (abort.room, abort.lease) == (reserve.room, reserve.lease)
        assert (drained.room, drained.lease, drained.clean) == (reserve.room, reserve.lease, True)
        return abort


class Liar(Stranger):
    """One with a slab of its own, all zeros, that can be reached."""

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.slab = torch.zeros(NUM_PAGES * PAGE_BYTES, dtype=torch.uint8)
        self.backend: TransferBackend = make_backend(
            route.backend, self.slab, page_bytes=PAGE_BYTES, agent=self.instance_id, loopback=True
        )
        self.backend.expect_writes(True)

    def written(self) -> list[int]:
        """Pages that are not all zeros."""
        return [int(page) for page in self.slab.view(NUM_PAGES, PAGE_BYTES).any(dim=1).nonzero()]

    def close(self) -> None:
        self.backend.close()
