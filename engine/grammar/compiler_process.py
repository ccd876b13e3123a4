"""The process that compiles grammars: `python -m diptych.engine.grammar.compiler_process SOCKET PARENT`.

A request's grammar is input from outside to native code that can't be interrupted. Some schemas of a few
kilobytes take hours or all memory, so it runs where it can be killed. Loading the library takes seconds, so
this process does it once, has no threads, and forks for each job; a job that takes too long or too much ends
alone. All of them end with the scheduler.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

import numpy as np

from diptych.engine.grammar.bounds import MAX_COMPILED_BYTES, MEMORY_BYTES
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
from diptych.engine.grammar.vocabulary import Text, Vocabulary, text_of, tokenizer_info
from diptych.engine.wire import Grammar, GrammarKind

if TYPE_CHECKING:
    import xgrammar

WALL_SECONDS = 20
"""Beside ten times the processor time: a job that gets no further for another reason ends too."""
NICENESS = 5
"""Tokens come first."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    orders = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    os.nice(NICENESS)
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
            _limit_memory()
            # Of processor time, so that a busy machine refuses nothing. The signals kill.
            signal.setitimer(signal.ITIMER_PROF, job.timeout)
            signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS + 10 * job.timeout)
            write_frame(pipe, compilers.answer(job))
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
            compiled = compile_grammar(self._compiler(job.text), job.grammar)
            if not self._begins(compiled):
                return Refused("it allows no text that the model's tokens can spell")
            text = compiled.serialize_json()
        except MemoryError:
            return Refused("it takes too much memory to compile")
        except (RuntimeError, ValueError, TypeError) as error:
            return Refused(_readable(str(error)))
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


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError with the library's message, which may begin with a place in its own sources."""
    match grammar.kind:
        case "json_schema":
            # Blanks without a limit: one of 32 makes what is compiled, stored and sent 80 times as large.
            return compiler.compile_json_schema(grammar.text)
        case "json_object":
            return compiler.compile_json_schema('{"type":"object"}')
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "lark":
            return compiler.compile_lark(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(grammar.text)


def _limit_memory() -> None:
    fields = Path("/proc/self/status").read_text().split()
    loaded = int(fields[fields.index("VmData:") + 1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (loaded + MEMORY_BYTES, loaded + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _readable(message: str) -> str:
    """Without the time and the source line that the library puts in front."""
    text = message.strip()
    while text.startswith("["):
        text = text.partition("] ")[2].partition(": ")[2].strip()
    return text[:500] or "the grammar library refused it without a reason"


if __name__ == "__main__":
    sys.exit(main())
