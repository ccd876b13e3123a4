"""256 streams at once through a router of its own process, half of them abandoned at a random moment."""

from __future__ import annotations

import asyncio
import json
import random
import sys

import aiohttp
import psutil

STREAMS = 256
EVENTS = 12
PAUSE = 0.01
"""Seconds between two events of a stream: all streams overlap."""


def expected(prompt):
    return [{"prompt": prompt, "number": number} for number in range(EVENTS)]


async def test_the_half_that_stays_is_whole_and_nothing_is_left_of_the_other(make_worker, kit):
    speaking = set()

    async def speak(request, seen):
        speaking.add(seen.body["prompt"])
        try:
            response = await kit.open_stream(request)
            for event in expected(seen.body["prompt"]):
                await response.write(kit.event(event))
                await asyncio.sleep(PAUSE)
            await response.write_eof()
            return response
        finally:
            speaking.remove(seen.body["prompt"])

    prefills = [await make_worker(kit.answers()) for _ in range(2)]
    decodes = [await make_worker(speak) for _ in range(2)]
    argv = ["--port", "0", "--health-interval", "0.1"]
    argv += [word for worker in prefills for word in ("--prefill", worker.url)]
    argv += [word for worker in decodes for word in ("--decode", worker.url)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych.launch.router", *argv, stdout=asyncio.subprocess.PIPE
    )
    try:
        ready = await asyncio.wait_for(process.stdout.readline(), 10)
        url = ready.decode().split()[1]
        router = psutil.Process(process.pid)
        before = router.num_fds()
        chosen = random.Random(5)
        leaves_after = {
            number: chosen.randrange(EVENTS) for number in chosen.sample(range(STREAMS), STREAMS // 2)
        }
        whole, left = await all_streams(url, leaves_after)
        assert whole == {number: expected(str(number)) for number in range(STREAMS) if number not in left}
        assert left == set(leaves_after)

        async with aiohttp.ClientSession() as client, asyncio.timeout(kit.PATIENCE):
            while True:
                async with client.get(url + "/workers") as response:
                    running = (await response.json())["stats"]["total_load"]
                if not running:
                    break
                await asyncio.sleep(0.02)
        await kit.eventually(lambda: not speaking)
        assert sum(len(worker.seen) for worker in decodes) == STREAMS
        for worker in (*prefills, *decodes):  # which closes the idle connections: what is left then is a leak
            await worker.stop()
        await kit.eventually(lambda: router.num_fds() <= before)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def all_streams(url, leaves_after):
    """What came of each stream that was read to its end, and the numbers of those that were left."""
    whole, left = {}, set()

    async def one(client, number):
        body = {"prompt": str(number), "stream": True}
        async with client.post(url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            got = []
            if leaves_after.get(number) == 0:
                left.add(number)
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    got.append(json.loads(line[6:]))
                if len(got) == leaves_after.get(number):
                    left.add(number)
                    return
        whole[number] = got

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client:
        await asyncio.gather(*(one(client, number) for number in range(STREAMS)))
    return whole, left
