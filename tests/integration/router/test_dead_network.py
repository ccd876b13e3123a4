"""A network that goes away without a word in the middle of a stream."""

from __future__ import annotations

import asyncio
import time

from support.hosts import ON_HOST, packets_lost, two_hosts
from support.processes import Launched

DEAD_PEER_S = 3.0
SLACK_S = 3.0
"""Probes are sent in whole seconds, and the machine may be busy."""


async def test_a_stream_whose_workers_host_vanishes_ends_in_bounded_time(make_worker, kit):
    prefill = await make_worker(kit.answers())
    with two_hosts() as (near, far):
        arguments = ("--role", "decode", "--host", "0.0.0.0", "--token-gap", "0.1")
        decode = Launched(
            "echo_worker", far.netns, "-m", "diptych.bench.echo_worker", *arguments, script=ON_HOST
        )
        try:
            await asyncio.to_thread(decode.ready)
            url = decode.url.replace("0.0.0.0", far.address)
            flags = ("--decode", url, "--dead-peer-timeout", str(DEAD_PEER_S))
            body = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 1000}
            async with (
                kit.router([prefill], [], *flags) as router,
                router.post(data=body) as response,
            ):
                assert b"data:" in await response.content.readany()
                with packets_lost(near, far):
                    began = time.monotonic()
                    rest = await response.content.read()
                    took = time.monotonic() - began
        finally:
            await asyncio.to_thread(decode.kill)
    assert b"the connection broke" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert took < DEAD_PEER_S + SLACK_S
