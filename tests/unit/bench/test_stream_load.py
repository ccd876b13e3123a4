"""The load generator of the router's benchmark, before its own workers and before broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from diptych.bench.paced_worker import PacedConnection
from diptych.bench.router import DIRECT, Load, Result, cpu_table, latency_table
from diptych.bench.stream_load import Samples, closed_loop

GAP = 0.02


async def ask(server: asyncio.Server, users: int, each: int, pieces: int | None) -> Samples:
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            return await closed_loop(port, users, each, pieces=pieces, spread=0.0)


async def paced(role: str) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(lambda: PacedConnection(role, GAP), "127.0.0.1", 0)


async def answering(parts: Sequence[bytes]) -> asyncio.Server:
    """Each request is answered with these parts, sent one by one, and the connection closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def test_streams_come_at_the_workers_pace_and_every_piece_is_timed():
    started = asyncio.get_running_loop().time()
    samples = await ask(await paced("decode"), users=3, each=2, pieces=5)
    assert asyncio.get_running_loop().time() - started >= 2 * 4 * GAP
    assert (samples.requests, samples.failed) == (6, 0)
    assert len(samples.first_byte) == 6
    assert len(samples.transit) == 6 * 4
    assert all(time >= 0 for time in samples.transit)


async def test_answers_that_are_not_streamed_have_a_first_byte_alone():
    samples = await ask(await paced("decode"), users=2, each=3, pieces=None)
    assert (samples.requests, samples.failed, len(samples.first_byte), samples.transit) == (6, 0, 6, [])


async def test_a_prefill_worker_has_one_piece_whatever_is_asked_for():
    samples = await ask(await paced("prefill"), users=1, each=1, pieces=5)
    assert samples.failed == 1
    assert "1 pieces came where 5 were asked for" in samples.error


async def test_a_stream_cut_anywhere_reads_the_same():
    body = b'22\r\ndata: {"sent":1}\n\ndata: {"sent":2}\r\n2\r\n\n\n\r\n0\r\n\r\n'
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
    samples = await ask(await answering([bytes([byte]) for byte in answer]), users=1, each=1, pieces=2)
    assert (samples.failed, samples.error) == (0, "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "busy"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"sent":1}', "ended before the answer did"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "0 pieces came where 1"),
    ],
)
async def test_anything_but_a_whole_answer_counts_as_failed(answer: bytes, reason: str):
    samples = await ask(await answering([answer]), users=1, each=2, pieces=1)
    assert (samples.requests, samples.failed) == (2, 2)
    assert reason in samples.error


def result(way: str, load: Load, first: float, cpu: float) -> Result:
    piece = first / 2 if load.stream else None
    return Result(
        way=way,
        load=load,
        requests=8,
        failed=0,
        requests_per_second=100.0,
        first_p50=first,
        first_p99=2 * first,
        piece_p50=piece,
        piece_p99=piece,
        cpu_per_request=cpu,
    )


def test_a_router_is_shown_by_what_it_adds():
    short, streams = Load(users=8, stream=False), Load(users=32, stream=True)
    results = [
        result(DIRECT, short, 0.001, 0.0),
        result("launch-router", short, 0.002, 0.0005),
        result(DIRECT, streams, 0.001, 0.0),
        result("launch-router", streams, 0.0018, 0.0013),
    ]
    assert latency_table(results).splitlines()[-1].split() == [
        *("32", "streams", "launch-router", "+0.80", "+1.60", "+0.40", "+0.40", "8", "(0)")
    ]
    # (1.3 - 0.5) ms in 16 pieces.
    assert cpu_table(results).splitlines()[-1].split() == [
        "32",
        "streams",
        "launch-router",
        "1.30",
        "50",
        "-",
    ]
