"""Thinking told apart from the answer, and counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.server.reading import assert_cuts_do_not_matter, made, places, read

from diptych.engine.wire import Grammar
from diptych.server.message import CallStart, Content, Reasoning
from diptych.server.message_parser import MessageParser
from diptych.server.reasoning import (
    REASONING_FORMATS,
    ReasoningCounter,
    ReasoningSplitter,
    Thinking,
)
from diptych.server.structural_tags import after_thinking
from diptych.server.tokenizer import Tokenizer
from diptych.server.tools.hermes import HermesParser

QWEN = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek_r1"]


def splitter(inside: bool = False, name: str = "qwen3") -> ReasoningSplitter:
    return ReasoningSplitter(REASONING_FORMATS[name], Thinking.BEGUN if inside else Thinking.POSSIBLE)


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm, 1 < 2.\n</think>\n\nYes. ", "Hm, 1 < 2.", "Yes. "),
        (False, "\n<think>Hm</think>Yes, <think>no</think>", "Hm", "Yes, <think>no</think>"),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, "<think>cut off ", "cut off ", ""),
        (False, "Yes, <think>", "", "Yes, <think>"),
        (False, " <thin", "", " <thin"),
        (True, "Hm\n</think>\n\nYes", "Hm", "Yes"),
        (True, "<think>\nHm</think>Yes", "Hm", "Yes"),
        (True, "Hm </th", "Hm </th", ""),
        (True, "a\n\nb </think>", "a\n\nb", ""),
    ],
)
def test_thinking_is_told_from_the_answer(inside: bool, text: str, reasoning: str, content: str) -> None:
    message = read(splitter(inside), [text])
    assert (message.reasoning, message.content) == (reasoning, content)
    assert read(splitter(inside), list(text)) == message


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_each_family_has_its_tags(name: str) -> None:
    form = REASONING_FORMATS[name]
    message = read(splitter(name=name), [f"{form.start}a{form.end}b"])
    assert (message.reasoning, message.content) == ("a", "b")


@pytest.mark.parametrize(
    ("form", "prompt", "thinking"),
    [
        (R1, "<｜User｜>Hi<｜Assistant｜><think>\n", Thinking.BEGUN),
        (R1, "<｜User｜>Hi<｜Assistant｜>", Thinking.BEGUN),
        (R1, "<｜User｜>Hi<｜Assistant｜></think>", Thinking.OVER),
        (QWEN, "<|im_start|>assistant\n", Thinking.POSSIBLE),
        (QWEN, "<|im_start|>assistant\n<think>\n", Thinking.BEGUN),
        (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.OVER),
    ],
)
def test_the_prompts_end_says_how_the_answer_begins(form, prompt: str, thinking: Thinking) -> None:
    assert form.at_the_end_of(prompt) is thinking


@pytest.mark.parametrize(
    ("form", "continued", "thinking"),
    [
        (QWEN, "<think>\nIt is", Thinking.UNDERWAY),
        (QWEN, "Well. <think>\nIt is", Thinking.UNDERWAY),
        (QWEN, "<think>a</think><think>b", Thinking.UNDERWAY),
        (QWEN, "<think>\n", Thinking.BEGUN),
        (QWEN, "<think>\nIt is\n</think>\n\nThree, I", Thinking.OVER),
        (QWEN, "Three, I", Thinking.OVER),
        (R1, "<think>\nIt is", Thinking.UNDERWAY),
        (R1, "It is", Thinking.BEGUN),
        (R1, "It is</think>Three", Thinking.OVER),
    ],
)
def test_a_message_that_is_continued_says_where_the_answer_goes_on(form, continued, thinking) -> None:
    asked = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert form.at_the_end_of(asked + continued, continued) is thinking
    assert form.at_the_end_of(asked.replace("assistant", "user")) is not Thinking.UNDERWAY


def test_a_thought_that_goes_on_keeps_its_first_space() -> None:
    for cuts in ([" three, <think>\n</think>\n\nYes"], list(" three, <think>\n</think>\n\nYes")):
        message = read(ReasoningSplitter(QWEN, Thinking.UNDERWAY), cuts)
        assert (message.reasoning, message.content) == (" three, <think>", "Yes")


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
FRAGMENTS = ["<think>", "</think>", "<th", "ink>", "</", "a", " ", "\n", "<tool_call>", "世", CALL]


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), inside=st.booleans(), where=places)
@settings(max_examples=200, deadline=None)
def test_it_does_not_matter_how_the_text_is_cut(fragments: list[str], inside: bool, where: list[int]) -> None:
    text = "".join(fragments)
    assert_cuts_do_not_matter(lambda: splitter(inside), text, where)
    for whole in (True, False):
        assert_cuts_do_not_matter(
            lambda whole=whole: MessageParser(
                splitter(inside), HermesParser({"f"}), stream_reasoning=not whole
            ),
            text,
            where,
        )


def test_thinking_then_content_then_a_call() -> None:
    parser = MessageParser(splitter(), HermesParser({"f"}))
    message = read(parser, ["<think>\nShould I <tool_call>?\n</think>\n\nYes.\n", CALL])
    assert (message.reasoning, message.content) == ("Should I <tool_call>?", "Yes.")
    assert made(message) == [("f", '{"a": "</think>"}')]
    assert parser.called


def test_thinking_can_come_as_a_whole() -> None:
    parser = MessageParser(splitter(), HermesParser({"f"}), stream_reasoning=False)
    assert parser.feed("<think>one ") == []
    assert parser.feed("two</think>three") == [Reasoning("one two"), Content("three")]
    parser = MessageParser(splitter(inside=True), stream_reasoning=False)
    assert parser.feed("cut off") == []
    assert parser.finish() == [Reasoning("cut off")]


def test_thinking_streams() -> None:
    parser = MessageParser(splitter(), HermesParser({"f"}))
    assert parser.feed("<think>\none") == [Reasoning("one")]
    assert parser.feed(" two\n</thi") == [Reasoning(" two")]
    pieces = parser.feed("nk>\n\n" + CALL)
    assert isinstance(pieces[0], CallStart)


@pytest.mark.parametrize(
    ("inside", "text", "thinking"),
    [
        (False, "<think>\nSome words.\n</think>", True),
        (False, "\n<think>\nSome words", True),
        (True, "Some words.\n</think>", True),
        (False, "Some words. <think>more</think>", False),
    ],
)
def test_the_tokens_of_thinking_are_counted(
    tokenizer: Tokenizer, inside: bool, text: str, thinking: bool
) -> None:
    """Both tags included; what follows isn't."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    counter = ReasoningCounter(QWEN, tokenizer, inside=inside)
    ends = text.endswith("</think>")
    for token_id in [*ids, *(tokenizer.encode(" An answer", add_special_tokens=False) if ends else [])]:
        counter.push(token_id)
    assert counter.count == (len(ids) if thinking else 0)


OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (Grammar("json_schema", OBJECT), '{"a": 1}'),
        (Grammar("json_object"), '{"b": [1]}'),
        (Grammar("regex", "ab+"), "abb"),
        (Grammar("ebnf", 'root ::= "x" | "y"'), "y"),
        (Grammar("lark", 'start: "x" | "y"'), "y"),
        (Grammar("structural_tag", '{"format": {"type": "const_string", "value": "hey"}}'), "hey"),
    ],
)
def test_a_grammar_holds_the_answer_and_not_the_thinking(grammar: Grammar, answer: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    def accepted(thinking: Thinking, text: str) -> bool:
        form = after_thinking(grammar, QWEN, thinking)
        return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(form.text), text)

    assert after_thinking(grammar, QWEN, Thinking.OVER) is grammar
    assert accepted(Thinking.UNDERWAY, f"hm</think>{answer}")
    assert not accepted(Thinking.UNDERWAY, answer)
    assert accepted(Thinking.BEGUN, f"hm < hm\n</think>\n\n{answer}")
    assert not accepted(Thinking.BEGUN, answer)
    assert not accepted(Thinking.BEGUN, "hm</think>or so")
    assert accepted(Thinking.POSSIBLE, answer)
    assert accepted(Thinking.POSSIBLE, f"<think>hm</think>{answer}")
    assert not accepted(Thinking.POSSIBLE, "or so")
