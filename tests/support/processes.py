"""Real `launch-*` processes under test: started, waited for, ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

# Every process of one test run carries this in its environment, children and orphans included.
RUN_ID = uuid.uuid4().hex
MARKER = "TEST_RUN_OF_DIPTYCH"

READY_SECONDS = 120.0


class DidNotStart(AssertionError):
    pass


class Launched:
    """One `launch-*` command, or a `script` in its place. Its output is kept for assertions and shown when
    something fails."""

    def __init__(
        self,
        command: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        self.command = command
        module = f"diptych.launch.{command.removeprefix('launch-')}"
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, *(("-m", module) if script is None else (str(script),)), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={
                **os.environ,
                "DIPTYCH_ROLE_NAMESPACES": os.environ.get("DIPTYCH_ROLE_NAMESPACES", "enforce"),
                MARKER: RUN_ID,
                **(environment or {}),
            },
        )
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, seconds: float = READY_SECONDS, *, after: int = 0) -> re.Match[str]:
        """The first output line that matches, of those from number `after`; fails when the process ends or
        time runs out first."""
        deadline = time.monotonic() + seconds
        seen = after
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if match := re.search(pattern, line):
                        return match
                seen = len(self.lines)
                if self._ended or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise DidNotStart(f"{self.command}: no line like {pattern!r} in:\n{self.output}")

    def ready(self) -> Launched:
        self.url = self.wait_for_line(r"^ready: (\S+)").group(1)
        return self

    @property
    def bootstrap_port(self) -> str:
        return self.wait_for_line(r"\bbootstrap=(\d+)").group(1)

    def scheduler_pid(self) -> int:
        (pid,) = [p for p in children_of(self.pid) if b"diptych.launch.scheduler" in command_line(p)]
        return pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """The exit code."""
        code = self._process.wait(seconds)
        self._reader.join(seconds)
        return code

    def stop(self) -> None:
        """SIGTERM, and insist on a clean exit."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            code = self.wait()
            assert code == 0, f"{self.command} exited with {code} on SIGTERM:\n{self.output}"

    def kill(self) -> None:
        """SIGKILL; used when a test has already failed, or when the kill is the test."""
        if self._process.poll() is None:
            self._process.kill()
            self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def processes_of_this_run() -> list[int]:
    """Every live process that this test run started, directly or not."""
    marker = f"{MARKER}={RUN_ID}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            zombie = (entry / "stat").read_text().rpartition(") ")[2].startswith("Z")
            if not zombie and marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def eventually_no_processes(seconds: float = 15.0) -> list[int]:
    """What is left of this run's processes after at most `seconds`; empty when all is well."""
    return sorted(eventually_only(set(), seconds))


def eventually_only(expected: set[int], seconds: float = 15.0) -> set[int]:
    """This run's processes, once they are the expected ones, at the latest after `seconds`."""
    deadline = time.monotonic() + seconds
    while (there := set(processes_of_this_run())) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return there


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
