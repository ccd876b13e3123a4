"""Requests that wait for their grammar to be compiled, and hold nothing meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from diptych.engine.grammar.errors import GrammarRefused
from diptych.engine.grammar.grammars import Grammars, grammar_key
from diptych.engine.grammar.matcher import Matcher
from diptych.engine.wire import Generate


class _Held(NamedTuple):
    message: Generate
    key: bytes
    """Of its grammar."""


class WaitingForGrammar:
    def __init__(self, grammars: Grammars | None) -> None:
        """None refuses every grammar."""
        self._grammars = grammars
        self._held: dict[str, _Held] = {}
        """By request id, in order of arrival."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def pollables(self) -> list[int]:
        """Readable when `finished` has something."""
        return [self._grammars.fileno()] if self._grammars is not None and self._held else []

    def matcher(self, message: Generate) -> Matcher | None:
        """Of a request with a grammar; None, and it waits here, while that is being compiled. Raises
        `GrammarRefused`."""
        matcher = self._matcher(message)
        if matcher is None:
            assert message.sampling.grammar is not None
            self._held[message.rid] = _Held(message, grammar_key(message.sampling.grammar))
        return matcher

    def finished(self) -> Iterator[tuple[Generate, Matcher | GrammarRefused]]:
        """Requests that wait no longer, in order of arrival."""
        if self._grammars is None or not self._held:
            return
        finished = self._grammars.collect()
        for message, key in list(self._held.values()):
            if key not in finished:
                continue
            try:
                outcome: Matcher | GrammarRefused | None = self._matcher(message)
            except GrammarRefused as refusal:
                outcome = refusal
            assert outcome is not None
            del self._held[message.rid]
            yield message, outcome
        if finished:
            self._grammars.trim()

    def remove(self, rid: str) -> bool:
        """True if it waited here. A grammar that nobody waits for any more is given up."""
        held = self._held.pop(rid, None)
        if held is None:
            return False
        if self._grammars is not None and all(other.key != held.key for other in self._held.values()):
            self._grammars.give_up(held.key)
        return True

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _matcher(self, message: Generate) -> Matcher | None:
        grammar = message.sampling.grammar
        assert grammar is not None
        name = grammar.param or "the grammar"
        if self._grammars is None:
            problem = f"{name} can't be followed: this worker has no grammar backend (--grammar-backend)"
            raise GrammarRefused(problem, param=grammar.param)
        try:
            return self._grammars.matcher(message.sampling)
        except GrammarRefused as refusal:
            problem = f"{name} can't be used: {refusal.message}"
            raise GrammarRefused(problem, status=refusal.status, param=grammar.param) from refusal
