"""A prefill worker, a decode worker and a router, as an operator would start them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from support.client import Client
from support.faults import Faults
from support.processes import Launched

MODEL = "smollm2-135m-instruct"


class Worker:
    """A launched worker with a client of its own."""

    def __init__(self, launched: Launched, connect: Callable[[str], Client] = Client) -> None:
        self.launched = launched
        self.client = connect(launched.url)
        self.faults = Faults(self.client)

    def load(self) -> dict[str, int]:
        """The scheduler's load, page counts included."""
        status, info = self.client.get("/server_info")
        assert status == 200, info
        load: dict[str, int] = info["load"]
        return load

    def wait_until_idle(self, seconds: float = 20.0) -> dict[str, int]:
        """Load once nothing runs and no page is held or quarantined."""
        deadline = time.monotonic() + seconds
        while True:
            load = self.load()
            busy = ("num_running_reqs", "num_waiting_reqs", "pages_held", "pages_quarantined")
            if not any(load[name] for name in busy):
                assert load["pages_free"] + load["pages_cached"] == load["pages_total"]
                errors = self.client.metrics().get("diptych_pool_accounting_errors_total", 0)
                assert errors == 0, self.launched.output
                return load
            assert time.monotonic() < deadline, f"{self.launched.command} isn't idle: {load}"
            time.sleep(0.05)


class Cluster:
    """Started on creation; `close` ends everything and checks the pools first."""

    def __init__(
        self,
        *flags: str,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        model: str = MODEL,
        environment: dict[str, str] | None = None,
        launch_prefill: Callable[..., Launched] = Launched,
        launch_decode: Callable[..., Launched] = Launched,
        connect: Callable[[str], Client] = Client,
    ) -> None:
        """`launch_prefill`, `launch_decode`: what starts these two, when they run elsewhere. `connect`: a
        client of a URL, when it takes more than that."""
        self._connect = connect
        common = ("--model-path", model, "--port", "0", *flags)
        prefill_flags = (*common, "--disaggregation-bootstrap-port", "0", *prefill_flags)
        decode_flags = (*common, *decode_flags)
        self._launch = {
            "prefill": partial(launch_prefill, "launch-prefill", *prefill_flags, environment=environment),
            "decode": partial(launch_decode, "launch-decode", *decode_flags, environment=environment),
        }
        prefill, decode = self._launch["prefill"](), self._launch["decode"]()
        self._launched = [prefill, decode]
        try:
            self.prefill = Worker(prefill.ready(), connect)
            self.decode = Worker(decode.ready(), connect)
            self._launch_router = partial(
                Launched,
                "launch-router",
                *("--prefill", prefill.url, prefill.bootstrap_port),
                *("--decode", decode.url),
                *("--port", "0"),
                *router_flags,
                environment=environment,
            )
            self.launch_router()
        except BaseException:
            self.kill()
            raise

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, self.decode]

    def wait_until_idle(self) -> None:
        for worker in self.workers:
            worker.wait_until_idle()

    def flush(self) -> None:
        """Drop all cached prefixes, once nothing runs."""
        self.wait_until_idle()
        for worker in self.workers:
            worker.client.ok("/flush_cache", {})

    def launch_router(self) -> None:
        """The first one, or another, on a port of its own, for the same workers."""
        router = self._launch_router()
        self._launched.append(router)
        self.router = router.ready()
        self.client = self._connect(router.url)

    def launch_again(self, role: str) -> None:
        """In place of a worker that has ended, with the same flags and on the same ports; `role` is `prefill`
        or `decode`. Doesn't wait until it is ready."""
        worker = {"prefill": self.prefill, "decode": self.decode}[role]
        old = worker.launched
        ports = ["--port", old.url.rpartition(":")[2]]
        if role == "prefill":
            ports += ["--disaggregation-bootstrap-port", old.bootstrap_port]
        # Of a flag that is given twice the last counts.
        worker.launched = self._launch[role](*ports)
        worker.faults.rules = []
        self._launched.append(worker.launched)

    def close(self) -> None:
        try:
            self.wait_until_idle()
            for launched in reversed(self._launched):
                launched.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        for launched in self._launched:
            launched.kill()


class Colocated:
    """`launch-colocated`: same engine, no transfer."""

    def __init__(self, *flags: str, model: str = MODEL) -> None:
        launched = Launched("launch-colocated", "--model-path", model, "--port", "0", *flags)
        try:
            self.worker = Worker(launched.ready())
        except BaseException:
            launched.kill()
            raise
        self.client = self.worker.client

    def close(self) -> None:
        try:
            self.worker.wait_until_idle()
            self.worker.launched.stop()
        finally:
            self.worker.launched.kill()
