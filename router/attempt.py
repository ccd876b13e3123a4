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
        self._decode_started: asyncio.Task[tuple[aiohttp.ClientResponse, bytes]] | None = None

    async def __aenter__(self) -> Attempt:
        self._prefill.open()
        self._decode.open()
        self._prefill_done = asyncio.create_task(self._run_prefill())
        self._decode_started = asyncio.create_task(self._start_decode())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [t for t in (self._prefill_done, self._decode_started) if t is not None]
        for task in tasks:
            task.cancel()
        if self._prefill_done is not None:
            self._prefill.close()
        self._decode.close()
        # A task cancelled here has no say any more, and one that failed was already judged.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_byte(self) -> tuple[aiohttp.ClientResponse, bytes]:
        """Decode's head and first bytes (empty for an empty body). Raises LegFailure if either leg fails
        first, or neither says anything for `--first-byte-timeout`; when both have failed, the failure that
        decides."""
        limit = get_router().first_byte_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._first_byte()
        except TimeoutError:
            assert limit is not None
            assert self._prefill_done is not None
            # A prefill that is done has nothing to do with it; of one that isn't nobody knows.
            late = [self._decode] if _went_well(self._prefill_done) else [self._decode, self._prefill]
            failures = [silent(leg.worker, limit, "--first-byte-timeout") for leg in late]
            raise self._judged(failures) from None

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
        if failures := self._failures():
            raise self._judged(failures)
        return bytes(self._prefill_bytes)

    def release_prefill(self) -> asyncio.Task[None]:
        """Hand over the prefill leg: its task goes on reading the body after the attempt has ended."""
        assert self._prefill_done is not None
        task, self._prefill_done = self._prefill_done, None
        return task

    async def _first_byte(self) -> tuple[aiohttp.ClientResponse, bytes]:
        assert self._prefill_done is not None
        assert self._decode_started is not None
        both = {self._prefill_done, self._decode_started}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self._decode_started.done() and self._prefill_done.exception() is None:
            await asyncio.wait({self._decode_started})
        if self._decode_started.done() and self._decode_started.exception() is None:
            if (idle := get_router().stream_idle_timeout) is not None:
                self._decode.limit_silence(idle)
            return self._decode_started.result()
        if all(failure.may_be_the_peers for failure in self._failures()):
            await asyncio.wait(both, timeout=PEER_GRACE)
        raise self._judged(self._failures())

    def _failures(self) -> list[LegFailure]:
        """Of the legs that have ended. Raises what is no failure of a leg but a mistake of ours."""
        failures = []
        for task in (self._decode_started, self._prefill_done):
            error = task.exception() if task is not None and task.done() else None
            if isinstance(error, LegFailure):
                failures.append(error)
            elif error is not None:
                raise error
        return failures

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

    async def _start_decode(self) -> tuple[aiohttp.ClientResponse, bytes]:
        response = await self._decode.start()
        return response, await self._decode.read()


def _went_well(prefill: asyncio.Task[None] | None) -> bool:
    """Whether that leg has done its part."""
    return prefill is not None and prefill.done() and prefill.exception() is None
