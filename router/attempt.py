"""One try of a request on one pair of workers."""

from __future__ import annotations

import asyncio
import secrets
from types import TracebackType

import aiohttp

from diptych.common_config import get_router
from diptych.router.blame import guilty, prefer
from diptych.router.call import Call
from diptych.router.legs import Leg, LegFailure, silent
from diptych.router.pairing import Pair

PEER_GRACE = 0.1
"""Seconds that a leg gets to fail as well, when all that is known is the other's report of a failed transfer:
the one that died is told apart from the one that noticed, and one that refused makes another try safe."""


class Attempt:
    """As a context manager it leaves no leg behind. `keep_prefill`: `prefill_body` will be asked for."""

    def __init__(
        self, session: aiohttp.ClientSession, pair: Pair, call: Call, *, keep_prefill: bool = False
    ) -> None:
        room = secrets.randbits(63)
        body = call.body(pair.prefill.host, pair.prefill.bootstrap_port, room)
        self._pair = pair
        self._prefill = Leg(session, pair.prefill, call.path, body, call.headers)
        self._decode = Leg(session, pair.decode, call.path, body, call.headers)
        self._prefill_bytes: bytearray | None = bytearray() if keep_prefill else None
        self._prefill_done: asyncio.Task[None] | None = None
        self._wait: asyncio.Timeout | None = None
        """For decode's first byte, while that goes on. The caller's own task runs the decode leg: another one
        would cost every request two more turns of the event loop."""

    async def __aenter__(self) -> Attempt:
        self._prefill.open()
        self._decode.open()
        self._prefill_done = asyncio.create_task(self._run_prefill())
        self._prefill_done.add_done_callback(self._prefill_ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decode.close()
        if self._prefill_done is None:
            return
        self._prefill_done.cancel()
        self._prefill.close()
        # Cancelled here it has no say any more, and if it failed it was already judged.
        await asyncio.gather(self._prefill_done, return_exceptions=True)

    async def first_byte(self) -> tuple[aiohttp.ClientResponse, bytes]:
        """Decode's head and first bytes (empty for an empty body). Raises LegFailure if either leg fails
        first, or neither says anything for `--first-byte-timeout`; when both have failed, the failure that
        decides."""
        limit = get_router().first_byte_timeout
        try:
            async with asyncio.timeout(limit) as self._wait:
                started = await self._start_decode()
        except TimeoutError:
            failures = self._prefill_failures()
            if not failures:
                assert limit is not None
                # A prefill that is done has nothing to do with it; of one that isn't nobody knows.
                late = [self._decode] if _went_well(self._prefill_done) else [self._decode, self._prefill]
                failures = [silent(leg.worker, limit, "--first-byte-timeout") for leg in late]
            raise self._judged(failures) from None
        finally:
            self._wait = None
        if (idle := get_router().stream_idle_timeout) is not None:
            self._decode.limit_silence(idle)
        return started

    async def next_bytes(self) -> bytes:
        """Decode's next bytes, `b""` at the end. Raises LegFailure if they end early or stay away for
        `--stream-idle-timeout`."""
        try:
            return await self._decode.read()
        except LegFailure as failure:
            raise self._judged([failure]) from failure.__cause__

    async def prefill_body(self) -> bytes:
        """All that the prefill worker answers, once it has. Raises LegFailure."""
        assert self._prefill_done is not None
        assert self._prefill_bytes is not None, "it wasn't to be kept"
        await asyncio.wait({self._prefill_done})
        if failures := self._prefill_failures():
            raise self._judged(failures)
        return bytes(self._prefill_bytes)

    def release_prefill(self) -> asyncio.Task[None]:
        """Hand over the prefill leg: its task goes on reading the body after the attempt has ended."""
        assert self._prefill_done is not None
        task, self._prefill_done = self._prefill_done, None
        return task

    async def _start_decode(self) -> tuple[aiohttp.ClientResponse, bytes]:
        assert self._prefill_done is not None
        try:
            response = await self._decode.start()
            return response, await self._decode.read()
        except LegFailure as failure:
            self._wait = None  # prefill's failure adds to this one; it cuts nothing short any more
            if failure.may_be_the_peers:
                await asyncio.wait({self._prefill_done}, timeout=PEER_GRACE)
            raise self._judged([failure, *self._prefill_failures()]) from failure.__cause__

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        """If it failed there is nothing to wait for at decode, but its word on a failed transfer."""
        if self._wait is None or self._wait.expired() or task.cancelled():
            return
        if (error := task.exception()) is None:
            return
        now = asyncio.get_running_loop().time()
        until = now + PEER_GRACE if isinstance(error, LegFailure) and error.may_be_the_peers else now
        if (limit := self._wait.when()) is None or until < limit:
            self._wait.reschedule(until)

    def _prefill_failures(self) -> list[LegFailure]:
        """One or none. Raises what is no failure of a leg but a mistake of ours."""
        task = self._prefill_done
        error = task.exception() if task is not None and task.done() else None
        if error is None:
            return []
        if isinstance(error, LegFailure):
            return [error]
        raise error

    def _judged(self, failures: list[LegFailure]) -> LegFailure:
        """The failure that decides, once those who may have caused it are charged."""
        suspects = [self._pair.decode]
        if not _went_well(self._prefill_done):
            suspects.append(self._pair.prefill)
        for worker in guilty(failures, suspects):
            worker.breaker.failed()
        return prefer(failures)

    async def _run_prefill(self) -> None:
        try:
            await self._prefill.start()
            while chunk := await self._prefill.read():
                if self._prefill_bytes is not None:
                    self._prefill_bytes += chunk
        finally:
            self._prefill.close()


def _went_well(prefill: asyncio.Task[None] | None) -> bool:
    """Whether that leg has done its part."""
    return prefill is not None and prefill.done() and prefill.exception() is None
