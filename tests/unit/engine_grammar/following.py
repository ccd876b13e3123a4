"""Matchers of the tokenizer of single bytes."""

from __future__ import annotations

import select

from support.byte_tokenizer import VOCABULARY

from diptych.engine.grammar import GrammarRefused, Grammars, Matcher
from diptych.engine.wire import Grammar, SamplingParams

PATIENCE = 60


def sampling(grammar: Grammar, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=100, seed=0, grammar=grammar, **options)  # type: ignore[arg-type]


def matcher_of(grammars: Grammars, grammar: Grammar, **options: object) -> Matcher:
    """Waits until it is compiled. Raises `GrammarRefused`."""
    while (matcher := grammars.matcher(sampling(grammar, **options))) is None:
        wait(grammars)
    return matcher


def refusal_of(grammars: Grammars, grammar: Grammar) -> GrammarRefused:
    try:
        matcher_of(grammars, grammar)
    except GrammarRefused as refusal:
        return refusal
    raise AssertionError(f"{grammar.text[:80]!r} was accepted")


def wait(grammars: Grammars) -> None:
    assert select.select([grammars], [], [], PATIENCE)[0], "nothing was compiled"
    grammars.collect()


def next_tokens(matcher: Matcher, *, go_on: bool = False) -> set[int]:
    words = matcher.allowed(go_on=go_on)
    return {token for token in range(VOCABULARY) if int(words[token // 32]) >> token % 32 & 1}


def accept(matcher: Matcher, text: str) -> Matcher:
    for byte in text.encode():
        assert matcher.allows(byte), (text, chr(byte))
        matcher.accept(byte)
        assert matcher.failure is None
    return matcher
