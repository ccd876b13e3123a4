"""Questions and orders to the scheduler that get one answer each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from diptych.engine.faults import FaultChange
from diptych.engine.wire import ActionReply, Call, Faults, FaultsReply, GetState, Reply, StateReply
from diptych.server.errors import DeadlineExceeded, Unavailable
from diptych.server.scheduler_link import SchedulerLink

MakeCall = Callable[[int], Call]
"""From a call id to the message that carries it."""
R = TypeVar("R", ActionReply, StateReply, FaultsReply)


class SchedulerCalls:
    """Every call raises `DeadlineExceeded` after `bound` seconds and `Unavailable` without a scheduler."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._serial = 0
        self._dead: Unavailable | None = None

    async def act(self, make: MakeCall, bound: float) -> ActionReply:
        """Send the message that `make` builds from a call id; its answer says whether it was done."""
        return await self._call(make, bound, ActionReply)

    async def state(self, bound: float) -> StateReply:
        """The scheduler's counters and bags."""
        return await self._call(lambda call_id: GetState(call_id=call_id), bound, StateReply)

    async def faults(self, change: FaultChange | None, bound: float) -> FaultsReply:
        """What fault injection does, after `change`. Only where it is on."""
        return await self._call(lambda call_id: Faults(call_id=call_id, change=change), bound, FaultsReply)

    def answered(self, reply: Reply) -> None:
        """The scheduler's answer has come; late ones are dropped."""
        call = self._waiting.pop(reply.call_id, None)
        if call is not None and not call.done():
            call.set_result(reply)

    def fail(self, error: Unavailable) -> None:
        """The scheduler is gone: end what waits, and refuse what follows."""
        self._dead = error
        for call in self._waiting.values():
            if not call.done():
                call.set_exception(error)
        self._waiting.clear()

    async def _call(self, make: MakeCall, bound: float, kind: type[R]) -> R:
        if self._dead is not None:
            raise self._dead
        self._serial += 1
        call_id = self._serial
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            if not self._link.send(make(call_id)):
                raise Unavailable("the worker's scheduler is gone")
            async with asyncio.timeout(bound):
                reply = await future
        except TimeoutError:
            raise DeadlineExceeded(f"the scheduler did not answer within {bound:g} s") from None
        finally:
            self._waiting.pop(call_id, None)
        assert isinstance(reply, kind)
        return reply
