"""All workers the router knows: those from flags, those added later, and those on their way out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

import aiohttp

from diptych.router.workers import Worker, WorkerRole

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Whoever keeps something per worker: a policy, the metrics."""

    def added(self, worker: Worker) -> None: ...

    def removed(self, worker: Worker) -> None:
        """It gets no new request; some may still run."""
        ...


class WorkerRegistry:
    """The workers, with one health monitor each and a timer for each lease.

    A worker that is removed gets no new request from that moment. While requests of it still run it is among
    `leaving`, which is only for show.
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers: list[Worker] = []
        self.leaving: list[Worker] = []
        self._pair_ready = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._monitors: dict[Worker, asyncio.Task[None]] = {}
        self._leases: dict[Worker, asyncio.TimerHandle] = {}
        self._listeners: list[Listener] = []
        for worker in workers:
            self.add(worker)

    def of(self, role: WorkerRole) -> list[Worker]:
        return [w for w in self.workers if w.role is role]

    def healthy(self, role: WorkerRole, *, serving: str | None = None) -> list[Worker]:
        """Those that may be given requests; with `serving`, requests for that model. If no worker of that
        side is known to serve it, all: what is known may be old, and the workers will say."""
        side = self.of(role)
        fitting = [w for w in side if w.answers_to(serving)] or side
        return [w for w in fitting if w.healthy]

    @property
    def has_pair(self) -> bool:
        return all(self.healthy(role) for role in WorkerRole)

    def missing(self, serving: str | None = None) -> str:
        """Which side has no healthy worker and why, as one phrase; empty when a pair exists."""
        wanted = f" of {serving!r}" if serving else ""
        parts = []
        for role in WorkerRole:
            if self.healthy(role, serving=serving):
                continue
            fitting = [w for w in self.of(role) if w.answers_to(serving)]
            known = ", ".join(f"{w.url} ({w.reason})" for w in fitting)
            parts.append(f"no healthy {role} worker{wanted}: {known or 'none is known'}")
        return "; ".join(parts)

    async def wait_for_pair(self) -> None:
        """Return once at least one prefill and one decode worker are healthy."""
        await self._pair_ready.wait()

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` about every worker: those that are here at once, others as they come and go."""
        self._listeners.append(listener)
        for worker in self.workers:
            listener.added(worker)

    def by_url(self, url: str) -> Worker | None:
        return next((w for w in self.workers if w.url == url), None)

    def by_id(self, wanted: str) -> Worker | None:
        """Among those that leave, too."""
        return next((w for w in [*self.workers, *self.leaving] if w.id == wanted), None)

    def add(self, worker: Worker) -> None:
        """Start to watch it. Its URL must not be known yet."""
        assert self.by_url(worker.url) is None, f"{worker} is known already"
        self.workers.append(worker)
        worker.watch(self._health_changed)
        if self._session is not None:
            self._watch(worker, self._session)
        for listener in self._listeners:
            listener.added(worker)
        self._health_changed()

    def lend(self, worker: Worker, seconds: float | None) -> None:
        """Forget it after so long, unless this is called again before; None: keep it."""
        worker.lease = seconds
        if (timer := self._leases.pop(worker, None)) is not None:
            timer.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._leases[worker] = loop.call_later(seconds, self.remove, worker, "its lease ran out")

    def remove(self, worker: Worker, why: str) -> None:
        """No new request goes there from now on; what runs is left alone."""
        logger.info("%s is removed: %s", worker, why)
        self.lend(worker, None)
        self.workers.remove(worker)
        if (monitor := self._monitors.pop(worker, None)) is not None:
            monitor.cancel()
        if worker.in_flight:
            self.leaving.append(worker)
            worker.when_idle(lambda: self.leaving.remove(worker))
        for listener in self._listeners:
            listener.removed(worker)
        self._health_changed()

    def start(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        for worker in self.workers:
            self._watch(worker, session)

    async def stop(self) -> None:
        for timer in self._leases.values():
            timer.cancel()
        monitors = list(self._monitors.values())
        for task in monitors:
            task.cancel()
        await asyncio.gather(*monitors, return_exceptions=True)
        self._leases.clear()
        self._monitors.clear()
        self._session = None

    def _watch(self, worker: Worker, session: aiohttp.ClientSession) -> None:
        task = asyncio.create_task(worker.monitor(session), name=f"health {worker.url}")
        task.add_done_callback(_report)
        self._monitors[worker] = task

    def _health_changed(self) -> None:
        if self.has_pair:
            self._pair_ready.set()
        else:
            self._pair_ready.clear()


def _report(monitor: asyncio.Task[None]) -> None:
    """A monitor never ends by itself: if one does, its worker would stay as it is for ever, unnoticed."""
    if not monitor.cancelled() and (error := monitor.exception()) is not None:
        logger.critical("%s ended", monitor.get_name(), exc_info=error)
