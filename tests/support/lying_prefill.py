"""A prefill worker made by hand that tells a decode worker what it likes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import msgspec

from diptych.kvtransfer import wire
from diptych.kvtransfer.bootstrap.route import Route
from support.client import Client
from support.hand_made import HandMadePeer, HandMadeService, route_to

Leg = Future[tuple[int, Any]]


class LyingPrefill(HandMadePeer):
    """With a bootstrap service of its own."""

    def __init__(self, like: Route) -> None:
        """`like`: of a real worker, which this one seems to equal."""
        super().__init__()
        self._service = HandMadeService(route_to(self, like))

    def meet(self, pool: ThreadPoolExecutor, decode: Client, body: dict[str, Any], room: int) -> Leg:
        """Send decode a request, and be its prefill worker until it says hello."""
        pairing = {
            "bootstrap_room": room,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._service.port,
        }
        leg = pool.submit(decode.post, "/generate", body | pairing)
        hello = self.receive(wire.Hello)
        self.hello = hello.number
        self._decode, self._address = hello.identity.instance_id, hello.control_address
        return leg

    def welcome(self) -> wire.Reserve:
        """Agree, and be told where decode wants the pages."""
        self.tell(wire.Welcome(hello=self.hello))
        return self.receive(wire.Reserve)

    def tell(self, body: wire.ControlMessage, *, source: str = "") -> None:
        self.send(self._address, self._decode, body, source=source)

    def complete(self, reserve: wire.Reserve, **lies: Any) -> wire.Complete:
        """That all is there, with these lies in `Complete` and, of the names it has, in its aux block."""
        aux = wire.AuxBlock(room=reserve.room, prompt_tokens=reserve.num_prompt_tokens, first_token=7)
        in_aux = {name: lies[name] for name in lies if name in aux.__struct_fields__ and name != "room"}
        if "aux_room" in lies:
            in_aux["room"] = lies.pop("aux_room")
        complete = wire.Complete(
            room=reserve.room,
            lease=reserve.lease,
            num_pages=len(reserve.pages),
            aux=msgspec.structs.replace(aux, **in_aux),
        )
        rest = {name: value for name, value in lies.items() if name not in in_aux}
        return msgspec.structs.replace(complete, **rest)

    def drained(self, reserve: wire.Reserve) -> None:
        """Else decode would keep its pages in quarantine until this process has ended."""
        self.tell(wire.RoomDrained(room=reserve.room, lease=reserve.lease, clean=True))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.__exit__(kind, value, trace)
        super().__exit__(kind, value, trace)
