"""The process that compiles grammars: `python -m diptych.engine.grammar.compiler_process SOCKET PARENT`.

A request's grammar is input from outside to native code that can't be interrupted. Some schemas of a few
kilobytes take hours or all memory, so it runs where it can be killed. Loading the library takes seconds, so
this process does it once, has no threads, and forks for each job; a job that takes too long or too much ends
alone. All of them end with the scheduler.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

import numpy as np

from diptych.engine.grammar.bounds import BRIEF_NICENESS, MAX_COMPILED_BYTES, MEMORY_BYTES
from diptych.engine.grammar.frames import (
    JOBS,
    SETUPS,
    Compiled,
    CompileJob,
    CompilerSetup,
    Refused,
    Unusable,
    read_frame,
    write_frame,
)
from diptych.engine.grammar.structural_tag import with_little_whitespace
from diptych.engine.grammar.vocabulary import Text, Vocabulary, text_of, tokenizer_info
from diptych.engine.wire import Grammar, GrammarKind

if TYPE_CHECKING:
    import xgrammar

WALL_SECONDS = 20
"""Beside ten times the processor time: a job that gets no further for another reason ends too."""
_PR_SET_PDEATHSIG = 1
_IN_FRONT = re.compile(r"(\[[^\]]*\] \S+:\d+: )+(Check failed: \(.*?\) is false: ?)?", re.DOTALL)
"""Of a message of the library's: the time, a place in its sources, and an expression from there."""
_TOO_LARGE = f"it is too large to be compiled within {MEMORY_BYTES >> 20} MiB of memory"
_ANONYMOUS = re.compile(r"\S*|\S+::\S+ .*", re.DOTALL)
"""The name of a C++ function or exception, which says nothing to a client."""


def main() -> int:
    orders = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    os.nice(BRIEF_NICENESS)
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Unbuffered: the first job may come right behind, and its descriptor with its byte.
    with orders.makefile("rb", buffering=0) as pipe:
        setup = read_frame(pipe, SETUPS)
        if setup is None:
            return 0
        problem = ""
        try:
            compilers = _Compilers(setup)
        except ImportError as error:
            problem = str(error)
        # From here on each byte comes with the descriptor of a job's own connection.
        while (order := socket.recv_fds(orders, 1, 1))[0]:
            with socket.socket(fileno=order[1][0]) as connection:
                if problem:
                    with connection.makefile("wb") as out:
                        write_frame(out, Unusable(problem))
                elif os.fork() == 0:
                    orders.close()
                    _work(compilers, connection, parent)
    return 0


def die_with(parent: int) -> None:
    """Linux kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _work(compilers: _Compilers, connection: socket.socket, parent: int) -> NoReturn:
    """In the job's process. Whatever ends it, the scheduler sees the connection's end."""
    die_with(parent)
    with connection.makefile("rwb") as pipe:
        job = read_frame(pipe, JOBS)
        if job is not None:
            _die_unwanted(connection)
            os.nice(job.niceness - BRIEF_NICENESS)
            _limit_memory()
            # Of processor time, so that a busy machine refuses nothing. The signals kill.
            signal.setitimer(signal.ITIMER_PROF, job.timeout)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS + 10 * job.timeout)
            answer = compilers.answer(job)
            fcntl.fcntl(connection, fcntl.F_SETFL, 0)
            write_frame(pipe, answer)
    os._exit(0)


def _die_unwanted(connection: socket.socket) -> None:
    """From here on the kernel ends this process by a signal, whatever it does, when the scheduler ends the
    connection (which brings no other news any more)."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    # It may have come before.
    if select.select([connection], [], [], 0)[0]:
        os._exit(0)


class _Compilers:
    """One for each choice of tokens that are text; those that most grammars need are made before a fork."""

    def __init__(self, setup: CompilerSetup) -> None:
        """Raises ImportError without a usable xgrammar."""
        import xgrammar

        self._library = xgrammar
        self._setup = setup
        self._vocabulary = Vocabulary.from_dir(Path(setup.model_dir), setup.vocab_size)
        self._made: dict[Text, xgrammar.GrammarCompiler] = {}
        for kind in get_args(GrammarKind):
            self._compiler(text_of(self._vocabulary, Grammar(kind)))

    def answer(self, job: CompileJob) -> Compiled | Refused:
        try:
            compiled = compile_grammar(
                self._compiler(job.text), job.grammar, any_whitespace=self._setup.any_whitespace
            )
            if not self._begins(compiled):
                return Refused("it allows no text that the model's tokens can spell")
            text = compiled.serialize_json()
        except MemoryError:
            return Refused(_TOO_LARGE)
        except (RuntimeError, ValueError, TypeError) as error:
            return Refused(readable(str(error)))
        if len(text) > MAX_COMPILED_BYTES:
            return Refused("compiled it is too large")
        return Compiled(text)

    def _compiler(self, text: Text) -> xgrammar.GrammarCompiler:
        if text not in self._made:
            info = tokenizer_info(self._vocabulary, self._setup.end_ids, text)
            self._made[text] = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._made[text]

    def _begins(self, compiled: xgrammar.CompiledGrammar) -> bool:
        row = np.zeros((1, -(-self._setup.vocab_size // 32)), dtype=np.int32)
        limited = self._library.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        return not limited or bool(row.any())


def compile_grammar(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar, *, any_whitespace: bool
) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError with the library's message, which may begin with a place in its own sources."""
    match grammar.kind:
        case "json_schema":
            # Without a limit or none: one of 32 makes what is compiled, stored and sent 80 times as large.
            return compiler.compile_json_schema(grammar.text, any_whitespace=any_whitespace)
        case "json_object":
            return compiler.compile_json_schema('{"type":"object"}', any_whitespace=any_whitespace)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "lark":
            return compiler.compile_lark(grammar.text)
        case "structural_tag":
            tag = grammar.text if any_whitespace else with_little_whitespace(grammar.text)
            return compiler.compile_structural_tag(tag)


def _limit_memory() -> None:
    fields = Path("/proc/self/status").read_text().split()
    loaded = int(fields[fields.index("VmData:") + 1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (loaded + MEMORY_BYTES, loaded + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def readable(message: str) -> str:
    """What the library says to whoever wrote the grammar, without what it says to its own developers."""
    if "bad_alloc" in message:
        return _TOO_LARGE
    said = _IN_FRONT.match(message)
    text = (message[said.end() :] if said else message).strip()
    if _ANONYMOUS.fullmatch(text):
        return "the grammar library refuses it without a reason"
    return text[:500]


if __name__ == "__main__":
    sys.exit(main())
