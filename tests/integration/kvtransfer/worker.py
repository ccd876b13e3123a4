"""A process that holds one side of a transfer, with a real backend, told what to do by JSON lines.

    python worker.py ROLE OPTIONS_JSON

Each line on standard input is a call; each line on standard output is an answer or an event. The loop is a
scheduler's: one poller over standard input and the manager.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
import time
from typing import Any

import msgspec
import torch
import zmq
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from diptych.engine.kv_layout import Fingerprint
from diptych.kvtransfer.backends.mooncake_library import MooncakeSettings
from diptych.kvtransfer.backends.registry import make_backend
from diptych.kvtransfer.bootstrap.client import register
from diptych.kvtransfer.bootstrap.service import make_bootstrap_app
from diptych.kvtransfer.checksum import PageChecksums
from diptych.kvtransfer.control import ControlEndpoint
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.events import Received
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.parts import real_parts
from diptych.kvtransfer.receiver import DecodeReceiver
from diptych.kvtransfer.sender import PrefillSender
from diptych.kvtransfer.settings import TransferSettings
from diptych.kvtransfer.stats import TransferStats
from diptych.kvtransfer.wire import AuxBlock

PAGE_BYTES = 368_640


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve_bootstrap(host: str, port: int) -> int:
    """Start the bootstrap service in a thread with its own event loop; returns the port."""
    bound: list[int] = []
    ready = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(make_bootstrap_app())
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        bound.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(10)
    return bound[0]


class Worker:
    def __init__(self, role: str, options: dict[str, Any]) -> None:
        self.slab = torch.zeros((options.get("num_pages", 64), PAGE_BYTES), dtype=torch.uint8)
        identity = Identity.current()
        host = options.get("host", "127.0.0.1")
        self.registry = CollectorRegistry()
        settings = TransferSettings(**options.get("settings", {}))
        if host == "127.0.0.1":
            # With the transports named UCX would take every interface, those too that tests of other hosts
            # make and remove meanwhile.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        backend = make_backend(
            options.get("backend", "nixl"),
            self.slab,
            page_bytes=PAGE_BYTES,
            agent=identity.instance_id,
            ucx_tls=options.get("ucx_tls"),
            # The machine's other interfaces may go away while tests run.
            loopback=host == "127.0.0.1",
            mooncake=MooncakeSettings(host=host, stall_timeout=4 * settings.heartbeat_interval),
        )
        stats = TransferStats(self.registry, backend=backend.name)
        parts = real_parts(
            backend=backend,
            checksums=PageChecksums(self.slab, page_bytes=PAGE_BYTES),
            control=ControlEndpoint(
                identity, host, options.get("port", 0), settings.heartbeat_interval, stats
            ),
            fingerprint=Fingerprint(
                model="m",
                dtype="bfloat16",
                kv_dtype="bfloat16",
                num_layers=30,
                kv_heads=3,
                head_dim=64,
                vocab_size=49152,
                page_size=options.get("page_size", 16),
            ),
            identity=identity,
            settings=settings,
            stats=stats,
        )
        self.manager: Any = PrefillSender(parts) if role == "prefill" else DecodeReceiver(parts)
        bootstrap = None
        if role == "prefill":
            bootstrap = serve_bootstrap(host, options.get("bootstrap", 0))
            route = self.manager.route(worker_id=identity.instance_id)
            register(host, bootstrap, route, timeout=5)
        say(ready=True, control=self.manager.control_address, bootstrap=bootstrap)

    def call(self, op: str, arguments: dict[str, Any]) -> object:
        if op == "fill":
            generator = torch.Generator().manual_seed(arguments["seed"])
            for page in arguments["pages"]:
                self.slab[page].random_(0, 256, generator=generator)
            return None
        if op == "damage":
            self.slab[arguments["page"], -1] ^= 1
            return None
        if op == "pages":
            return [hash(self.slab[page].numpy().tobytes()) for page in arguments["pages"]]
        if op == "cpu":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return [usage.ru_utime + usage.ru_stime, time.monotonic()]
        if op == "metrics":
            return generate_latest(self.registry).decode()
        if op == "idle":
            return [self.manager.busy, self.manager.next_deadline()]
        if op == "finish":
            aux = AuxBlock(room=arguments["room"], prompt_tokens=arguments["tokens"], first_token=7)
            return self.manager.finish(arguments["room"], aux)
        return getattr(self.manager, op)(**arguments)

    def run(self) -> None:
        while True:
            for event in self.manager.step():
                fields = {name: getattr(event, name) for name in event.__slots__ if name != "aux"}
                if isinstance(event, Received):
                    fields["aux"] = msgspec.to_builtins(event.aux)
                say(event=type(event).__name__, **fields)
            poller = zmq.Poller()
            poller.register(sys.stdin.fileno(), zmq.POLLIN)
            for pollable in self.manager.pollables():
                poller.register(pollable, zmq.POLLIN)
            deadline = self.manager.next_deadline()
            wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1
            if self.manager.busy:
                wait = 1
            if sys.stdin.fileno() not in dict(poller.poll(wait)):
                continue
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            request = json.loads(line)
            try:
                say(answer=self.call(request.pop("op"), request))
            except TransferError as error:
                say(error=str(error), kind=type(error).__name__)


def main() -> None:
    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    try:
        worker.run()
    finally:
        worker.manager.close()


if __name__ == "__main__":
    main()
