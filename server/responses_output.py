"""The output items of one response, as they grow: what the model thought, if anything, then its message."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from diptych.server.message import Content, Piece, Reasoning

Fields = dict[str, object]


@dataclass(slots=True)
class _Item:
    thinking: bool
    index: int
    id: str
    text: str = ""
    logprobs: tuple[object, ...] = ()

    @property
    def kind(self) -> str:
        """Of its one part."""
        return "reasoning_text" if self.thinking else "output_text"

    @property
    def part(self) -> Fields:
        part: Fields = {"type": self.kind, "text": self.text}
        return part if self.thinking else {**part, "annotations": [], "logprobs": self.logprobs}

    def item(self, status: str, content: list[Fields]) -> Fields:
        item: Fields = {"id": self.id, "status": status, "content": content}
        if self.thinking:
            return {**item, "type": "reasoning", "summary": []}
        return {**item, "type": "message", "role": "assistant"}

    def event(self, kind: str, **fields: object) -> Fields:
        return {"type": kind, "item_id": self.id, "output_index": self.index, "content_index": 0, **fields}


class ResponseOutput:
    """Feed pieces; get back the events that tell of them. At the end there is a message, if an empty one."""

    def __init__(self, new_logprobs: Callable[[], tuple[object, ...]]) -> None:
        """`new_logprobs` gives those of the message's tokens that it hasn't given yet."""
        self._new_logprobs = new_logprobs
        self._open: _Item | None = None
        self.items: list[Fields] = []
        """Those that have ended."""

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Fields]:
        for piece in pieces:
            match piece:
                case Content(text):
                    yield from self._grow(text, thinking=False)
                case Reasoning(text):
                    yield from self._grow(text, thinking=True)
        if self._open is not None and not self._open.thinking:
            yield from self._delta(self._open, "")

    def end(self, status: str) -> Iterator[Fields]:
        """`status` is the last item's: `completed` or `incomplete`."""
        if self._open is None or self._open.thinking:
            yield from self._begin(thinking=False)
        assert self._open is not None
        yield from self._delta(self._open, "")
        yield from self._end(status)

    def _grow(self, text: str, *, thinking: bool) -> Iterator[Fields]:
        if self._open is None or self._open.thinking is not thinking:
            yield from self._begin(thinking=thinking)
        assert self._open is not None
        yield from self._delta(self._open, text)

    def _begin(self, *, thinking: bool) -> Iterator[Fields]:
        if self._open is not None:
            yield from self._end("completed")
        item = _Item(thinking, len(self.items), f"{'rs' if thinking else 'msg'}_{secrets.token_hex(24)}")
        self._open = item
        added = item.item("in_progress", [])
        yield {"type": "output_item.added", "output_index": item.index, "item": added}
        yield item.event("content_part.added", part=item.part)

    def _delta(self, item: _Item, text: str) -> Iterator[Fields]:
        logprobs = () if item.thinking else self._new_logprobs()
        if text or logprobs:
            item.text += text
            item.logprobs += logprobs
            fields: Fields = {"delta": text} if item.thinking else {"delta": text, "logprobs": logprobs}
            yield item.event(f"{item.kind}.delta", **fields)

    def _end(self, status: str) -> Iterator[Fields]:
        item = self._open
        assert item is not None
        fields: Fields = {"text": item.text}
        yield item.event(
            f"{item.kind}.done", **(fields if item.thinking else {**fields, "logprobs": item.logprobs})
        )
        yield item.event("content_part.done", part=item.part)
        ended = item.item(status, [item.part])
        self.items.append(ended)
        yield {"type": "output_item.done", "output_index": item.index, "item": ended}
