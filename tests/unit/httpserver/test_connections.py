"""Nobody holds a connection open by sending, or reading, slowly or not at all; who is served is left
alone."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import replace

import pytest

from diptych.httpserver.refusals import Cause
from diptych.httpserver.tls import load_server_context

from .conftest import GENEROUS, connected, serving

HURRIED = replace(GENEROUS, receive_timeout=0.2)


async def drip(send: object, pieces: int = 1000) -> None:
    assert callable(send)
    for _ in range(pieces):
        await send(b"a")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "begun",
    [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: "],
    ids=["path", "line", "field"],
)
async def test_a_head_that_drips_is_answered_with_408(begun: bytes) -> None:
    async with serving(HURRIED) as server, connected(server) as client:
        await client.send(begun)
        dripping = asyncio.create_task(drip(client.send))
        answer = await client.answer()
        assert answer.status == 408
        assert answer.error["code"] == "timeout"
        assert server.refused == [Cause.SLOW_HEAD]
        assert len(answer.headers["x-request-id"]) == 32
        assert await client.ended() == b""
        dripping.cancel()


async def test_so_is_the_head_of_a_second_request() -> None:
    async with serving(HURRIED) as server, connected(server) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).body == b"hello"
        await client.send(b"GET / HT")
        assert (await client.answer()).status == 408


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nffff\r\n"],
    ids=["length", "chunks"],
)
async def test_a_body_that_drips_is_answered_with_408(head: bytes) -> None:
    async with serving(HURRIED) as server, connected(server) as client:
        await client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + head)
        dripping = asyncio.create_task(drip(client.send))
        answer = await client.answer()
        assert answer.status == 408
        assert "--http-receive-timeout" in str(answer.error["message"])
        assert await client.ended() == b""
        dripping.cancel()


async def test_a_body_that_comes_in_time_is_read_however_the_head_was() -> None:
    async with serving(replace(HURRIED, receive_timeout=0.4)) as server, connected(server) as client:
        for part in (b"POST /echo HTTP/1.1\r\n", b"Host: x\r\nContent-Length: 4\r\n", b"\r\n", b"ab", b"cd"):
            await client.send(part)
            await asyncio.sleep(0.1)
        assert (await client.answer()).body == b"abcd"


async def test_a_connection_without_a_request_is_closed() -> None:
    limits = replace(GENEROUS, keepalive_timeout=0.2)
    async with serving(limits) as server, connected(server) as silent, connected(server) as idle:
        await idle.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await idle.answer()).body == b"hello"
        assert await idle.ended() == b""
        assert await silent.ended() == b""


async def test_a_stream_may_be_silent_for_longer_than_any_bound() -> None:
    tight = replace(GENEROUS, receive_timeout=0.1, send_timeout=0.1, keepalive_timeout=0.1)
    async with serving(tight) as server, connected(server) as client:
        await client.send(b"GET /quiet HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.streaming.wait()
        await asyncio.sleep(0.4)
        server.go_on.set()
        assert b"at last" in await client.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("over", ["tcp", "tls"])
async def test_a_client_that_does_not_read_its_stream_has_its_request_cancelled(
    over: str, certificate: dict[str, str]
) -> None:
    ours = theirs = None
    if over == "tls":
        ours = load_server_context(certificate["cert"], certificate["key"], None)
        theirs = ssl.create_default_context(cafile=certificate["cert"])
    limits = replace(GENEROUS, send_timeout=0.2)
    async with serving(limits, ours) as server, connected(server, theirs) as client:
        await client.send(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.cancelled.wait()
        await server.until_no_connection()


async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    async with serving(replace(GENEROUS, send_timeout=0.4)) as server, connected(server) as client:
        await client.send(b"GET /flood HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for _ in range(12):
            await client.reader.read(1 << 20)
            await asyncio.sleep(0.08)
        assert not server.cancelled.is_set()
        server.go_on.set()
        while await client.reader.read(1 << 20):
            continue


async def test_an_answer_under_way_is_not_cut_by_half_a_request_behind_it() -> None:
    async with serving(HURRIED) as server, connected(server) as client:
        await client.send(b"GET /quiet HTTP/1.1\r\nHost: x\r\n\r\nGET /")
        await server.streaming.wait()
        await asyncio.sleep(0.4)
        server.go_on.set()
        assert b"at last" in await client.reader.readuntil(b"0\r\n\r\n")


async def test_one_connection_too_many_gets_a_503_and_the_others_go_on() -> None:
    async with serving(replace(GENEROUS, max_connections=2)) as server:
        async with connected(server) as first, connected(server) as second:
            for client in (first, second):
                await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await client.answer()).status == 200
            async with connected(server) as third:
                answer = await third.answer()
                assert answer.status == 503
                assert answer.error["type"] == "service_unavailable"
                assert await third.ended() == b""
            assert server.refused == [Cause.TOO_MANY]
            await first.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await first.answer()).status == 200
        await server.until_no_connection()
        async with connected(server) as fourth:
            await fourth.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await fourth.answer()).status == 200


# ---- what is no HTTP --------------------------------------------------------------------------------------

BROKEN = {
    "no verb": b"\x00\x01\x02\x03\r\n\r\n",
    "no version": b"GET / FTP/1.1\r\n\r\n",
    "a request line alone": b"hello\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(32),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "a control character in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a negative length": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "length and chunks": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(2000)) + b"\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=list(BROKEN))
async def test_what_is_no_http_gets_a_json_400_and_leaves_no_trace_in_the_log(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server, connected(server) as client:
        await client.send(data)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"] == "malformed_http"
        assert len(answer.headers["x-request-id"]) == 32
        assert "\n" not in str(answer.error["message"])
        assert server.refused == [Cause.MALFORMED]
        await client.ended()
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 20000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 20000 + b": b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 200000,
    ],
    ids=["path", "value", "name", "value without an end"],
)
async def test_a_line_that_is_too_long_gets_a_431(data: bytes) -> None:
    async with serving() as server, connected(server) as client:
        await client.send(data)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
        assert server.refused == [Cause.LONG_HEAD]
        assert len(answer.headers["x-request-id"]) == 32


async def test_an_expectation_that_nobody_meets_gets_a_417_in_json() -> None:
    async with serving() as server, connected(server) as client:
        await client.send(
            b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\nab"
        )
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (417, "http_417")
        await client.send(
            b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await client.answer()).status == 100
        await client.send(b"ab")
        assert (await client.answer()).body == b"ab"


async def test_a_handler_that_breaks_is_logged_and_answered_in_json(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server, connected(server) as client:
        server.go_on = None  # type: ignore[assignment]
        await client.send(b"GET /quiet HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.ended()
    assert "answering 127.0.0.1 failed" in caplog.text
