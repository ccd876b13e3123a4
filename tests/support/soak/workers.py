"""The workers of a soak: on fixed ports, so that they can be killed and started again in place."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from support.cluster import Worker
from support.processes import Launched, children_of
from support.soak.plan import Blow, Deadlines, Side, draw_faults

POOL_TOKENS = {"prefill": 3072, "decode": 640}
"""Small enough for decode to park requests now and then."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    descriptors: int
    threads: int
    megabytes: float

    @classmethod
    def of(cls, pid: int) -> Footprint:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Place:
    """Where a worker of one side runs, one process start after another."""

    def __init__(
        self, side: Side, backend: str, model: Path, deadlines: Deadlines, random: Random, seed: int
    ) -> None:
        self.side: Side = side
        self._random = random
        self._seed = seed
        self._heartbeat = deadlines.heartbeat
        self.port, self.control_port, self.bootstrap_port = free_ports(3)
        self._flags = [
            *("--model-path", str(model), "--dtype", "float32"),
            *("--port", str(self.port), "--disaggregation-control-port", str(self.control_port)),
            *("--disaggregation-transfer-backend", backend),
            *("--max-total-tokens", str(POOL_TOKENS[side])),
            *("--handshake-timeout", str(deadlines.handshake)),
            *("--bootstrap-timeout", str(deadlines.bootstrap)),
            *("--receive-timeout", str(deadlines.receive)),
            *("--transfer-timeout", str(deadlines.transfer)),
            *("--retracted-timeout", str(deadlines.retracted)),
            *("--heartbeat-interval", str(deadlines.heartbeat)),
            *("--shutdown-timeout", str(deadlines.shutdown)),
            "--enable-fault-injection",
        ]
        if side == "prefill":
            self._flags += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
            self._flags += ["--chunked-prefill-size", "64"]
        else:
            self._flags += ["--num-reserved-decode-tokens", "0"]
        self.lives: list[Launched] = []
        self.up = False
        self.peer_starts = 0
        """Of the other side, during this life."""
        self.events: Counter[str] = Counter()
        """Faults and retractions of this life, as of the last look."""
        self.checksum = False
        self.first: dict[int, Footprint] = {}
        """By pid: what a process of this life held at its first rest."""
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def launched(self) -> Launched:
        """The present life."""
        return self.lives[-1]

    def start(self) -> None:
        """A life begins; `ready` waits for it."""
        # Once on it stays on: pages may be damaged on purpose just now.
        self.checksum |= self.side == "decode" and self._random.random() < 0.5
        extra = ["--enable-kv-checksum"] if self.checksum else []
        self.peer_starts = 0
        self.first = {}
        self.events = Counter()
        self.lives.append(Launched(f"launch-{self.side}", *self._flags, *extra))

    def ready(self) -> Worker:
        self.worker = Worker(self.launched.ready())
        self.up = True
        return self.worker

    def pids(self) -> list[int]:
        """Frontend and scheduler."""
        return [self.launched.pid, *children_of(self.launched.pid)]

    def strike(self, blow: Blow) -> None:
        """Blocking for as long as it takes. Raises AssertionError when a restart isn't clean."""
        launched = self.launched
        self.up = blow.kind == "stop"
        match blow.kind:
            case "stop":
                scheduler = launched.scheduler_pid()
                os.kill(scheduler, signal.SIGSTOP)
                time.sleep(blow.seconds)
                os.kill(scheduler, signal.SIGCONT)
                return
            case "kill":
                launched.kill()
            case "kill scheduler":
                os.kill(launched.scheduler_pid(), signal.SIGKILL)
                code = launched.wait()
                assert code == 1, f"launch-{self.side} exited with {code} after its scheduler was killed"
            case "restart":
                # Injected faults may hold what it waits for; that is no reason for it not to end.
                launched.stop()
        self.start()
        self.ready()

    def inject(self, *, checksum: bool) -> list[str]:
        """New faults instead of those in force; what they are, in words."""
        rules = draw_faults(self._random, self.side, checksum=checksum, heartbeat=self._heartbeat)
        faults = self.worker.faults
        faults.rules = []
        faults.inject(*rules, seed=self._seed)
        return [f"{self.side}: {rule}" for rule in rules]

    def complaints(self) -> list[str]:
        """Lines of any life that no fault excuses."""
        bad = ("Traceback", "accounting is wrong", "was never retrieved", "IllegalMove", "AssertionError")
        return [
            f"{launched.command}: {line}"
            for launched in self.lives
            for line in launched.lines
            if any(word in line for word in bad)
        ]

    def footprints(self) -> dict[int, tuple[Footprint, Footprint]]:
        """By pid: at the first rest of this life, and now."""
        now = {pid: Footprint.of(pid) for pid in self.pids()}
        for pid, footprint in now.items():
            self.first.setdefault(pid, footprint)
        return {pid: (self.first[pid], footprint) for pid, footprint in now.items()}

    def save_output(self, directory: Path) -> None:
        for number, launched in enumerate(self.lives):
            (directory / f"{self.side}-{number}.log").write_text(launched.output + "\n")

    def end(self) -> None:
        """SIGTERM; AssertionError unless it exits with 0."""
        self.launched.stop()

    def kill(self) -> None:
        for launched in self.lives:
            launched.kill()
