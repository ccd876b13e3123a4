"""Texts in pieces, for the parsers' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hypothesis import strategies as st

from diptych.server.message import Message, Piece


class Parser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def read(parser: Parser, parts: Iterable[str]) -> Message:
    """What the text in these parts adds up to. Ids, which are drawn, are taken off."""
    message = Message()
    for part in parts:
        message.add(parser.feed(part))
    message.add(parser.finish())
    for call in message.calls:
        assert call.id
        call.id = ""
    return message


def made(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places, each taken modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


places = st.lists(st.integers(0, 10_000), max_size=12)


def assert_cuts_do_not_matter(make: Callable[[], Parser], text: str, where: Sequence[int]) -> Message:
    whole = read(make(), [text])
    assert read(make(), cut(text, where)) == whole
    assert read(make(), list(text)) == whole
    return whole
