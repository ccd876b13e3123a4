"""What the formats have in common: text in, content and calls out.

A format is written as a generator that asks for one character after the other. It doesn't know how the text
was cut into pieces, so a streamed answer and a whole one can't differ. Text that turns out to be no call is
content after all; arguments that have begun can't be taken back, and are passed on as the model wrote them.
"""

from __future__ import annotations

import abc
import re
import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import ClassVar, TypeVar

from diptych.server.message import Arguments, CallStart, Content, Piece, merged
from diptych.server.tools.json_scanner import Malformed

T = TypeVar("T")
Steps = Generator[None, str, T]
"""Is sent characters; returns a `T`."""

SPACE = " \t\n\r"


class ToolParser(abc.ABC):
    """Reads one sample's text: `feed` what comes, then `finish`."""

    openers: ClassVar[re.Pattern[str]]
    """Characters with which a call may begin."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that may be special tokens, which the parser must see although they are hidden otherwise."""

    def __init__(self, tools: Collection[str], *, parallel: bool = True) -> None:
        """`tools`: the names that may be called; text that would call another is content. Without
        `parallel`, calls after the first are dropped."""
        self.calls = 0
        self.cut_off = False
        """Whether the text ended within a call's arguments."""
        self._tools = tools
        self._parallel = parallel
        self._pieces: list[Piece] = []
        self._argument_text: list[str] = []
        """Of the last call, not yet among the pieces."""
        self._held: list[str] = []
        """What was read since the last piece: a call's syntax, or content if it goes wrong."""
        self._again: list[str] = []
        """Characters to read again, the next one last."""
        self._blank = True
        """No content but whitespace so far."""
        self._space = ""
        """The content's trailing whitespace: left out if it turns out to stand next to a call."""
        self._streaming = False
        self._muted = False
        self._at_content = False
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        position = 0
        while position < len(text):
            if self._at_content:
                found = self.openers.search(text, position)
                end = found.start() if found else len(text)
                self._content(text[position:end])
                position = end
                if not found:
                    break
            self._steps.send(text[position])
            position += 1
        return self._take()

    def finish(self) -> list[Piece]:
        """The end of the text: what was begun and isn't a call is content."""
        rest = "".join(self._held)
        self._held.clear()
        self.cut_off = self._streaming
        if self._streaming:
            self._arguments(rest)
        else:
            self._content(rest)
        if not self.calls:
            self._pieces.append(Content(self._space))
        self._space = ""
        return self._take()

    def _take(self) -> list[Piece]:
        self._close_arguments()
        pieces = merged(self._pieces)
        self._pieces.clear()
        return [piece for piece in pieces if isinstance(piece, CallStart) or piece.text]

    # ---- a format ---------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        """In xgrammar's structural-tag format: a text that is one call or, with `parallel`, one or more, of
        these functions. Each has its `name` and the JSON schema of its `parameters`."""

    @classmethod
    @abc.abstractmethod
    def free_structure(cls, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> dict[str, object]:
        """The same for a text that may also be, or begin with, something else."""

    @abc.abstractmethod
    def _section(self, first: str) -> Steps[None]:
        """From a character that may open a call to the end of the call or calls. Raises `Malformed` when
        the character read last doesn't fit."""

    def _may_open(self, char: str) -> bool:
        return self.openers.match(char) is not None

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    # ---- reading ----------------------------------------------------------------------------------

    def _run(self) -> Steps[None]:
        while True:
            self._at_content = True
            char = yield from self._next()
            self._at_content = False
            if self._may_open(char):
                try:
                    yield from self._section(char)
                except Malformed:
                    # The character that doesn't fit may open something itself.
                    if len(self._held) > 1:
                        self._unread(1)
            self._content("".join(self._held))
            self._accept()

    def _next(self) -> Steps[str]:
        if self._again:
            char = self._again.pop()
        else:
            char = yield
        self._held.append(char)
        return char

    def _unread(self, count: int) -> None:
        for _ in range(count):
            self._again.append(self._held.pop())

    def _accept(self) -> None:
        """What was read belongs to a call."""
        self._held.clear()

    def _visible(self) -> Steps[str]:
        """The next character that isn't whitespace."""
        char = yield from self._next()
        while char in SPACE:
            char = yield from self._next()
        return char

    def _literal(self, options: Sequence[str], first: str) -> Steps[str]:
        """Which of `options` it is that begins with `first`; none may begin another."""
        text = first
        while text not in options:
            if not any(option.startswith(text) for option in options):
                raise Malformed
            text += yield from self._next()
        return text

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._tools:
            raise Malformed
        return name

    # ---- pieces -----------------------------------------------------------------------------------

    def _call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self._start(name)
        self._arguments(arguments)
        self._end()

    def _start(self, name: str) -> None:
        self._accept()
        self._muted = self.calls > 0 and not self._parallel
        if not self._muted:
            self._pieces.append(CallStart(self.calls, self._new_id(), name))
            self.calls += 1

    def _arguments(self, text: str) -> None:
        if not self._muted:
            self._argument_text.append(text)

    def _end(self) -> None:
        self._close_arguments()
        self._streaming = self._muted = False

    def _close_arguments(self) -> None:
        if self._argument_text:
            self._pieces.append(Arguments(self.calls - 1, "".join(self._argument_text)))
            self._argument_text.clear()

    def _content(self, text: str) -> None:
        shown = text.rstrip(SPACE)
        if not shown:
            self._space += text
            return
        self._space, shown = text[len(shown) :], self._space + shown
        self._pieces.append(Content(shown.lstrip(SPACE) if self._blank and self.calls else shown))
        self._blank = False
