"""A worker with TLS, both keys and tight bounds, over its real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from support.certificates import make_certificate

from .conftest import Worker, chat, make_worker, wait_until

__all__ = ["make_worker"]
KEY, ADMIN = "user-key-of-the-test", "admin-key-of-the-test"
SECRET = "cluster secret of the test"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def worker(files: dict[str, str]) -> Iterator[Worker]:
    flags = {
        "ssl-certfile": files["cert"],
        "ssl-keyfile": files["key"],
        "http-receive-timeout": "0.4",
        "http-send-timeout": "0.4",
        "max-request-bytes": str(1 << 20),
    }
    secrets = {"DIPTYCH_API_KEY": KEY, "DIPTYCH_ADMIN_API_KEY": ADMIN, "DIPTYCH_CLUSTER_SECRET": SECRET}
    words = [word for name, value in flags.items() for word in ("--" + name, value)]
    made = Worker("colocated", *words, env=secrets)
    yield made
    assert made.stop() == 0
    for secret in (KEY, ADMIN, SECRET):
        assert secret not in made.stderr


@pytest.fixture
async def trusting(files: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=files["cert"]))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def head(path: str, *fields: str) -> bytes:
    """Of a POST with the API key."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def raw(worker: Worker, files: dict[str, str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(worker.url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=files["cert"])
    connection = socket.socket()
    # So that little fits between a client which doesn't read and the worker.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.connect(("127.0.0.1", port))
    return await asyncio.open_connection(
        sock=connection, ssl=context, server_hostname="localhost", limit=1 << 12
    )


async def error_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = re.search(r"(?i)content-length: (\d+)", head)
    assert length is not None
    return int(head.split()[1]), json.loads(await reader.readexactly(int(length[1])))["error"]


async def test_it_says_that_it_speaks_https_and_shows_no_secret(
    worker: Worker, trusting: aiohttp.ClientSession
) -> None:
    assert worker.url.startswith("https://127.0.0.1:")
    async with trusting.get(worker.url + "/server_info", headers=bearer(KEY)) as response:
        text = await response.text()
    assert not any(secret in text for secret in (KEY, ADMIN, SECRET))
    record = json.loads(text)["record"]
    for name in ("api_key", "admin_api_key", "cluster_secret"):
        assert record[name] == "<redacted>"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/flush_cache"),
        ("GET", "/flush_cache"),
        ("POST", "/abort_request"),
        ("POST", "/update_config"),
        ("POST", "/pause_generation"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/start_profile"),
    ],
)
async def test_what_changes_the_worker_needs_the_admin_key(
    worker: Worker, trusting: aiohttp.ClientSession, method: str, path: str
) -> None:
    for headers, status, code in (
        ({}, 401, "invalid_api_key"),
        (bearer("another"), 401, "invalid_api_key"),
        (bearer(KEY), 403, "insufficient_permissions"),
    ):
        async with trusting.request(method, worker.url + path, json={}, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_the_admin_key_opens_everything_and_the_api_key_the_rest(
    worker: Worker, trusting: aiohttp.ClientSession
) -> None:
    async with trusting.post(worker.url + "/flush_cache", headers=bearer(ADMIN)) as response:
        assert response.status == 200
    for key in (KEY, ADMIN):
        async with trusting.post(
            worker.url + "/tokenize", json={"prompt": "x"}, headers=bearer(key)
        ) as response:
            assert response.status == 200
    async with trusting.get(worker.url + "/health") as response:
        assert response.status == 200


async def test_a_body_that_drips_gets_a_408_in_the_shape_of_errors(
    worker: Worker, files: dict[str, str]
) -> None:
    reader, writer = await raw(worker, files)
    writer.write(head(CHAT, "Content-Length: 9999"))
    status, error = await asyncio.wait_for(error_of(reader), 5)
    assert (status, error["type"], error["code"]) == (408, "invalid_request_error", "timeout")
    assert "--http-receive-timeout" in str(error["message"])
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
        head(CHAT, "Transfer-Encoding: chunked") + b"zz\r\n",
    ],
    ids=["HTTP/2", "no request line", "no chunk"],
)
async def test_broken_http_gets_a_400_in_the_shape_of_errors(
    worker: Worker, files: dict[str, str], data: bytes
) -> None:
    reader, writer = await raw(worker, files)
    writer.write(data)
    status, error = await asyncio.wait_for(error_of(reader), 5)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "malformed_http")
    writer.close()


async def test_a_client_that_stops_reading_its_stream_is_cut_off_and_its_samples_aborted(
    worker: Worker, files: dict[str, str], trusting: aiohttp.ClientSession
) -> None:
    async def aborted() -> int:
        async with trusting.get(worker.url + "/metrics") as response:
            found = re.search(r'finished_samples_total{reason="abort"} (\d+)', await response.text())
        return int(found[1]) if found else 0

    asked = chat("word " * 2000, stream=True, n=8, script={"delay": 0.001})
    body = json.dumps(asked).encode()
    reader, writer = await raw(worker, files)
    writer.write(head(CHAT, f"Content-Length: {len(body)}") + body)
    assert b" 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(10):
        while await aborted() < 8:  # noqa: ASYNC110 (another process: there is nothing to wait for)
            await asyncio.sleep(0.05)
    writer.close()


async def test_files_that_can_not_be_read_end_the_start_at_once(tmp_path: Path) -> None:
    worker = Worker("colocated", "--ssl-certfile", str(tmp_path / "none.pem"))
    assert worker.wait(20) == 1
    said = f"--ssl-certfile {tmp_path}/none.pem: No such file or directory"
    assert worker.stderr == f"launch-colocated: {said}\n"


async def test_a_prefill_worker_that_is_open_to_other_machines_but_has_a_cluster_secret(
    make_worker: Callable[..., Worker], session: aiohttp.ClientSession
) -> None:
    """It says what is open, and its bootstrap service is not."""
    flags = ("--host", "0.0.0.0", "--disaggregation-bootstrap-port", "0")
    worker = make_worker("prefill", *flags, env={"DIPTYCH_CLUSTER_SECRET": SECRET})
    assert wait_until(lambda: "asks for no key" in worker.stderr)
    assert worker.stderr.count("THIS SERVER IS OPEN TO OTHER MACHINES") == 1
    assert "bootstrap" not in worker.stderr
    found = re.search(r"bootstrap=(\d+)", worker.ready_line)
    assert found is not None
    async with session.put(f"http://127.0.0.1:{found[1]}/route", json={}) as response:
        assert response.status == 401
        assert "does not prove the cluster secret" in (await response.json())["error"]
    async with session.get(worker.url + "/metrics") as response:
        assert "\ndiptych_bootstrap_refused_total 1.0\n" in await response.text()
