"""`launch-router` as a process: start-up, the ready line, what it imports, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

import aiohttp
from support.processes import cpu_seconds


@contextlib.asynccontextmanager
async def launched(prefill, decode, *flags):
    argv = ["--prefill", prefill.url, "9000", "--decode", decode.url, "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych.launch.router", *argv, stdout=asyncio.subprocess.PIPE, stderr=None
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ready_url(process):
    line = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
    assert line.startswith("ready: http://127.0.0.1:"), line
    return line.split()[1]


async def test_the_router_is_ready_within_a_second(make_worker, kit):
    """Of processor time: the machine may be busy with other things."""
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with launched(prefill, decode) as process:
        await ready_url(process)
        assert cpu_seconds(process.pid) < 1.0


async def test_a_port_that_was_left_open_is_read_back_as_the_one_listened_on(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with launched(prefill, decode) as process, aiohttp.ClientSession() as client:
        url = await ready_url(process)
        async with client.get(url + "/server_info") as response:
            config = (await response.json())["config"]
    port = int(url.rpartition(":")[2])
    assert config["bags"]["serving"]["port"] == port
    assert config["overrides"] == [{"source": "listening socket", "leaf": "port", "old": 0, "new": port}]
    assert config["record"]["port"] == 0


async def test_the_router_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, diptych.launch.router\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'numpy', 'zmq')"
        " or m.startswith(('diptych.engine', 'diptych.kernels', 'diptych.kvtransfer', 'diptych.server'))]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


async def test_it_listens_before_its_workers_are_up_and_is_ready_once_they_are(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    decode.health_status = 503
    listener = await make_worker(kit.answers())  # only to find a free port
    port = listener.port
    await listener.stop()
    async with (
        launched(prefill, decode, "--port", str(port)) as process,
        aiohttp.ClientSession() as client,
    ):
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    async with client.get(f"http://127.0.0.1:{port}/health") as response:
                        assert response.status == 503
                        break
                await asyncio.sleep(0.02)
        ready = asyncio.create_task(ready_url(process))
        await asyncio.sleep(0.3)
        assert not ready.done()
        decode.health_status = 200
        assert await ready == f"http://127.0.0.1:{port}"


async def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(make_worker, kit):
    go_on = asyncio.Event()

    async def wait(_, __):
        await go_on.wait()

    prefill = await make_worker(kit.answers())
    decode = await make_worker(kit.streams([kit.event(1)], then=wait))
    async with launched(prefill, decode) as process, aiohttp.ClientSession() as client:
        url = await ready_url(process)
        async with client.post(url + "/generate", json={"text": "x"}) as response:
            assert await response.content.readany() == kit.event(1)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while True:
                    async with client.get(url + "/health") as health:
                        if health.status == 503:
                            break
                    await asyncio.sleep(0.01)
            async with client.post(url + "/generate", json={"text": "x"}) as refused:
                assert refused.status == 503
            go_on.set()
            assert await response.content.read() == b""
        assert await asyncio.wait_for(process.wait(), 5) == 0
    assert len(decode.seen) == 1


async def test_sigterm_ends_a_stuck_stream_with_an_error_within_the_bound(make_worker, kit):
    prefill = await make_worker(kit.hangs)
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.hangs))
    async with (
        launched(prefill, decode, "--shutdown-timeout", "0.3") as process,
        aiohttp.ClientSession() as client,
    ):
        url = await ready_url(process)
        async with client.post(url + "/generate", json={"text": "x"}) as response:
            assert await response.content.readany() == kit.event(1)
            process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            rest = await response.content.read()
        assert b"shut down" in rest
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert time.monotonic() - started < 2
    async with asyncio.timeout(1):
        await prefill.seen[0].left.wait()
        await decode.seen[0].left.wait()


async def test_a_second_signal_ends_it_whatever_runs(make_worker, kit):
    prefill = await make_worker(kit.hangs)
    decode = await make_worker(kit.streams([kit.event(1)], then=kit.hangs))
    async with launched(prefill, decode) as process, aiohttp.ClientSession() as client:
        url = await ready_url(process)
        async with client.post(url + "/generate", json={"text": "x"}) as response:
            assert await response.content.readany() == kit.event(1)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while True:  # until the first has arrived
                    async with client.get(url + "/health") as health:
                        if health.status == 503:
                            break
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert await asyncio.wait_for(process.wait(), 5) == 130
            assert time.monotonic() - started < 2
            assert b"shut down" in await response.content.read()


async def test_a_port_in_use_is_a_clear_failure(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with launched(prefill, decode, "--port", str(prefill.port)) as process:
        assert await asyncio.wait_for(process.wait(), 10) == 1
