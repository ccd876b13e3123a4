"""The two-leg relay: one request, posted to a prefill and a decode worker at once.

An attempt goes through these states:

| state | prefill leg | decode leg | ends when |
|---|---|---|---|
| waiting | running | running | decode's first byte → streaming; either leg fails → failed |
| streaming | read and ignored | relayed as it comes | decode's last byte → done; decode breaks → failed |
| done | read to its end, unwatched by the client | – | |
| failed | dropped | dropped | |

A client that leaves, and the request's deadline, drop both legs in any state.

**What is tried again.** A failed attempt is repeated, with a fresh room and preferably other workers, only
if both hold: no byte went to the client, and a leg provably never ran the request (no connection, or a 503
answer). Output needs both legs, so then neither side can have produced any. Everything else, such as a
connection that broke after the request was sent, may have produced output, and is reported instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

import aiohttp
from aiohttp import web

from diptych.common_config import get_router
from diptych.router.admission import Admission
from diptych.router.attempt import Attempt
from diptych.router.blame import guilty
from diptych.router.call import Call
from diptych.router.client_stream import ClientStream
from diptych.router.errors import RouterError
from diptych.router.legs import FailureKind, LegFailure, relayed_headers
from diptych.router.merging import EVENT_STREAM, Merged
from diptych.router.metrics import RouterMetrics
from diptych.router.pairing import Pair, Pairing
from diptych.router.prompt_logprobs import prompt_logprobs
from diptych.router.workers import Worker

logger = logging.getLogger(__name__)

SAME_WORKER_BACKOFF = 0.05
"""Seconds before an attempt on a worker that has just failed, when there is no other; doubles each time."""


class Relay:
    """Serves the generating routes. `drain()` bounds what is running; `active` counts it."""

    def __init__(
        self, session: aiohttp.ClientSession, pairing: Pairing, admission: Admission, metrics: RouterMetrics
    ) -> None:
        self._session = session
        self._pairing = pairing
        self._admission = admission
        self._metrics = metrics
        self._deadlines: set[asyncio.Timeout] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def active(self) -> int:
        return len(self._deadlines)

    async def generate(self, request: web.Request, call: Call, *, in_turn: bool = True) -> web.StreamResponse:
        """Answer one client request, `in_turn` or past the queue. If the client leaves, aiohttp cancels this
        coroutine and both legs are dropped on the way out."""
        stream = ClientStream(request, call.request_id)
        if self.draining:
            return await stream.fail(RouterError(503, "the router is shutting down", retry_after=1))
        limit = get_router().request_timeout
        try:
            async with asyncio.timeout(limit) as deadline:
                with self._registered(deadline):
                    async with self._admission.turn() if in_turn else contextlib.nullcontext():
                        return await self._attempts(call, stream)
        except TimeoutError:
            return await stream.fail(self._out_of_time(limit))
        except LegFailure as failure:
            return await stream.fail(failure.as_error())
        except RouterError as error:
            return await stream.fail(error)

    async def drain(self, limit: float) -> None:
        """Take nothing new; let what runs finish, but end it with an error after `limit` seconds."""
        self.draining = True
        self._admission.close()
        until = asyncio.get_running_loop().time() + limit
        for deadline in self._deadlines:
            current = deadline.when()
            if not deadline.expired() and (current is None or current > until):
                deadline.reschedule(until)
        await self._idle.wait()

    async def close(self) -> None:
        """Stop reading prefill bodies that nobody waits for."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _attempts(self, call: Call, stream: ClientStream) -> web.StreamResponse:
        failed: list[Worker] = []
        backoff = SAME_WORKER_BACKOFF
        while True:
            pair = self._pairing.pick(call, failed)
            if pair.prefill in failed or pair.decode in failed:
                await asyncio.sleep(backoff)
                backoff *= 2
            stream.journal.attempt(pair.prefill.url, pair.decode.url)
            self._metrics.sent_to(pair.prefill, pair.decode)
            try:
                return await self._attempt(pair, call, stream)
            except LegFailure as failure:
                if failure.kind is FailureKind.REJECTED:  # always before a byte was sent
                    return web.Response(status=failure.status, body=failure.body, headers=failure.headers)
                self._metrics.leg_failures.labels(
                    failure.worker.role.value, failure.worker.url, failure.kind.value
                ).inc()
                if stream.started or not failure.not_run:
                    raise
                if len(failed) >= get_router().max_retries:
                    self._metrics.retries_exhausted.labels(call.path).inc()
                    raise
                logger.warning("request %s is tried again: %s", call.request_id, failure)
                self._metrics.retries.labels(call.path, failure.kind.value).inc()
                failed.append(failure.worker)

    async def _attempt(self, pair: Pair, call: Call, stream: ClientStream) -> web.StreamResponse:
        shape = prompt_logprobs(call)
        times = self._metrics.times(call.path)
        async with Attempt(self._session, pair, call, keep_prefill=shape is not None) as attempt:
            head, first = await attempt.first_byte()
            headers, next_bytes = relayed_headers(head), attempt.next_bytes
            if shape is not None:
                merged = Merged(attempt, head, first, shape)
                first, headers, next_bytes = await merged.begin(), merged.headers, merged.next_bytes
            await stream.start(head.status, headers)
            if first:
                await stream.write(first)
            last = time.monotonic()
            streams = head.content_type == EVENT_STREAM
            times.began(last - call.received, streams=streams)
            while chunk := await next_bytes():
                await stream.write(chunk)
                if streams:
                    now = time.monotonic()
                    times.gap.observe(now - last)
                    last = now
            response = await stream.finish()
            times.whole.observe(time.monotonic() - call.received)
            self._read_to_the_end(attempt.release_prefill(), call)
            return response

    def _read_to_the_end(self, prefill: asyncio.Task[None], call: Call) -> None:
        """The client has its whole answer; what is left of prefill's is read only to keep the connection."""

        def ended(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("request %s: the prefill leg failed late: %s", call.request_id, error)
                if isinstance(error, LegFailure):
                    for worker in guilty([error], []):
                        worker.breaker.failed()

        if prefill.done():  # as a rule, since it has one token to answer
            ended(prefill)
            return
        limit = asyncio.get_running_loop().call_later(get_router().request_timeout, prefill.cancel)
        self._background.add(prefill)
        prefill.add_done_callback(ended)
        prefill.add_done_callback(lambda _: limit.cancel())

    def _out_of_time(self, limit: float) -> RouterError:
        if self.draining:
            message = "the router shut down before the request was finished"
            return RouterError(503, message, code="shutting_down")
        return RouterError(504, f"no complete answer within {limit:g} s (--request-timeout)", code="timeout")

    @contextlib.contextmanager
    def _registered(self, deadline: asyncio.Timeout) -> Iterator[None]:
        self._deadlines.add(deadline)
        self._idle.clear()
        try:
            yield
        finally:
            self._deadlines.discard(deadline)
            if not self._deadlines:
                self._idle.set()
