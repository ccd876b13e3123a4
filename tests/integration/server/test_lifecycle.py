from __future__ import annotations

import asyncio
import signal
import socket
import time

import aiohttp
import psutil
import pytest

from .conftest import Client, Worker, chat, eventually, wait_until

CHAT = "/v1/chat/completions"
LONG = "word " * 400


async def start(client: Client, body: dict) -> asyncio.Task:
    task = asyncio.create_task(client.post(CHAT, body))
    await client.until_running(1)
    return task


async def has_output(client: Client) -> bool:
    async with client.session.get(client.url + "/metrics") as response:
        return "diptych_frontend_output_tokens_total 0.0" not in await response.text()


async def test_a_scheduler_that_dies_fails_its_requests_and_the_worker(make_worker, session):
    worker = make_worker("colocated")
    client = Client(worker.url, session)
    waiting = await start(client, chat(LONG, script={"hang": True}))
    answering = asyncio.create_task(client.post(CHAT, chat(LONG, script={"after": 2, "hang": True})))
    await eventually(lambda: has_output(client))
    async with session.post(
        worker.url + CHAT, json=chat(LONG, script={"delay": 0.05}, stream=True)
    ) as stream:
        await stream.content.readline()
        worker.scheduler.kill()
        rest = (await stream.content.read()).decode()
    # What had no output may be tried elsewhere; the other must not be run again.
    for task, expected in ((waiting, 503), (answering, 500)):
        status, answer = await task
        assert status == expected
        assert "signal 9" in answer["error"]["message"]
    assert '"error":' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert worker.wait() == 1
    assert "signal 9" in worker.stderr


def test_a_scheduler_that_cannot_start_is_told_and_exits_1(make_worker):
    worker = make_worker("colocated", env={"SCRIPTED_FAIL": "1"})
    assert worker.wait() == 1
    assert worker.url == ""
    assert "scripted failure to start" in worker.stderr
    assert "before it was ready" in worker.stderr
    assert "Traceback" not in worker.stderr


def test_a_port_in_use_is_told_before_anything_starts(make_worker):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = make_worker("colocated", "--port", str(taken.getsockname()[1]))
        assert worker.wait() == 1
    assert "can't listen on 127.0.0.1" in worker.stderr
    assert "Traceback" not in worker.stderr


def test_an_unknown_model_is_told(make_worker):
    worker = make_worker("decode", "--model-path", "/nowhere/at/all")
    assert worker.wait() == 1
    assert "/nowhere/at/all" in worker.stderr
    assert "Traceback" not in worker.stderr


def test_a_bad_chat_template_is_told(make_worker, tmp_path):
    path = tmp_path / "bad.jinja"
    path.write_text("{% for %}")
    worker = make_worker("colocated", "--chat-template", str(path))
    assert worker.wait() == 1
    assert "bad.jinja" in worker.stderr
    assert "Traceback" not in worker.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish(make_worker, session, number):
    worker = make_worker("colocated")
    scheduler = worker.scheduler
    client = Client(worker.url, session)
    running = await start(client, chat("one two three four five six seven", script={"delay": 0.1}))
    worker.signal(number)
    await client.until_unhealthy()
    status, answer = await client.post(CHAT, chat("too late"))
    assert status == 503
    assert "shutting down" in answer["error"]["message"]
    status, answer = await running
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two three four five six seven")
    assert worker.wait() == 0
    assert not scheduler.is_running()


async def test_what_runs_beyond_the_bound_is_aborted(make_worker, session):
    worker = make_worker("colocated", "--shutdown-timeout", "0.3")
    client = Client(worker.url, session)
    running = await start(client, chat(LONG, script={"delay": 0.05}))
    started = time.monotonic()
    worker.signal(signal.SIGTERM)
    status, answer = await running
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert worker.wait() == 0
    assert time.monotonic() - started < 5


async def test_a_second_signal_ends_at_once(make_worker, session):
    worker = make_worker("colocated")
    scheduler = worker.scheduler
    client = Client(worker.url, session)
    running = await start(client, chat(script={"hang": True}))
    worker.signal(signal.SIGTERM)
    await client.until_unhealthy()
    started = time.monotonic()
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130
    assert time.monotonic() - started < 4
    assert not scheduler.is_running()
    with pytest.raises(aiohttp.ClientError):
        await running


async def test_a_scheduler_that_ignores_the_end_is_killed(make_worker, session):
    worker = make_worker("colocated", "--shutdown-timeout", "0.2")
    scheduler = worker.scheduler
    await Client(worker.url, session).post(CHAT, chat("x", script={"stubborn": True}))
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not scheduler.is_running()


def test_nothing_is_left_behind(make_worker):
    before = _unix_sockets()
    worker: Worker = make_worker("prefill", "--disaggregation-bootstrap-port", "0")
    sockets = _unix_sockets() - before
    assert sockets
    assert worker.stop() == 0
    assert wait_until(lambda: not _unix_sockets() & sockets)


def test_an_idle_frontend_sleeps(colocated: Worker):
    process = psutil.Process(colocated.process.pid)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.02


def _unix_sockets() -> set[str]:
    with open("/proc/net/unix") as file:
        return {line.split()[-1] for line in file if "@diptych-" in line}


async def test_a_scheduler_that_dies_while_draining_fails_what_runs(make_worker, session):
    worker = make_worker("colocated")
    client = Client(worker.url, session)
    running = await start(client, chat(script={"hang": True}))
    worker.signal(signal.SIGTERM)
    await client.until_unhealthy()
    worker.scheduler.kill()
    assert (await running)[0] == 503
    assert worker.wait() == 1
