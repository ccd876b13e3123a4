"""Many streams at once from one process: an HTTP client that costs little, so that what it notes is the
server's doing. It reads answers of `bench/paced_worker.py`, whose pieces say when they were sent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time

_SENT = re.compile(rb'"sent":(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class BadAnswer(Exception):
    """Anything but a whole answer with status 200."""


@dataclasses.dataclass
class Samples:
    """What the users of one run saw. Times in seconds."""

    first_byte: list[float] = dataclasses.field(default_factory=list)
    """From sending a request to the first byte of its answer's body."""
    transit: list[float] = dataclasses.field(default_factory=list)
    """From a worker's sending of a piece, the first of a stream aside, until it was read here."""
    requests: int = 0
    failed: int = 0
    error: str = ""

    def add(self, other: Samples) -> None:
        self.first_byte += other.first_byte
        self.transit += other.transit
        self.requests += other.requests
        self.failed += other.failed
        self.error = self.error or other.error


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._ended: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail("the connection ended before the answer did")

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    async def ask(self, request: bytes, pieces: int) -> None:
        """Raises BadAnswer."""
        self._pending = b""
        self._in_body = False
        self._left: int | None = None
        self._pieces = 0
        self._ended = self._loop.create_future()
        self._sent = time.monotonic_ns()
        self._transport.write(request)
        await self._ended
        if self._pieces != pieces:
            raise BadAnswer(f"{self._pieces} pieces came where {pieces} were asked for")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self._pending += data
        if not self._in_body and not self._read_head():
            return
        if self._pieces == 0 and self._pending:
            self._samples.first_byte.append((now - self._sent) * 1e-9)
        if self._left is None:
            self._read_chunks(now)
        elif len(self._pending) >= self._left:
            self._read_pieces(self._pending, now)
            self._end()

    def _read_head(self) -> bool:
        end = self._pending.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, self._pending = self._pending[:end], self._pending[end + 4 :]
        if b" 200 " not in head[:16]:
            self.close()
            self._fail((head + self._pending)[:300].decode("latin-1"))
            return False
        self._in_body = True
        found = _LENGTH.search(head)
        self._left = None if found is None else int(found[1])
        return True

    def _read_chunks(self, now: int) -> None:
        """Whole chunks; an event never spans two of ours, but a router may join them."""
        while (end := self._pending.find(b"\r\n")) >= 0:
            size = int(self._pending[:end], 16)
            stop = end + 2 + size
            if len(self._pending) < stop + 2:
                return
            chunk, self._pending = self._pending[end + 2 : stop], self._pending[stop + 2 :]
            if size == 0:
                self._end()
                return
            self._read_pieces(chunk, now)

    def _read_pieces(self, data: bytes, now: int) -> None:
        for sent in _SENT.findall(data):
            if self._pieces:
                self._samples.transit.append((now - int(sent)) * 1e-9)
            self._pieces += 1

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(BadAnswer(reason))


def _request(port: int, pieces: int | None, number: int) -> bytes:
    prompt = f"Question {number}: " + "what is the use of a second opinion? " * 20
    fields = {
        "model": "paced",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": pieces or 1,
        "temperature": 0,
        "stream": pieces is not None,
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(port: int, users: int, each: int, *, pieces: int | None, spread: float) -> Samples:
    """Each of `users` sends `each` requests, one after the other on a connection of its own. `pieces` of a
    stream, None: answers that aren't streamed. The users begin over `spread` seconds, since streams in step
    would come in bursts."""
    loop = asyncio.get_running_loop()
    samples = Samples()

    async def user(number: int) -> None:
        await asyncio.sleep(spread * number / users)
        connection: _Connection | None = None
        for _ in range(each):
            samples.requests += 1
            if connection is None or connection.closed:
                _, connection = await loop.create_connection(lambda: _Connection(samples), "127.0.0.1", port)
            try:
                await connection.ask(_request(port, pieces, samples.requests), pieces or 1)
            except BadAnswer as error:
                samples.failed += 1
                samples.error = samples.error or str(error)
                connection.close()
        if connection is not None:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(user(number))
    return samples
