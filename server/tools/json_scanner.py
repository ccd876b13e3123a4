"""Strict JSON (RFC 8259), one character at a time: whether a value is complete, as it arrives."""

from __future__ import annotations

import enum
import re
import string

MAX_DEPTH = 200
"""Nested deeper, it is no call's arguments; a reader's recursion limit is not far."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_SPACE = " \t\n\r"
_PLAIN = frozenset(string.ascii_letters + string.digits + " .,:;/()[]{}<>=+-*_#'")
"""Most of what strings hold: no more to check."""
_ESCAPED = '"\\/bfnrt'
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Malformed(Exception):
    """The text is not what its beginning promised; the character that was read last doesn't fit."""


class _Expect(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()
    """A value, or the end of an array."""
    KEY = enum.auto()
    FIRST_KEY = enum.auto()
    """A key, or the end of an object."""
    COLON = enum.auto()
    COMMA = enum.auto()
    """Or the end of what is open."""
    IN_KEY = enum.auto()
    IN_STRING = enum.auto()
    IN_WORD = enum.auto()
    """A number or a literal: what follows ends it."""


class JsonScanner:
    """Reads one value that is an object, an array or a string; after its last character `done` is true."""

    def __init__(self) -> None:
        self.done = False
        self._quoted = False
        self._expect = _Expect.VALUE
        self._closers: list[str] = []
        self._word = ""
        self._escape = 0
        """Characters of an escape sequence still to come; 5 after the backslash, as many as `u` needs."""

    def push(self, char: str) -> str:
        """The character as valid JSON has it: models write line breaks into strings, which become `\\n`.
        Raises `Malformed`."""
        if self._quoted:
            return char if char in _PLAIN and not self._escape else self._in_string(char)
        if self._expect is _Expect.IN_WORD:
            if char not in _SPACE + ",]}":
                self._word += char
                if len(self._word) > 64:
                    raise Malformed
                return char
            if self._word not in _WORDS and not _NUMBER.fullmatch(self._word):
                raise Malformed
            self._after_value()
        self._structure(char)
        return char

    def _in_string(self, char: str) -> str:
        if self._escape == 5:
            if char == "u":
                self._escape = 4
            elif char in _ESCAPED:
                self._escape = 0
            else:
                raise Malformed
        elif self._escape:
            if char not in "0123456789abcdefABCDEF":
                raise Malformed
            self._escape -= 1
        elif char == "\\":
            self._escape = 5
        elif char == '"':
            self._quoted = False
            if self._expect is _Expect.IN_KEY:
                self._expect = _Expect.COLON
            else:
                self._after_value()
        elif char < " ":
            return _CONTROL.get(char) or f"\\u{ord(char):04x}"
        return char

    def _structure(self, char: str) -> None:
        """A character outside strings and words."""
        expect = self._expect
        if char in _SPACE:
            return
        if expect in (_Expect.VALUE, _Expect.FIRST_ITEM):
            if expect is _Expect.FIRST_ITEM and char == "]":
                self._close(char)
            else:
                self._value(char)
        elif expect in (_Expect.KEY, _Expect.FIRST_KEY):
            if expect is _Expect.FIRST_KEY and char == "}":
                self._close(char)
            elif char == '"':
                self._expect, self._quoted = _Expect.IN_KEY, True
            else:
                raise Malformed
        elif expect is _Expect.COLON:
            if char != ":":
                raise Malformed
            self._expect = _Expect.VALUE
        elif char == ",":
            self._expect = _Expect.KEY if self._closers[-1] == "}" else _Expect.VALUE
        else:
            self._close(char)

    def _value(self, char: str) -> None:
        if char == '"':
            self._expect, self._quoted = _Expect.IN_STRING, True
        elif char in "{[":
            if len(self._closers) == MAX_DEPTH:
                raise Malformed
            self._closers.append("}" if char == "{" else "]")
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ITEM
        elif self._closers and (char in "-tfn" or char.isdecimal()):
            self._word, self._expect = char, _Expect.IN_WORD
        else:
            raise Malformed

    def _close(self, char: str) -> None:
        if not self._closers or self._closers[-1] != char:
            raise Malformed
        self._closers.pop()
        self._after_value()

    def _after_value(self) -> None:
        self._expect = _Expect.COMMA
        self.done = not self._closers
