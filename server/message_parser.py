"""From a sample's text to a message's pieces: thinking first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.server.message import Content, Piece, Reasoning, merged
from diptych.server.reasoning import ReasoningSplitter
from diptych.server.tools.parser import ToolParser


class MessageParser:
    """For one sample; either half may be missing. `feed` its text, then `finish`."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None = None,
        tools: ToolParser | None = None,
        *,
        stream_reasoning: bool = True,
    ) -> None:
        """Without `stream_reasoning` the thinking comes as one piece when it has ended."""
        self._reasoning = reasoning
        self._tools = tools
        self._whole_thoughts = not stream_reasoning
        self._thought = ""

    @property
    def called(self) -> bool:
        """Whether there were tool calls and, once the text has ended, none was cut off."""
        return self._tools is not None and self._tools.calls > 0 and not self._tools.cut_off

    def feed(self, text: str) -> list[Piece]:
        return merged(self._thoughts(self._parse(text)))

    def finish(self) -> list[Piece]:
        """The end of the text: what was held back comes out."""
        pieces: list[Piece] = []
        if self._reasoning:
            pieces += self._answers(self._reasoning.finish())
        if self._tools:
            pieces += self._tools.finish()
        pieces = list(self._thoughts(pieces))
        if self._thought:
            pieces.insert(0, Reasoning(self._thought))
            self._thought = ""
        return merged(pieces)

    def _parse(self, text: str) -> Iterable[Piece]:
        split = self._reasoning.feed(text) if self._reasoning else [Content(text)]
        return self._answers(split)

    def _answers(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """The answer's text is what may hold calls."""
        for piece in pieces:
            if self._tools and isinstance(piece, Content):
                yield from self._tools.feed(piece.text)
            else:
                yield piece

    def _thoughts(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        for piece in pieces:
            if self._whole_thoughts and isinstance(piece, Reasoning):
                self._thought += piece.text
                continue
            if self._thought:
                yield Reasoning(self._thought)
                self._thought = ""
            yield piece
