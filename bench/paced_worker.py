"""`python -m diptych.bench.paced_worker PREFILL_PORT DECODE_PORT`: a pair of workers that cost little.

They speak just enough HTTP to stand behind a router: what is measured is the router, and not the servers
behind it. Each piece of an answer says when it was sent, so its reader knows how long it was on its way.
`bench/echo_worker.py` is the one to test with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Sequence

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_FRAME = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "paced",
}
_PIECE = (
    b"data: "
    + json.dumps(
        {**_FRAME, "choices": [{"index": 0, "delta": {"content": " tok"}, "finish_reason": None}]},
        separators=(",", ":"),
    )[:-1].encode()
    + b',"sent":%d}\n\n'
)
_MESSAGE = {"role": "assistant", "content": " tok"}
_WHOLE = (
    json.dumps({**_FRAME, "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "length"}]})[
        :-1
    ].encode()
    + b',"sent":%d}'
)
_END = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


class PacedConnection(asyncio.Protocol):
    """One request after the other; a stream's first piece comes at once, the others `gap` seconds apart."""

    def __init__(self, role: str, gap: float) -> None:
        self._role = role
        self._gap = gap
        self._pending = b""
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            head = self._pending[:end]
            found = _LENGTH.search(head)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._pending) < whole:
                return
            body, self._pending = self._pending[end + 4 : whole], self._pending[whole:]
            method, path, _ = head.split(b" ", 2)
            if method == b"POST":
                self._generate(json.loads(body))
            elif method == b"GET":
                self._transport.write(self._describe(path.decode()))
            else:  # a router that tries HTTP/2
                self._transport.close()
                return

    def _describe(self, path: str) -> bytes:
        facts: dict[str, object] = {"model_path": "paced", "served_model_name": "paced"}
        match path:
            case "/health" | "/health_generate":
                return _answer(b'{"status":"ok"}')
            case "/v1/models":
                return _answer(b'{"object":"list","data":[{"id":"paced","object":"model"}]}')
            case "/server_info" | "/get_server_info":
                return _answer(json.dumps({**facts, "disaggregation_mode": self._role}).encode())
            case "/model_info" | "/get_model_info":
                return _answer(json.dumps({**facts, "is_generation": True}).encode())
        return _answer(b"{}", b"404 Not Found")

    def _generate(self, fields: dict[str, int]) -> None:
        wanted = fields.get("max_completion_tokens") or fields.get("max_tokens") or 1
        tokens = 1 if self._role == "prefill" else wanted
        if not fields.get("stream"):
            self._transport.write(_answer(_WHOLE % time.monotonic_ns()))
            return
        self._transport.write(_STREAM_HEAD)
        self._piece(tokens, self._loop.time())

    def _piece(self, left: int, due: float) -> None:
        piece = _chunk(_PIECE % time.monotonic_ns())
        if left == 1:
            self._transport.write(piece + _chunk(_END) + b"0\r\n\r\n")
            return
        self._transport.write(piece)
        self._timer = self._loop.call_at(due + self._gap, self._piece, left - 1, due + self._gap)


async def _serve(ports: Sequence[int], gap: float) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    prefill, decode = ports
    async with (
        await loop.create_server(lambda: PacedConnection("prefill", gap), "127.0.0.1", prefill, backlog=1024),
        await loop.create_server(lambda: PacedConnection("decode", gap), "127.0.0.1", decode, backlog=1024),
    ):
        print(f"ready: http://127.0.0.1:{prefill} and http://127.0.0.1:{decode} (paced pair)", flush=True)
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m diptych.bench.paced_worker", description=__doc__)
    p.add_argument("ports", nargs=2, type=int, metavar=("PREFILL_PORT", "DECODE_PORT"))
    p.add_argument("--gap-ms", type=float, default=25.0, help="between two pieces of a stream")
    args = p.parse_args(argv)
    asyncio.run(_serve(args.ports, args.gap_ms / 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
