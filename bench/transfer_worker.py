"""One side of page transfer in a process of its own: a real backend under `PrefillSender` or
`DecodeReceiver`, with a scheduler's loop and no model.

    python -m diptych.bench.transfer_worker prefill|decode OPTIONS_JSON

Calls come as JSON lines on standard input, each is answered by one on standard output. Times are seconds on
the machine's monotonic clock, which both processes share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import torch
import zmq
from aiohttp import web
from prometheus_client import CollectorRegistry

from diptych.bench.processes import calls_from_stdin
from diptych.engine.kv_layout import Fingerprint, KVLayout
from diptych.engine.slab import allocate_slab
from diptych.kvtransfer.backends.interface import PageWrite
from diptych.kvtransfer.backends.registry import make_backend
from diptych.kvtransfer.bootstrap.client import register
from diptych.kvtransfer.bootstrap.service import make_bootstrap_app
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.events import (
    DestinationReady,
    Failed,
    HandshakeDone,
    Received,
    Sent,
    TransferEvent,
)
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import TransferParts, real_parts
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wire import AuxBlock

HOST = "127.0.0.1"
LAYOUT = KVLayout(num_layers=30, kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16")
"""The default model's: a page is 368,640 bytes."""
_SETTINGS = TransferSettings(
    handshake_timeout=30, bootstrap_timeout=60, receive_timeout=60, transfer_timeout=30, heartbeat_interval=5
)
_STAMP = 1_000_003


