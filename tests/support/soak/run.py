"""A soak: storms of traffic, faults and dying workers, each followed by a rest in which all must be well."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random

import aiohttp

from support.client import Client
from support.processes import Launched, eventually_no_processes
from support.soak.answers import Answers
from support.soak.books import check_books, events_of, growth_of
from support.soak.plan import Blow, Deadlines, draw_blow, draw_request
from support.soak.report import Report
from support.soak.traffic import Outcome, Traffic
from support.soak.workers import Place, free_ports

_REST_REQUESTS = 5
"""After each storm, all at once: every one must be answered in full."""
_IDLE_S = 20.0
"""For pages in doubt to come back once nothing is held any more: a few heartbeats."""


class Soak:
    """Workers and a router for one backend and seed; `run` uses them up."""

    def __init__(self, backend: str, seed: int, model: Path, answers: Answers, output: Path) -> None:
        """`output`: where the workers' output goes when something is wrong."""
        self._deadlines = Deadlines()
        self._answers = answers
        self._output = output
        self._report = Report(backend, seed)
        self._random = Random(f"{seed}: course")
        self._requests = Random(f"{seed}: requests")
        self._shm = set(os.listdir("/dev/shm"))
        self._places: list[Place] = []
        self._router: Launched | None = None
        try:
            for side in ("prefill", "decode"):
                random = Random(f"{seed}: {side}")
                self._places.append(Place(side, backend, model, self._deadlines, random, seed))
            self._start()
        except BaseException:
            self._kill()
            raise

    def _start(self) -> None:
        for place in self._places:
            place.ready()
        prefill, decode = self._places
        # Its own limit is never to be what ends a request.
        (port,) = free_ports(1)
        self._router = Launched(
            "launch-router",
            *("--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url),
            *("--port", str(port), "--max-retries", str(self._deadlines.retries)),
            *("--connect-timeout", str(self._deadlines.connect), "--health-interval", "0.5"),
            *("--request-timeout", str(self._deadlines.request)),
        ).ready()
        self._url = self._router.url

    def run(self, seconds: float) -> Report:
        """At least one cycle, and as many as begin within `seconds`. Whatever was wrong is in the report."""
        began = time.monotonic()
        try:
            asyncio.run(self._cycles(began + seconds))
            for place in self._places:
                place.end()
            assert self._router is not None
            self._router.stop()
        except* (AssertionError, aiohttp.ClientError, OSError) as errors:
            for error in errors.exceptions:
                self._report.violated(f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._report.seconds = time.monotonic() - began
            if self._report.violations:
                self._save_output()
            self._kill()
        self._check_leftovers()
        return self._report

    async def _cycles(self, until: float) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            limit = self._deadlines.request + 5.0
            self._traffic = Traffic(self._url, self._answers, session, limit)
            await self._rest()
            while time.monotonic() < until and not self._report.violations:
                self._report.cycles += 1
                length = min(self._random.uniform(2.0, 10.0), max(2.0, until - time.monotonic() - 4.0))
                await self._storm(length)
                await self._rest()

    # ---- storm ----------------------------------------------------------------------------------------

    async def _storm(self, seconds: float) -> None:
        checksum = self._places[1].checksum
        self._report.last_faults = []
        for place in self._places:
            self._report.last_faults += await asyncio.to_thread(place.inject, checksum=checksum)
        blow = draw_blow(self._random, seconds) if self._random.random() < 0.6 else None
        rate = self._random.uniform(2.0, 10.0)
        async with asyncio.TaskGroup() as group:
            requests = group.create_task(self._poisson(seconds, rate))
            if blow is not None:
                group.create_task(self._blow(blow))
            await asyncio.wait([requests])
            if (blow is None or blow.kind == "stop") and self._random.random() < 0.5:
                # Else the next line waits for deadlines, with all that is held still held.
                await self._release()
            for outcome in await asyncio.gather(*requests.result()):
                self._report.count(outcome)

    async def _poisson(self, seconds: float, rate: float) -> list[asyncio.Task[Outcome]]:
        """Requests arrive whether or not earlier ones are answered; `seconds` while both workers are up."""
        tasks = []
        while seconds > 0:
            self._report.sent += 1
            tasks.append(asyncio.create_task(self._traffic.run(draw_request(self._requests))))
            # While a worker starts, which takes long, all are refused: a few are enough to see that.
            up = all(place.up for place in self._places)
            pause = self._requests.expovariate(rate if up else 1.0)
            seconds -= pause if up else 0.0
            await asyncio.sleep(pause)
        return tasks

    async def _blow(self, blow: Blow) -> None:
        await asyncio.sleep(blow.after)
        place = next(place for place in self._places if place.side == blow.side)
        self._report.blows[f"{blow.kind} {blow.side}"] += 1
        self._report.last_faults.append(str(blow))
        if blow.kind != "stop":
            await asyncio.to_thread(self._count_events, place)
        await asyncio.to_thread(place.strike, blow)
        if blow.kind != "stop":
            for other in self._places:
                other.peer_starts += other is not place

    def _count_events(self, place: Place) -> None:
        now = events_of(place.worker.client.metrics())
        self._report.events += now - place.events
        place.events = now

    async def _release(self) -> None:
        for place in self._places:
            await asyncio.to_thread(place.worker.faults.release)

    # ---- rest -----------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """No faults: pools come back to their baseline, and every request is answered right."""
        for place in self._places:
            assert place.launched.exit_code is None, f"launch-{place.side} has ended: {place.launched.output}"
        await self._release()
        await self._wait_for_router()
        for place in self._places:
            await asyncio.to_thread(place.worker.wait_until_idle, _IDLE_S)
        plans = [draw_request(self._requests, quiet=True) for _ in range(_REST_REQUESTS)]
        self._report.sent += len(plans)
        for outcome in await asyncio.gather(*(self._traffic.run(plan) for plan in plans)):
            self._report.count(outcome)
            if outcome.kind != "finished":
                self._report.violated(f"after everything was released: {outcome.kind} {outcome.reason}")
        for place in self._places:
            await asyncio.to_thread(place.worker.wait_until_idle, _IDLE_S)
        await asyncio.to_thread(self._look)

    async def _wait_for_router(self) -> None:
        deadline = time.monotonic() + 10.0
        status, answer = 0, None
        while status != 200:
            assert time.monotonic() < deadline, f"the router stays unhealthy: {answer}"
            status, answer = await Client(self._url).request("GET", "/health")
            await asyncio.sleep(0.05)

    def _look(self) -> None:
        """What must be true of workers at rest."""
        report = self._report
        report.growth = []
        for place in self._places:
            self._count_events(place)
            for problem in check_books(place):
                report.violated(problem)
            for complaint in place.complaints():
                report.violated(complaint)
            for line, problem in growth_of(place):
                report.growth.append(line)
                if problem is not None:
                    report.violated(problem)
        outcomes = sum(report.outcomes.values())
        if outcomes != report.sent:
            report.violated(f"{report.sent} requests sent, {outcomes} ended")
        answered = [
            value
            for name, value in Client(self._url).metrics().items()
            if name.startswith('diptych_router_requests_total{route="/generate"')
        ]
        # A client may be gone before the router has seen its request.
        if not report.sent - report.outcomes["left"] <= sum(answered) <= report.sent:
            report.violated(f"{report.sent} requests sent, the router counts {sum(answered):.0f}")

    # ---- the end --------------------------------------------------------------------------------------

    def _check_leftovers(self) -> None:
        for pid in eventually_no_processes():
            self._report.violated(f"process {pid} is left")
        for name in set(os.listdir("/dev/shm")) - self._shm:
            self._report.violated(f"/dev/shm/{name} is left")

    def _save_output(self) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        for place in self._places:
            place.save_output(self._output)
        if self._router is not None:
            (self._output / "router.log").write_text(self._router.output + "\n")

    def _kill(self) -> None:
        for place in self._places:
            place.kill()
        if self._router is not None:
            self._router.kill()
