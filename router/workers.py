"""The workers the router knows, and whether each may be given requests."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
from collections.abc import Callable, Iterable

import aiohttp
import msgspec
from yarl import URL

from diptych.common_config import get_router, get_serving

logger = logging.getLogger(__name__)

DOWN_POLL_INTERVAL = 0.25
"""Seconds between polls of a worker that is down (never longer than health_interval): start-up and
recovery are noticed soon, while healthy workers are left in peace."""


def connection_reason(error: Exception) -> str:
    """Why a call to a worker got no (whole) answer, short enough for a client's error message."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name can't be resolved"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
        return os.strerror(error.errno).lower()
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "closed before the answer was complete"
    return str(error) or type(error).__name__


class _ServerInfo(msgspec.Struct):
    """What the router reads of a worker's `/server_info`; the name is that of existing PD systems."""

    disaggregation_mode: str | None = None


class WorkerRole(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Worker:
    """One worker. Down until its first good poll; a failed connection takes it down at once."""

    def __init__(self, role: WorkerRole, url: str, bootstrap_port: int | None = None) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.bootstrap_port = bootstrap_port
        self.healthy = False
        self.reason = "not polled yet"
        """Why it is down; empty when healthy."""
        self.in_flight = 0
        """Requests of this router that the worker hasn't finished answering."""
        self._poll_now = asyncio.Event()
        self._on_change: Callable[[], None] | None = None
        host = URL(self.url).host
        if not host:
            raise ValueError(f"{role} worker URL {url!r} has no host; expected http://HOST:PORT")
        self.host = host

    def __str__(self) -> str:
        return f"{self.role} worker {self.url}"

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever `healthy` flips."""
        self._on_change = on_change

    def mark_up(self) -> None:
        self._set(True, "")

    def mark_down(self, reason: str) -> None:
        """No new request goes here until a poll succeeds."""
        self._set(False, reason)
        self._poll_now.set()

    def suspect(self) -> None:
        """Something broke that may or may not be the worker's death: poll it now."""
        self._poll_now.set()

    def _set(self, healthy: bool, reason: str) -> None:
        flipped = healthy != self.healthy
        self.healthy, self.reason = healthy, reason
        if not flipped:
            return
        if healthy:
            logger.info("%s is up", self)
        else:
            logger.warning("%s is down: %s", self, reason)
        if self._on_change is not None:
            self._on_change()

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """One `GET /health`: 2xx is up, anything else is down."""
        limit = max(get_router().health_interval, get_router().connect_timeout)
        key = get_serving().api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=limit)
        try:
            async with session.get(f"{self.url}/health", timeout=timeout, headers=headers) as response:
                await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self._set(False, f"/health: {connection_reason(error)}")
            return
        if not 200 <= response.status < 300:
            self._set(False, f"/health answers {response.status}")
        elif not self.healthy and (wrong := await self._wrong_role(session, timeout, headers)):
            if wrong != self.reason:
                logger.error("%s gets no requests: %s", self, wrong)
            self._set(False, wrong)
        else:
            self.mark_up()

    async def _wrong_role(
        self, session: aiohttp.ClientSession, limit: aiohttp.ClientTimeout, headers: dict[str, str]
    ) -> str:
        """Why a worker that is coming up is not what the flag said it is; empty when it is or doesn't say.

        Two URLs that were mixed up would otherwise answer with one token and status 200."""
        try:
            async with session.get(f"{self.url}/server_info", timeout=limit, headers=headers) as response:
                info = msgspec.json.decode(await response.read(), type=_ServerInfo)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError):
            return ""
        mode = info.disaggregation_mode
        if mode is None or mode == self.role.value:
            return ""
        actual = "colocated" if mode == "null" else mode
        return f"it is a {actual} worker, but was given as --{self.role}"

    async def monitor(self, session: aiohttp.ClientSession) -> None:
        """Poll for ever: every `health_interval` while up, more often while down, at once when told to."""
        while True:
            self._poll_now.clear()
            await self.poll(session)
            interval = get_router().health_interval
            if not self.healthy:
                # Woken or not, a dead worker isn't polled in a tight loop.
                await asyncio.sleep(min(interval, DOWN_POLL_INTERVAL))
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), interval)


class WorkerRegistry:
    """All workers, with one health monitor each."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = list(workers)
        self._pair_ready = asyncio.Event()
        self._monitors: list[asyncio.Task[None]] = []
        for worker in self.workers:
            worker.watch(self._health_changed)

    def of(self, role: WorkerRole) -> list[Worker]:
        return [w for w in self.workers if w.role is role]

    def healthy(self, role: WorkerRole) -> list[Worker]:
        return [w for w in self.workers if w.role is role and w.healthy]

    @property
    def has_pair(self) -> bool:
        return all(self.healthy(role) for role in WorkerRole)

    def missing(self) -> str:
        """Which side has no healthy worker and why, as one phrase; empty when a pair exists."""
        parts = []
        for role in WorkerRole:
            if self.healthy(role):
                continue
            known = ", ".join(f"{w.url} ({w.reason})" for w in self.of(role))
            parts.append(f"no healthy {role} worker: {known or 'none is configured'}")
        return "; ".join(parts)

    async def wait_for_pair(self) -> None:
        """Return once at least one prefill and one decode worker are healthy."""
        await self._pair_ready.wait()

    def start(self, session: aiohttp.ClientSession) -> None:
        self._monitors = [
            asyncio.create_task(w.monitor(session), name=f"health {w.url}") for w in self.workers
        ]

    async def stop(self) -> None:
        for task in self._monitors:
            task.cancel()
        await asyncio.gather(*self._monitors, return_exceptions=True)
        self._monitors = []

    def _health_changed(self) -> None:
        if self.has_pair:
            self._pair_ready.set()
        else:
            self._pair_ready.clear()