class Options(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    num_pages: int


class NotingStats(TransferStats):
    """Keeps the writes that have become final."""

    def __init__(self, registry: CollectorRegistry, *, backend: str) -> None:
        super().__init__(registry, backend=backend)
        self.final: list[PageWrite] = []

    def written(self, write: PageWrite) -> None:
        super().written(write)
        self.final.append(write)


class Side(ABC):
    """What both have: a slab whose pages can be stamped and compared."""

    def __init__(self, options: Options) -> None:
        self.slab = allocate_slab(LAYOUT, options.num_pages, torch.device("cpu"))
        self.words = self.slab.flatten().view(torch.int64).view(options.num_pages, -1)
        identity = Identity.current()
        self.stats = NotingStats(CollectorRegistry(), backend=options.backend)
        self.parts: TransferParts = real_parts(
            backend=make_backend(
                options.backend,
                self.slab,
                page_bytes=LAYOUT.page_bytes,
                agent=identity.instance_id,
                loopback=True,
            ),
            checksums=PageChecksums(self.slab, page_bytes=LAYOUT.page_bytes),
            control=ControlEndpoint(identity, HOST, 0, _SETTINGS.heartbeat_interval, self.stats),
            fingerprint=Fingerprint(
                model="none",
                dtype=LAYOUT.dtype,
                kv_dtype=LAYOUT.dtype,
                num_layers=LAYOUT.num_layers,
                kv_heads=LAYOUT.kv_heads,
                head_dim=LAYOUT.head_dim,
                vocab_size=49152,
                page_size=LAYOUT.page_size,
            ),
            identity=identity,
            settings=_SETTINGS,
            stats=self.stats,
        )
        self.rooms: list[int] = []
        """Of the call that runs, not yet ended."""

    @property
    @abstractmethod
    def manager(self) -> PrefillSender | DecodeReceiver: ...

    @abstractmethod
    def begin(self, op: str, call: dict[str, Any]) -> None:
        """Start moving the rooms of a call; `result` is the answer once all of them have ended."""

    @abstractmethod
    def note(self, event: TransferEvent) -> None: ...

    @abstractmethod
    def result(self) -> object: ...

    def stamp(self, salt: int) -> None:
        """Fill each page with a number that tells it from others."""
        numbers = torch.arange(len(self.words), dtype=torch.int64) * _STAMP + salt
        self.words.copy_(numbers[:, None].expand_as(self.words))

    def has(self, src: list[int], dst: list[int], salt: int) -> bool:
        """Whether page `dst[i]` here is page `src[i]` of a peer that was stamped with `salt`."""
        numbers = torch.tensor(src, dtype=torch.int64) * _STAMP + salt
        return bool((self.words[dst] == numbers[:, None]).all())


class PrefillSide(Side):
    """Sends the pages it is told to as soon as a room's destination is known."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._sender = PrefillSender(self.parts)
        self._pages: list[int] = []
        self._sent_at: list[float] = []
        bootstrap = _serve_bootstrap()
        register(HOST, bootstrap, self._sender.route(worker_id="bench"), timeout=10)
        say({"bootstrap": bootstrap})

    @property
    def manager(self) -> PrefillSender:
        return self._sender

    def begin(self, op: str, call: dict[str, Any]) -> None:
        assert op == "send", op
        self.rooms, self._pages, self._sent_at = call["rooms"], call["pages"], []
        self.stats.final.clear()
        for room in self.rooms:
            self._sender.open(room, len(self._pages) * LAYOUT.page_size)
        say(None)

    def note(self, event: TransferEvent) -> None:
        match event:
            case DestinationReady(room=room):
                self._sent_at.append(time.monotonic())
                self._sender.send(room, self._pages, 0)
                tokens = len(self._pages) * LAYOUT.page_size
                self._sender.finish(room, AuxBlock(room=room, prompt_tokens=tokens, first_token=1))
            case Sent(room=room):
                self.rooms.remove(room)

    def result(self) -> object:
        return {
            "sent_at": self._sent_at,
            "write_seconds": [w.finished_at - w.posted_at for w in self.stats.final],
            "descriptors": [w.num_descriptors for w in self.stats.final],
        }


class DecodeSide(Side):
    """Reserves pages for one room after the other."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._receiver = DecodeReceiver(self.parts)
        self._bootstrap = 0
        self._pages: list[int] = []
        self._reserved_at: list[float] = []
        self._received_at: list[float] = []
        say({})

    @property
    def manager(self) -> DecodeReceiver:
        return self._receiver

    def begin(self, op: str, call: dict[str, Any]) -> None:
        assert op == "receive", op
        self.rooms, self._pages, self._bootstrap = call["rooms"], call["pages"], call["bootstrap"]
        self._reserved_at, self._received_at = [], []
        self._receiver.open(self.rooms[0], HOST, self._bootstrap)

    def note(self, event: TransferEvent) -> None:
        match event:
            case HandshakeDone(room=room):
                self._reserved_at.append(time.monotonic())
                self._receiver.reserve(room, self._pages, len(self._pages) * LAYOUT.page_size)
            case Received(room=room):
                self._received_at.append(time.monotonic())
                self.rooms.remove(room)
                if self.rooms:
                    self._receiver.open(self.rooms[0], HOST, self._bootstrap)

    def result(self) -> object:
        return {"reserved_at": self._reserved_at, "received_at": self._received_at}


def say(answer: object) -> None:
    sys.stdout.write(json.dumps({"answer": answer}) + "\n")
    sys.stdout.flush()


def _serve_bootstrap() -> int:
    """The bootstrap service, in a thread with its own event loop; returns the port."""
    bound: list[int] = []
    ready = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(make_bootstrap_app())
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        bound.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(10)
    return bound[0]


def _handle(side: Side, call: dict[str, Any]) -> None:
    op = call.pop("op")
    if op == "stamp":
        side.stamp(**call)
        say(None)
    elif op == "has":
        say(side.has(**call))
    else:
        side.begin(op, call)


def serve(side: Side) -> None:
    """Until standard input ends. Raises RuntimeError when a room fails."""
    calls = calls_from_stdin()
    while True:
        manager = side.manager
        running = bool(side.rooms)
        for event in manager.step():
            if isinstance(event, Failed):
                raise RuntimeError(f"room {event.room} failed: {event.reason}")
            side.note(event)
        if running and not side.rooms:
            say(side.result())
        poller = zmq.Poller()
        poller.register(calls.fileno(), zmq.POLLIN)
        for pollable in manager.pollables():
            poller.register(pollable, zmq.POLLIN)
        deadline = manager.next_deadline()
        wait = None if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000) + 1
        if manager.busy:
            wait = 0
        if calls.fileno() in dict(poller.poll(wait)):
            line = calls.readline()
            if not line:
                return
            _handle(side, json.loads(line))


def main() -> int:
    # One of the two ends first, and the other would say that it is lost.
    logging.basicConfig(level=logging.ERROR)
    role, options = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Options)
    side: Side = PrefillSide(options) if role == "prefill" else DecodeSide(options)
    try:
        serve(side)
    finally:
        side.manager.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
