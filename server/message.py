"""What a message is made of: pieces in the order in which they become known, and the message they add up to.

Streamed answers send the pieces, whole answers assemble them: both come from the same parser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    """Position among the message's calls."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON text when complete."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case Arguments(index, text):
                    self.calls[index].arguments += text


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind put together."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match last, piece:
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Arguments(index, before), Arguments(other, text) if index == other:
                result[-1] = Arguments(index, before + text)
            case _:
                result.append(piece)
    return result
