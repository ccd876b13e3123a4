"""What a model thinks before it answers, between two tags, told apart from the answer.

The routes use `ReasoningSplitter` through `MessageParser` (`server/message_parser.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from diptych.server.message import Content, Piece, Reasoning

_SPACE = " \t\n\r"


class Thinking(enum.Enum):
    """Where a prompt leaves the model."""

    BEGUN = "the answer begins with thinking"
    UNDERWAY = "the answer goes on with a thought that the prompt has begun"
    POSSIBLE = "the answer may begin with the first tag"
    OVER = "the prompt holds the last tag, or the answer's beginning"

    @property
    def inside(self) -> bool:
        """Whether the answer's first word is thinking."""
        return self in (Thinking.BEGUN, Thinking.UNDERWAY)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models thinks."""

    start: str
    end: str
    always: bool = False
    """The answer begins with thinking even if nothing says so, unless the prompt has ended it."""

    def at_the_end_of(self, prompt: str, continued: str = "") -> Thinking:
        """How the answer to this prompt text begins: templates may write the first tag themselves, or an
        empty thought for a model that shall not think. `continued` is the message that the answer goes on
        with, and that the prompt ends with."""
        shown = prompt.rstrip(_SPACE)
        opened, closed = continued.rfind(self.start), continued.rfind(self.end)
        if shown.endswith(self.end) or closed > opened:
            return Thinking.OVER
        if shown.endswith(self.start):
            return Thinking.BEGUN
        if opened >= 0:
            return Thinking.UNDERWAY
        if self.always:
            return Thinking.BEGUN
        return Thinking.OVER if continued.strip(_SPACE) else Thinking.POSSIBLE


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}


def detect_reasoning(template: str) -> str | None:
    """The name of the format that a chat template's source shows, or None."""
    if "<｜Assistant｜>" in template and "</think>" in template:
        return "deepseek_r1"
    found = (name for name, form in REASONING_FORMATS.items() if not form.always and form.end in template)
    return next(found, None)


class ReasoningSplitter:
    """Feed text; get back what is thinking and what is the answer. Whitespace around either is left out;
    a tag anywhere but at the beginning is part of the answer."""

    def __init__(self, form: ReasoningFormat, thinking: Thinking) -> None:
        """`thinking`: where the text begins."""
        self._form = form
        self._inside = thinking.inside
        self._beginning = thinking is not Thinking.UNDERWAY
        """Nothing but whitespace, and perhaps the first tag, so far in this part."""
        self._held = ""
        self._tag = form.start if self._beginning else form.end
        """What may come next: the first tag, then the last one, then nothing."""

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._tag == self._form.start:
            shown = self._held.lstrip(_SPACE)
            if self._tag.startswith(shown) and shown != self._tag:
                return []
            if shown.startswith(self._tag):
                self._inside = True
                self._held = shown[len(self._tag) :]
            self._tag = self._form.end if self._inside else ""
            self._beginning = self._inside
        if self._inside:
            thought, found, rest = self._held.partition(self._tag)
            if not found:
                cut = len(thought) - _partial(thought, self._tag)
                cut = len(thought[:cut].rstrip(_SPACE))
                thought, rest = thought[:cut], thought[cut:]
            self._held = rest
            if self._beginning:
                thought = thought.lstrip(_SPACE)
            if found:
                thought = thought.rstrip(_SPACE)
                self._inside, self._tag = False, ""
            if thought:
                pieces.append(Reasoning(thought))
            self._beginning = bool(found) or (self._beginning and not thought)
        if not self._inside:
            answer = self._held.lstrip(_SPACE) if self._beginning else self._held
            self._held = ""
            if answer:
                self._beginning = False
                pieces.append(Content(answer))
        return pieces

    def finish(self) -> list[Piece]:
        """The end of the text."""
        held, self._held = self._held, ""
        if not self._inside:
            return [Content(held)] if held else []
        held = held.lstrip(_SPACE) if self._beginning else held
        return [Reasoning(held)] if held else []


def _partial(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


class _Spells(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class ReasoningCounter:
    """Counts the tokens of a sample's thinking, both tags included, however its text is cut."""

    def __init__(self, form: ReasoningFormat, tokenizer: _Spells, *, inside: bool) -> None:
        self.count = 0
        self._start = form.start.encode()
        self._end = form.end.encode()
        self._tokenizer = tokenizer
        self._inside = inside
        self._over = False
        self._seen = 0
        self._tail = b""

    def push(self, token_id: int) -> None:
        if self._over:
            return
        self._seen += 1
        self._tail += self._tokenizer.token_bytes(token_id)
        if not self._inside:
            shown = self._tail.lstrip()
            if not shown.startswith(self._start):
                self._over = not self._start.startswith(shown)
                return
            self._inside = True
        self.count = self._seen
        self._over = self._end in self._tail
        self._tail = self._tail[-len(self._end) + 1 :]
