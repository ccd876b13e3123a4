"""The released `sglang-router`, in its prefill/decode mode, before our workers."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

import aiohttp
from support.client import Client
from support.cluster import Cluster
from support.processes import Launched

from .conftest import ClientEnvironment

READY_SECONDS = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class SglangRouter:
    """Started on creation; `close` ends it."""

    def __init__(
        self, clients: ClientEnvironment, prefill: Launched, decode: Launched, model_dir: Path, folder: Path
    ) -> None:
        port = free_port()
        self._output = (folder / "sglang_router.txt").open("w")
        self._process = subprocess.Popen(
            [
                *(clients.bin / "python", "-m", "sglang_router.launch_router"),
                *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
                *("--pd-disaggregation", "--prefill", prefill.url, prefill.bootstrap_port),
                *("--decode", decode.url),
                # Else it would look for the model's name on the hub.
                *("--tokenizer-path", model_dir, "--log-level", "warn"),
                # It takes a minute by default to see that a worker is back.
                *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
                *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
            ],
            env=clients.variables(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.client = Client(f"http://127.0.0.1:{port}")
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """A healthy worker on each side."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def _ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            return self.client.get("/readiness")[0] == 200
        return False

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._output.close()


def assert_quiet(cluster: Cluster) -> None:
    """Nothing that the router sent, its probe for HTTP/2 included, made a worker log an error."""
    for worker in cluster.workers:
        lines = [line for line in worker.launched.lines if "Traceback" in line or " ERROR diptych" in line]
        assert lines == [], worker.launched.output
