"""A router process with TLS, keys and tight bounds, in front of scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import sys

import aiohttp
import pytest
from support.certificates import make_certificate

KEY, ADMIN = "key-of-the-users", "key-of-the-operator"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def launched(*flags):
    """The process and, once it has said so, its URL; None when it ended instead."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "diptych.launch.router", "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(20):
            line = (await process.stdout.readline()).decode()
            found = re.match(r"ready: (\S+)", line)
            if found is None:
                # A signal to a process that has ended takes its exit code away from whoever waits for it.
                await process.wait()
        yield process, found and found[1]
    finally:
        if process.returncode is None:
            process.terminate()
        process.errors = (await process.communicate())[1].decode()


async def raw(url, files, **options):
    port = int(url.rpartition(":")[2])
    connection = socket.socket()
    # So that little fits between a client which doesn't read and the router.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.connect(("127.0.0.1", port))
    trust = ssl.create_default_context(cafile=files["cert"])
    return await asyncio.open_connection(sock=connection, ssl=trust, server_hostname="localhost", limit=4096)


async def error_of(reader):
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"(?i)content-length: (\d+)", head)
        return int(head.split()[1]), json.loads(await reader.readexactly(int(length[1])))["error"]


def head(path, *fields):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_keys_bounds_and_broken_http_over_tls(make_worker, kit, files):
    async def flood(request, _):
        response = await kit.open_stream(request)
        while True:
            await response.write(kit.event("x" * 4096))

    prefill, decode = await make_worker(kit.answers()), await make_worker(flood)
    flags = [
        *("--prefill", prefill.url, "9000", "--decode", decode.url),
        *("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"]),
        *("--http-receive-timeout", "0.4", "--http-send-timeout", "0.4"),
        *("--api-key", KEY, "--admin-api-key", ADMIN),
    ]
    async with launched(*flags) as (process, url):
        assert url.startswith("https://127.0.0.1:")

        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=files["cert"]))
        async with aiohttp.ClientSession(connector=connector) as client:
            for path in ("/flush_cache", "/abort_request", "/workers"):
                for key, status in ((None, 401), ("other", 401), (KEY, 403)):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    async with client.post(url + path, json={}, headers=headers) as response:
                        assert response.status == status, path
            headers = {"Authorization": f"Bearer {ADMIN}"}
            async with client.post(url + "/flush_cache", json={}, headers=headers) as response:
                assert response.status == 200
        for worker in (prefill, decode):
            assert ("POST", "/flush_cache", b"{}") in worker.other

        for data, status, code in (
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_http"),
            (head("/generate", "Transfer-Encoding: chunked") + b"zz\r\n", 400, "malformed_http"),
            (b"GET /" + b"a" * 9000, 431, "head_too_large"),
            (b"GET / HTTP/1.1\r\nHost:", 408, "timeout"),
            (head("/generate", "Content-Length: 100"), 408, "timeout"),
        ):
            reader, writer = await raw(url, files)
            writer.write(data)
            found, error = await error_of(reader)
            assert (found, error["type"], error["code"]) == (status, "invalid_request_error", code)
            writer.close()

        # A client that asks for a stream and reads none of it.
        reader, writer = await raw(url, files)
        body = json.dumps({"text": "x", "stream": True}).encode()
        writer.write(head("/generate", f"Content-Length: {len(body)}") + body)
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(10):
            await decode.seen[-1].left.wait()
        writer.close()
    assert process.returncode == 0
    assert "Traceback" not in process.errors
    assert KEY not in process.errors
    assert ADMIN not in process.errors


async def test_files_that_can_not_be_used_end_the_start(files):
    workers = ("--prefill", "https://127.0.0.1:1", "1", "--decode", "https://127.0.0.1:2")
    for flags, said in (
        (("--ssl-certfile", "/none.pem"), "--ssl-certfile /none.pem: No such file or directory"),
        (("--worker-ca-file", files["key"]), "no PEM certificate in it"),
    ):
        async with launched(*workers, *flags) as (process, url):
            assert url is None
        assert process.returncode == 1
        assert said in process.errors
        assert "Traceback" not in process.errors


async def test_a_router_that_is_open_to_other_machines_says_so(make_worker, kit):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    workers = ("--prefill", prefill.url, "9000", "--decode", decode.url)
    async with launched(*workers, "--host", "0.0.0.0") as (process, url):
        assert url is not None
    assert process.errors.count("THIS SERVER IS OPEN TO OTHER MACHINES") == 1
