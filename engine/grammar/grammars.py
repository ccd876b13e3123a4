"""Compiled grammars: made off the scheduler's thread, each once, and kept while they are used."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diptych.engine.background import BackgroundPool
from diptych.engine.grammar.bounds import (
    BRIEF_AT_ONCE,
    BRIEF_NICENESS,
    BRIEF_SECONDS,
    LONG_AT_ONCE,
    LONG_NICENESS,
    MAX_COMPILING,
    MAX_LONG,
)
from diptych.engine.grammar.compiler_link import CompilerLink, JobHandle
from diptych.engine.grammar.errors import GrammarRefused
from diptych.engine.grammar.matcher import Matcher
from diptych.engine.grammar.vocabulary import Text, Vocabulary, text_of, tokenizer_info
from diptych.engine.wire import Grammar, SamplingParams

if TYPE_CHECKING:
    import xgrammar

MAX_KEPT = 1024
"""Grammars, refused ones included."""
MAX_KEPT_BYTES = 256 << 20
"""Of compiled grammars. Running samples keep theirs beyond that."""
_MAX_VOCABULARIES = 8


@dataclass(frozen=True, slots=True)
class _Ready:
    compiled: xgrammar.CompiledGrammar
    num_bytes: int


@dataclass(eq=False, slots=True)
class _Job:
    key: bytes
    grammar: Grammar
    timeout: float
    """Seconds of processor time for this try."""
    is_long: bool = False
    """It wasn't done after a brief try, and has another."""
    handle: JobHandle = field(default_factory=JobHandle)


