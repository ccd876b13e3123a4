"""What may come next, and what ends a sample."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.byte_tokenizer import CONTROL, END
from unit.engine_grammar.following import accept, next_tokens

from diptych.engine.grammar import Matcher, matcher

Follow = Callable[..., Matcher]


def ids(text: str) -> set[int]:
    return set(text.encode())


@pytest.mark.parametrize(
    ("kind", "text", "whole"),
    [
        ("regex", "a+[0-9]{2}", "aaa42"),
        ("ebnf", 'root ::= "x" | "y" root', "yyx"),
        ("lark", 'start: "x" | "y" start', "yyx"),
        ("json_object", "", '{"a": [1, null, {"b": "ü"}]}'),
        (
            "json_schema",
            '{"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":2}',
            "[1,\n  22]",
        ),
        (
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<t>",
                        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                        "end": "</t>",
                    },
                }
            ),
            "<t>7</t>",
        ),
    ],
)
def test_every_kind_is_followed_to_its_end(follow: Follow, kind: str, text: str, whole: str) -> None:
    following = accept(follow(kind, text), whole)
    assert END in next_tokens(following)
    assert not following.ended
    following.accept(END)
    assert following.ended
    assert following.failure is None


def test_only_tokens_that_keep_the_text_a_beginning_are_allowed(follow: Follow) -> None:
    following = follow("regex", "(ab|cd)e?")
    assert next_tokens(following) == ids("ac")
    accept(following, "a")
    assert next_tokens(following) == ids("b")
    accept(following, "b")
    assert next_tokens(following) == ids("e") | {END}
    accept(following, "e")
    assert next_tokens(following) == {END}


def test_while_a_sample_must_go_on_its_end_is_allowed_only_where_nothing_else_is(follow: Follow) -> None:
    following = accept(follow("regex", "ab?"), "a")
    assert next_tokens(following) == ids("b") | {END}
    assert next_tokens(following, go_on=True) == ids("b")
    accept(following, "b")
    assert next_tokens(following, go_on=True) == {END}


def test_stop_tokens_that_are_text_stay_text(follow: Follow) -> None:
    following = follow("regex", "(ab)+", stop_token_ids=(ord("b"),))
    accept(following, "ab")
    assert not following.ended
    assert next_tokens(following) == ids("a") | {END}
    accept(following, "a")
    assert next_tokens(following, go_on=True) == ids("b"), "nothing else is allowed here"


def test_a_control_token_that_the_client_stops_at_ends_the_text(follow: Follow) -> None:
    following = accept(follow("regex", "a", stop_token_ids=(CONTROL,)), "a")
    assert next_tokens(following) == {END, CONTROL}
    following.accept(CONTROL)
    assert following.ended


def test_control_tokens_are_text_only_where_the_grammar_spells_them(follow: Follow) -> None:
    assert CONTROL not in next_tokens(follow("regex", "[^a]*"))
    assert CONTROL in next_tokens(follow("ebnf", 'root ::= "<|control|>" | "x"'))


def test_strings_of_limited_length_hold_no_control_characters(follow: Follow) -> None:
    following = accept(follow("json_schema", '{"type":"string","minLength":1,"maxLength":4}'), '"')
    assert not next_tokens(following) & set(range(0x20))


def test_ids_beyond_the_tokenizer_are_never_allowed(follow: Follow) -> None:
    assert max(next_tokens(follow("ebnf", "root ::= [^a]*"))) <= END


def test_a_token_that_does_not_fit_fails_the_sample_and_moves_nothing(follow: Follow) -> None:
    following = follow("regex", "ab")
    assert not following.allows(ord("b"))
    assert following.failure is None
    following.accept(ord("b"))
    assert following.failure == "token 98 doesn't fit the grammar"
    assert len(next_tokens(following)) >= 300, "a failed sample must not spoil the step of the others"


def test_a_grammar_that_takes_too_long_to_follow_fails_its_sample(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = follow("ebnf", 'root ::= x x x x x x x x\nx ::= x x | [a-z]* | "a"')
    monkeypatch.setattr(matcher, "MAX_STEP_SECONDS", 0.001)
    for _ in range(200):
        following.allowed(go_on=False)
        following.accept(ord("a"))
        if following.failure is not None:
            break
    assert following.failure == "the grammar is too ambiguous to be followed in time"
