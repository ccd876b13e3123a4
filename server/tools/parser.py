"""What the formats have in common: text in, content and calls out.

A format is written as a generator that asks for one character after the other. It doesn't know how the text
was cut into pieces, so a streamed answer and a whole one can't differ. Text that turns out to be no call is
content after all; arguments that have begun can't be taken back, and are passed on as the model wrote them.
"""

from __future__ import annotations

import abc
import json
import re
import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import ClassVar, TypeVar

from diptych.server.message import Arguments, CallStart, Content, Piece, merged
from diptych.server.tools.json_scanner import JsonScanner, Malformed

T = TypeVar("T")
Steps = Generator[None, str, T]
"""Is sent characters; returns a `T`."""

SPACE = " \t\n\r"
ARGUMENTS = ("arguments", "parameters")
"""Names that models use for the arguments in a call's JSON."""
_LONGEST_WORD = 64
"""Characters of a number or literal."""


class ToolParser(abc.ABC):
    """Reads one sample's text: `feed` what comes, then `finish`."""

    openers: ClassVar[re.Pattern[str]]
    """Characters with which a call may begin."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that may be special tokens, which the parser must see although they are hidden otherwise."""
    closing: ClassVar[str | None] = None
    """What ends a call whose arguments are broken. None: only the end of the text does."""

    def __init__(self, tools: Collection[str], *, parallel: bool = True) -> None:
        """`tools`: the names that may be called; text that would call another is content. Without
        `parallel`, calls after the first are dropped."""
        self.calls = 0
        self.cut_off = False
        """Whether the text ended within a call's arguments."""
        self._tools = tools
        self._parallel = parallel
        self._pieces: list[Piece] = []
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

    def _value(self, first: str) -> Steps[str]:
        """A JSON value as text, strings valid even if the model's weren't quite."""
        if first in '"{[':
            scanner = JsonScanner()
            text = scanner.push(first)
            while not scanner.done:
                text += scanner.push((yield from self._next()))
            return text
        text, char = "", first
        while char not in SPACE + ",}]":
            text += char
            if len(text) > _LONGEST_WORD:
                raise Malformed
            char = yield from self._next()
        self._unread(1)
        loads(text)
        return text

    def _json_call(self) -> Steps[None]:
        """From behind `{` to the end of `{"name": …, "arguments": {…}}`."""
        name: str | None = None
        given = "null"
        char = yield from self._visible()
        while char != "}":
            if char != '"':
                raise Malformed
            key = loads((yield from self._value(char)))
            if (yield from self._visible()) != ":":
                raise Malformed
            char = yield from self._visible()
            if key in ARGUMENTS and name is not None and char == "{":
                yield from self._stream(name)
                yield from self._rest_of_object()
                return
            value = yield from self._value(char)
            if key == "name":
                name = self._known(loads(value))
            elif key in ARGUMENTS:
                given = value
            char = yield from self._visible()
            if char == ",":
                char = yield from self._visible()
                if char == "}":
                    raise Malformed
            elif char != "}":
                raise Malformed
        if name is None:
            raise Malformed
        self._call(name, _object_text(given))

    def _json_calls(self, first: str) -> Steps[None]:
        """Such an object, or a list of them. Raises `Malformed` unless `first` begins one."""
        if first == "{":
            yield from self._json_call()
            return
        separator = "," if first == "[" else ""
        while separator == ",":
            if (yield from self._visible()) != "{":
                raise Malformed
            yield from self._json_call()
            separator = yield from self._visible()
        if separator != "]":
            raise Malformed
        self._accept()

    def _stream(self, name: str) -> Steps[None]:
        """Arguments from behind their `{`, passed on as they come once they look like JSON."""
        scanner = JsonScanner()
        text = scanner.push("{")
        char = " "
        while char in SPACE:
            char = yield from self._next()
            text += scanner.push(char)
        self._start(name)
        self._arguments(text)
        self._streaming = True
        while not scanner.done:
            char = yield from self._next()
            try:
                text = scanner.push(char)
            except Malformed:
                self._unread(1)
                yield from self._broken()
                return
            self._arguments(text)
            self._accept()
        self._end()

    def _broken(self) -> Steps[None]:
        """The rest of arguments that aren't JSON, up to what ends a call."""
        while True:
            char = yield from self._next()
            if self.closing is not None and char == self.closing[0]:
                try:
                    yield from self._literal((self.closing,), char)
                except Malformed:
                    self._unread(1)
                else:
                    self._unread(len(self.closing))
                    self._end()
                    return
            self._arguments("".join(self._held))
            self._accept()

    def _rest_of_object(self) -> Steps[None]:
        """What follows a call's arguments in its object: fields that mean nothing here, or a missing `}`."""
        scanner = JsonScanner()
        for char in '{"":""':
            scanner.push(char)
        try:
            while not scanner.done:
                scanner.push((yield from self._next()))
        except Malformed:
            self._unread(1)
        else:
            self._accept()

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
            self._pieces.append(Arguments(self.calls - 1, text))

    def _end(self) -> None:
        self._streaming = self._muted = False

    def _content(self, text: str) -> None:
        shown = text.rstrip(SPACE)
        if not shown:
            self._space += text
            return
        self._space, shown = text[len(shown) :], self._space + shown
        self._pieces.append(Content(shown.lstrip(SPACE) if self._blank and self.calls else shown))
        self._blank = False


def loads(text: str) -> object:
    """JSON to a value. Raises `Malformed`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Malformed from None


def dumps(value: object) -> str:
    """A value as JSON text. Half a surrogate pair, which escapes can make, has no UTF-8 but an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _object_text(given: str) -> str:
    """The arguments, which some models write as a string that holds them, or leave out."""
    value = loads(given)
    if value is None:
        return "{}"
    if isinstance(value, str):
        value = loads(value)
        given = dumps(value)
    if not isinstance(value, dict):
        raise Malformed
    return given


def call_tags(
    tools: Sequence[Mapping[str, object]], before: str, middle: str, end: str
) -> list[dict[str, object]]:
    """One structural tag per function: `before`, its name, `middle`, its arguments as JSON, `end`."""
    return [
        {
            "type": "tag",
            "begin": f"{before}{tool['name']}{middle}",
            "content": {"type": "json_schema", "json_schema": tool["parameters"]},
            "end": end,
        }
        for tool in tools
    ]


def one_or_more(tags: list[dict[str, object]], separator: str, *, parallel: bool) -> dict[str, object]:
    """The structural-tag format of such calls behind each other; only one without `parallel`."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
