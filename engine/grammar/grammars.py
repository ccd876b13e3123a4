"""Compiled grammars: made off the scheduler's thread, each once, and kept while they are used."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.engine.background import BackgroundPool
from diptych.engine.grammar.compiler_link import CompilerLink
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
MAX_COMPILING = 256
AT_ONCE = 4
"""Grammars being compiled: some that take all their time leave the others to the rest."""
_MAX_VOCABULARIES = 8


@dataclass(frozen=True, slots=True)
class _Ready:
    compiled: xgrammar.CompiledGrammar
    num_bytes: int


class Grammars:
    """Of one model. Everything but the work of `_compile` happens on the scheduler's thread.

    Nothing is loaded or started before the first grammar comes."""

    def __init__(self, link: CompilerLink, *, timeout: float) -> None:
        """`timeout`: seconds of processor time that compiling one grammar may take."""
        self._link = link
        self._timeout = timeout
        self._pool = BackgroundPool(threads=AT_ONCE, name="grammar")
        self._lock = threading.Lock()
        """Guards `_vocabulary` and `_infos`, which the threads share."""
        self._vocabulary: Vocabulary | None = None
        self._infos: OrderedDict[Text, xgrammar.TokenizerInfo] = OrderedDict()
        self._compiling: set[bytes] = set()
        self._finished: queue.SimpleQueue[tuple[bytes, _Ready | GrammarRefused]] = queue.SimpleQueue()
        self._kept: OrderedDict[bytes, _Ready | GrammarRefused] = OrderedDict()
        """Least recently used first."""
        self._kept_bytes = 0

    def fileno(self) -> int:
        """Readable when a grammar is finished; then `collect`."""
        return self._pool.wakeup.fileno()

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """For one sample; None while its grammar is being compiled. Raises `GrammarRefused`."""
        grammar = sampling.grammar
        assert grammar is not None
        key = _key(grammar)
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

    def collect(self) -> bool:
        """Take over what is finished; False if there is nothing new."""
        self._pool.wakeup.clear()
        news = False
        while not self._finished.empty():
            key, outcome = self._finished.get()
            self._compiling.discard(key)
            self._kept[key] = outcome
            self._kept_bytes += _size(outcome)
            news = True
        return news

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
        self._pool.close()

    def _start(self, key: bytes, grammar: Grammar) -> None:
        if key in self._compiling:
            return
        if not self._link.end_ids:
            raise GrammarRefused("the model has no end-of-sequence token that could end a grammar's text")
        if len(self._compiling) >= MAX_COMPILING:
            raise GrammarRefused(f"{len(self._compiling)} grammars wait to be compiled", status=503)
        self._compiling.add(key)
        self._pool.submit(self._compile, key, grammar)

    # ---- in a thread of the pool ----------------------------------------------------------------------

    def _compile(self, key: bytes, grammar: Grammar) -> None:
        try:
            outcome: _Ready | GrammarRefused = self._compiled(grammar)
        except GrammarRefused as refusal:
            outcome = refusal
        except (ImportError, OSError) as error:
            outcome = GrammarRefused(f"grammars can't be compiled: {error}", status=503)
        self._finished.put((key, outcome))

    def _compiled(self, grammar: Grammar) -> _Ready:
        # Its process loads the library while this one does.
        self._link.start()
        import xgrammar

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.from_dir(self._link.model_dir, self._link.vocab_size)
            text = text_of(self._vocabulary, grammar)
        serialised = self._link.compile(grammar, text, timeout=self._timeout)
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


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(grammar.kind.encode() + b"\0" + grammar.text.encode(), digest_size=32).digest()


def _size(outcome: _Ready | GrammarRefused) -> int:
    return outcome.num_bytes if isinstance(outcome, _Ready) else 0


def _is_passing(outcome: _Ready | GrammarRefused) -> bool:
    return isinstance(outcome, GrammarRefused) and outcome.status != 400
