"""How the text of one chat request's samples is read: thinking, content and tool calls told apart."""

from __future__ import annotations

import dataclasses

from diptych.engine.wire import Grammar
from diptych.server.chat_tools import ToolUse
from diptych.server.frontend import Frontend
from diptych.server.message_parser import MessageParser
from diptych.server.reasoning import ReasoningSplitter, Thinking
from diptych.server.requests import ReasoningFields
from diptych.server.sampling_options import TextOptions
from diptych.server.structural_tags import after_thinking


class Reading:
    """Of one request, whose prompt text is known."""

    def __init__(
        self,
        frontend: Frontend,
        asked: ReasoningFields,
        prompt: str,
        tools: ToolUse | None,
        grammar: Grammar | None,
        continued: str = "",
    ) -> None:
        """`grammar`: what the request says that the answer must match. `continued`: the message that the
        answer goes on with."""
        self._asked = asked
        self._tools = tools
        self._answer_grammar = grammar
        self._reasoning = frontend.reasoning_format
        self._thinking = Thinking.OVER
        if self._reasoning is not None:
            self._thinking = self._reasoning.at_the_end_of(prompt, continued)
        self.shows_reasoning = asked.include_reasoning is not False

    @property
    def may_call(self) -> bool:
        """Whether a sample may be a tool call."""
        return self._tools is not None

    def parser(self) -> MessageParser | None:
        """A new one for a sample; None where the text is the content, whatever it is."""
        splits = self._reasoning is not None and self._asked.separate_reasoning is not False
        if not splits and self._tools is None:
            return None
        splitter = None
        if self._reasoning is not None and splits:
            splitter = ReasoningSplitter(self._reasoning, self._thinking)
        return MessageParser(
            splitter,
            self._tools.new_parser() if self._tools else None,
            stream_reasoning=self._asked.stream_reasoning is not False,
        )

    def finish_reason(self, kind: str, parser: MessageParser | None) -> str:
        """OpenAI's: a sample that ended by itself says whether it called a tool, unless the client had chosen
        which."""
        called = parser is not None and parser.called
        named = self._tools is not None and self._tools.named
        return "tool_calls" if kind == "stop" and called and not named else kind

    def grammar(self) -> Grammar | None:
        """What the text must match, if anything. Raises `BadRequest`."""
        grammar = self._answer_grammar
        if self._tools is not None:
            grammar = self._tools.grammar(grammar)
        if grammar is None or self._reasoning is None:
            return grammar
        return after_thinking(grammar, self._reasoning, self._thinking)

    def text_options(self, asked: TextOptions) -> TextOptions:
        """With what the parser needs to see."""
        shown: set[str] = set()
        if self._tools is not None:
            shown.update(self._tools.parser.markers)
        if self._reasoning is not None:
            shown |= {self._reasoning.start, self._reasoning.end}
        return dataclasses.replace(
            asked,
            shown_special=frozenset(shown),
            reasoning=self._reasoning,
            inside_reasoning=self._thinking.inside,
        )
