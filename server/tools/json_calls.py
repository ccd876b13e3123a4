"""Calls written as JSON, as several formats have them: an object with a name and arguments, or only these."""

from __future__ import annotations

import json
from typing import ClassVar

from diptych.server.tools.json_scanner import JsonScanner, Malformed
from diptych.server.tools.parser import SPACE, Steps, ToolParser

ARGUMENTS = ("arguments", "parameters")
"""Names that models use for the arguments."""
_LONGEST_WORD = 64
"""Characters of a number or literal."""


class JsonCallParser(ToolParser):
    """Arguments are passed on while they come, once they look like JSON."""

    closing: ClassVar[str | None] = None
    """What ends a call whose arguments are broken. None: only the end of the text does."""

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
            # As `_next` does it, in half the time: this is where most characters are read.
            char = self._again.pop() if self._again else (yield)
            try:
                self._arguments(scanner.push(char))
            except Malformed:
                self._again.append(char)
                yield from self._broken()
                return
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
