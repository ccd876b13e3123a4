"""The scheduler's end of its compiler process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from diptych.engine.grammar.bounds import BRIEF_NICENESS, MEMORY_BYTES
from diptych.engine.grammar.errors import GrammarRefused
from diptych.engine.grammar.frames import (
    REPLIES,
    Compiled,
    CompileJob,
    CompilerSetup,
    Refused,
    Unusable,
    read_frame,
    write_frame,
)
from diptych.engine.grammar.vocabulary import Text
from diptych.engine.wire import Grammar

_SETTLING_SECONDS = 0.2
"""A process that was killed is gone by then."""


class JobHandle:
    """By which other threads end one job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._given_up = False

    def give_up(self) -> None:
        """The job's process is killed, or never starts. Idempotent."""
        with self._lock:
            self._given_up = True
            if self._connection is not None:
                # Its process has asked for a signal when this happens.
                self._connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def running(self, connection: socket.socket) -> Iterator[None]:
        """Raises ConnectionError when it was given up before."""
        with self._lock:
            if self._given_up:
                raise ConnectionError("nobody waits for it any more")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


class CompilerLink:
    """Used by several threads: each job has a connection of its own. The process starts with the first job,
    and again if it was ended from outside."""

    def __init__(
        self, model_dir: Path, *, vocab_size: int, end_ids: Collection[int], any_whitespace: bool = True
    ) -> None:
        """`vocab_size` and `end_ids`: the model's, logits of one token and end-of-sequence tokens.
        `any_whitespace`: whether JSON may have as much of it between its elements as the model likes."""
        self.model_dir = model_dir
        self.vocab_size = vocab_size
        self.end_ids = sorted({token_id for token_id in end_ids if 0 <= token_id < vocab_size})
        self._setup = CompilerSetup(
            model_dir=str(model_dir),
            vocab_size=vocab_size,
            end_ids=self.end_ids,
            any_whitespace=any_whitespace,
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Nothing if it runs. Linux ends it with the thread that calls this. Raises OSError."""
        with self._lock:
            self._started()

    def compile(
        self,
        grammar: Grammar,
        text: Text,
        *,
        timeout: float,
        handle: JobHandle,
        niceness: int = BRIEF_NICENESS,
    ) -> str | None:
        """The compiled grammar, serialised; None if the job's process has ended without an answer. `timeout`:
        seconds of processor time. Raises `GrammarRefused`, and OSError without a process."""
        job = CompileJob(grammar=grammar, text=text, timeout=timeout, niceness=niceness)
        ours, theirs = socket.socketpair()
        with ours, handle.running(ours), ours.makefile("rwb") as pipe:
            with theirs, self._lock:
                socket.send_fds(self._started(), [b"j"], [theirs.fileno()])
            reply = None
            # Reset by the end of the job's process.
            with contextlib.suppress(ConnectionError):
                write_frame(pipe, job)
                reply = read_frame(pipe, REPLIES)
        match reply:
            case Compiled(serialised):
                return serialised
            case Refused(message):
                raise GrammarRefused(message)
            case Unusable(message):
                raise GrammarRefused(f"xgrammar can't be loaded: {message}", status=503)
        return None

    def why_unanswered(self, timeout: float) -> GrammarRefused:
        """Of `compile` without an answer: the job's process has ended, alone or with all."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is None or process.wait(_SETTLING_SECONDS) is not None:
                return GrammarRefused("the process that compiles grammars has ended", status=503)
        return GrammarRefused(
            f"it can't be compiled within {timeout:g} s of processor time and {MEMORY_BYTES >> 20} MiB"
        )

    def _started(self) -> socket.socket:
        if self._orders is not None and self._process is not None and self._process.poll() is None:
            return self._orders
        self._end()
        if self._closed:
            raise ConnectionError("the scheduler is stopping")
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "diptych.engine.grammar.compiler_process",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # What the library warns about is in the clients' grammars, not ours to log.
                stderr=subprocess.DEVNULL,
                # A library's idle threads would not survive the forks.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        with self._orders.makefile("wb") as pipe:
            write_frame(pipe, self._setup)
        return self._orders

    def close(self) -> None:
        """Jobs that run fail, and none starts any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._orders is not None:
            self._orders.close()
            self._orders = None