class Grammars:
    """Of one model. Everything but the work of `_compile` happens on the scheduler's thread.

    All get a brief try in order of arrival. Those that aren't done then start again among themselves, a few
    at a time and with less of the processor, so that they hold up nobody else. Nothing is loaded or started
    before the first grammar comes."""

    def __init__(self, link: CompilerLink, *, timeout: float) -> None:
        """`timeout`: seconds of processor time that compiling one grammar may take."""
        self._link = link
        self._timeout = timeout
        self._brief = BackgroundPool(threads=BRIEF_AT_ONCE, name="grammar")
        self._long = BackgroundPool(threads=LONG_AT_ONCE, name="long grammar", wakeup=self._brief.wakeup)
        self._lock = threading.Lock()
        """Guards `_vocabulary` and `_infos`, which the threads share."""
        self._vocabulary: Vocabulary | None = None
        self._infos: OrderedDict[Text, xgrammar.TokenizerInfo] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        """Those that run or wait, by the keys of their grammars."""
        self._tried: queue.SimpleQueue[tuple[_Job, _Ready | GrammarRefused | None]] = queue.SimpleQueue()
        """Jobs whose try is over; None if it was too brief."""
        self._kept: OrderedDict[bytes, _Ready | GrammarRefused] = OrderedDict()
        """Least recently used first."""
        self._kept_bytes = 0

    def fileno(self) -> int:
        """Readable when there may be news; then `collect`."""
        return self._brief.wakeup.fileno()

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """For one sample; None while its grammar is being compiled. Raises `GrammarRefused`."""
        grammar = sampling.grammar
        assert grammar is not None
        key = grammar_key(grammar)
        known = self._kept.get(key)
        if known is None:
            self._start(key, grammar)
            return None
        self._kept.move_to_end(key)
        if isinstance(known, GrammarRefused):
            raise known
        # A control token that the client stops at ends the text like one of the model's own.
        assert self._vocabulary is not None
        control = self._vocabulary.special.keys() & set(sampling.stop_token_ids)
        return Matcher(
            known.compiled,
            vocab_size=self._link.vocab_size,
            end_ids={*self._link.end_ids, *control},
            stop_ids=sampling.stop_token_ids,
            param=grammar.param,
        )

    def collect(self) -> set[bytes]:
        """Take over what is finished; the keys of those grammars."""
        self._brief.wakeup.clear()
        news = set()
        while not self._tried.empty():
            job, outcome = self._tried.get()
            if self._jobs.get(job.key) is not job:
                continue
            if outcome is None:
                outcome = self._try_long(job)
            if outcome is not None:
                del self._jobs[job.key]
                self._kept[job.key] = outcome
                self._kept_bytes += _size(outcome)
                news.add(job.key)
        return news

    def give_up(self, key: bytes) -> None:
        """Nobody waits for this grammar any more. Nothing if it isn't being compiled."""
        job = self._jobs.pop(key, None)
        if job is not None:
            job.handle.give_up()

    def trim(self) -> None:
        """Forget the least recently used ones over the bounds, once whoever waited has made its matcher. A
        try that failed for reasons other than the grammar's is forgotten at once."""
        for key in [key for key, outcome in self._kept.items() if _is_passing(outcome)]:
            del self._kept[key]
        while self._kept and (len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES):
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest)

    def close(self) -> None:
        """What is being compiled is given up. Idempotent."""
        self._link.close()
        self._long.close()
        self._brief.close()

    def _start(self, key: bytes, grammar: Grammar) -> None:
        if key in self._jobs:
            return
        if not self._link.end_ids:
            raise GrammarRefused("the model has no end-of-sequence token that could end a grammar's text")
        if len(self._jobs) >= MAX_COMPILING:
            raise GrammarRefused(f"{len(self._jobs)} others wait to be compiled; try again later", status=429)
        job = self._jobs[key] = _Job(key, grammar, timeout=min(BRIEF_SECONDS, self._timeout))
        self._brief.submit(self._compile, job)

    def _try_long(self, job: _Job) -> GrammarRefused | None:
        others = sum(other.is_long for other in self._jobs.values())
        if others >= MAX_LONG:
            problem = f"it takes long to compile, and {others} others that do wait; try again later"
            return GrammarRefused(problem, status=429)
        again = self._jobs[job.key] = _Job(
            job.key, job.grammar, timeout=self._timeout, is_long=True, handle=job.handle
        )
        self._long.submit(self._compile, again)
        return None

    # ---- in a thread of the pool ----------------------------------------------------------------------

    def _compile(self, job: _Job) -> None:
        try:
            outcome = self._compiled(job)
        except GrammarRefused as refusal:
            outcome = refusal
        except (ImportError, OSError) as error:
            outcome = GrammarRefused(f"grammars can't be compiled: {error}", status=503)
        self._tried.put((job, outcome))

    def _compiled(self, job: _Job) -> _Ready | GrammarRefused | None:
        # Its process loads the library while this one does.
        self._link.start()
        import xgrammar

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.from_dir(self._link.model_dir, self._link.vocab_size)
            text = text_of(self._vocabulary, job.grammar)
        niceness = LONG_NICENESS if job.is_long else BRIEF_NICENESS
        serialised = self._link.compile(
            job.grammar, text, timeout=job.timeout, niceness=niceness, handle=job.handle
        )
        if serialised is None:
            return self._link.why_unanswered(job.timeout) if job.timeout >= self._timeout else None
        compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, self._info(text))
        return _Ready(compiled, len(serialised))

    def _info(self, text: Text) -> xgrammar.TokenizerInfo:
        with self._lock:
            assert self._vocabulary is not None
            if text not in self._infos:
                self._infos[text] = tokenizer_info(self._vocabulary, self._link.end_ids, text)
            self._infos.move_to_end(text)
            while len(self._infos) > _MAX_VOCABULARIES:
                self._infos.popitem(last=False)
            return self._infos[text]


def grammar_key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(grammar.kind.encode() + b"\0" + grammar.text.encode(), digest_size=32).digest()


def _size(outcome: _Ready | GrammarRefused) -> int:
    return outcome.num_bytes if isinstance(outcome, _Ready) else 0


def _is_passing(outcome: _Ready | GrammarRefused) -> bool:
    return isinstance(outcome, GrammarRefused) and outcome.status != 400
