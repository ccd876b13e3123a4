"""Workers that register themselves: real frontends at a real router, which come, go and come back."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from .conftest import Worker, chat, eventually

LEASE = 1.0
KEYS = ("--api-key", "user-key", "--admin-api-key", "admin-key")


class Router:
    """`launch-router` without workers, on one port however often it is started."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "diptych.launch.router", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--health-interval", "0.1", *KEYS])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def workers(self, session) -> dict[str, dict]:
        """By role; empty while it can't be reached."""
        with contextlib.suppress(aiohttp.ClientConnectorError):
            headers = {"Authorization": "Bearer user-key"}
            async with session.get(self.url + "/workers", headers=headers) as response:
                return {w["role"]: w for w in (await response.json())["workers"]}
        return {}

    async def until(self, session, condition) -> dict[str, dict]:
        async def holds() -> bool:
            return condition(await self.workers(session))

        await eventually(holds, 10)
        return await self.workers(session)


@pytest.fixture
def router():
    made = Router()
    yield made
    made.kill()


def both_up(workers) -> bool:
    return {role for role, worker in workers.items() if worker["state"] == "up"} == {"prefill", "decode"}


async def test_workers_come_back_to_a_restarted_router_and_leave_it_in_order(router, session):
    flags = ("--router-url", router.url, "--registration-lease", str(LEASE), *KEYS)
    with ThreadPoolExecutor() as pool:
        kinds = (("prefill", "--disaggregation-bootstrap-port", "0"), ("decode",))
        made = list(pool.map(lambda kind: Worker(*kind, *flags), kinds))
    prefill, decode = made
    try:
        assert [w.url for w in made if not w.url] == []  # ready, although there is no router
        router.start()
        shown = await router.until(session, both_up)
        assert shown["decode"]["url"] == decode.url
        assert (shown["decode"]["origin"], shown["decode"]["lease"]) == ("self", LEASE)
        assert f"bootstrap={shown['prefill']['bootstrap_port']}" in prefill.ready_line
        async with session.get(router.url + "/health") as response:
            assert response.status == 200
        router.kill()
        router.start()
        again = await router.until(session, both_up)
        assert again["decode"]["instance_id"] == shown["decode"]["instance_id"]

        # A worker that is asked to stop is gone from the router while it still finishes what it runs.
        headers = {"Authorization": "Bearer user-key"}
        body = chat("word " * 400, script={"delay": 0.05}, stream=True, bootstrap_room=7)
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": shown["prefill"]["bootstrap_port"]}
        async with session.post(
            decode.url + "/v1/chat/completions", json=body | pair, headers=headers
        ) as stream:
            await stream.content.readline()
            decode.signal(signal.SIGTERM)
            await router.until(session, lambda workers: "decode" not in workers)
            assert decode.process.poll() is None
            decode.signal(signal.SIGTERM)
        decode.wait()

        # One that dies without a word is forgotten with its lease.
        killed = time.monotonic()
        prefill.scheduler.kill()
        prefill.process.kill()
        await router.until(session, lambda workers: workers == {})
        assert time.monotonic() - killed < LEASE + 1
    finally:
        for worker in (prefill, decode):
            worker.stop()
    for worker in (prefill, decode):
        refused = [line for line in worker.stderr.splitlines() if "can't register at the router" in line]
        # Before the router was there, and while it was restarted.
        assert 1 <= len(refused) <= 3, worker.stderr
        assert "Traceback" not in worker.stderr
