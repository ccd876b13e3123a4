"""Requests that wait for their grammar to be compiled, and hold nothing meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.grammar.errors import GrammarRefused
from diptych.engine.grammar.grammars import Grammars
from diptych.engine.grammar.matcher import Matcher
from diptych.engine.wire import Generate


class WaitingForGrammar:
    def __init__(self, grammars: Grammars | None) -> None:
        """None refuses every grammar."""
        self._grammars = grammars
        self._messages: dict[str, Generate] = {}
        """By request id, in order of arrival."""

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, rid: str) -> bool:
        return rid in self._messages

    def pollables(self) -> list[int]:
        """Readable when `finished` has something."""
        return [self._grammars.fileno()] if self._grammars is not None and self._messages else []

    def matcher(self, message: Generate) -> Matcher | None:
        """Of a request with a grammar; None, and it waits here, while that is being compiled. Raises
        `GrammarRefused`."""
        matcher = self._matcher(message)
        if matcher is None:
            self._messages[message.rid] = message
        return matcher

    def finished(self) -> Iterator[tuple[Generate, Matcher | GrammarRefused]]:
        """Requests that wait no longer, in order of arrival."""
        if self._grammars is None or not self._messages or not self._grammars.collect():
            return
        for message in list(self._messages.values()):
            try:
                outcome: Matcher | GrammarRefused | None = self._matcher(message)
            except GrammarRefused as refusal:
                outcome = refusal
            if outcome is not None:
                del self._messages[message.rid]
                yield message, outcome
        self._grammars.trim()

    def remove(self, rid: str) -> bool:
        """True if it waited here."""
        return self._messages.pop(rid, None) is not None

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
