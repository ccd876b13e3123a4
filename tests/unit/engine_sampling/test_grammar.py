"""Draws under a grammar: whatever else a sample asks for, only allowed tokens come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.byte_tokenizer import CONTROL, END, VOCABULARY, KeptLink
from unit.engine_grammar.following import matcher_of

from diptych.engine.grammar import Grammars
from diptych.engine.sampling import Sampler, SamplingState
from diptych.engine.wire import Finish, Grammar, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def grammars(grammar_link: KeptLink) -> Iterator[Grammars]:
    made = Grammars(grammar_link, timeout=20)
    yield made
    made.close()


def state(grammars: Grammars, regex: str | None, **options: Any) -> SamplingState:
    options = {"max_new_tokens": 50, "seed": 5, "temperature": 1.0, **options}
    grammar = None if regex is None else Grammar("regex", regex, "regex")
    matcher = None
    if grammar is not None:
        matcher = matcher_of(grammars, grammar, stop_token_ids=options.get("stop_token_ids", ()))
    return SamplingState(
        SamplingParams(grammar=grammar, **options),
        [1, 2, 3],
        eos_token_ids=[END],
        vocab_size=VOCABULARY,
        device=CPU,
        grammar=matcher,
    )


def draw(states: list[SamplingState], steps: int = 50) -> list[str]:
    """The texts of samples that run together until each has ended."""
    logits_of = torch.Generator().manual_seed(1)
    sampler, texts, running = Sampler(VOCABULARY, CPU), [""] * len(states), list(range(len(states)))
    for _ in range(steps):
        logits = torch.randn(len(states), VOCABULARY, generator=logits_of) * 3
        drawn = sampler.sample(logits[running], [states[row] for row in running])
        for row, token in zip(list(running), drawn, strict=True):
            states[row].append(token.token_id)
            if states[row].finish_reason() is not None:
                running.remove(row)
            if token.token_id < 256:
                texts[row] += chr(token.token_id)
        if not running:
            break
    return texts


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 2.0, "top_k": 20},
        {"top_k": 1},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"top_k": 299, "top_p": 0.99, "min_p": 0.01},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"logit_bias": {ord("z"): 100.0, END: 100.0, ord("a"): -100.0}},
        {"min_new_tokens": 20},
        {"ignore_eos": True},
        {"stop_token_ids": (ord("z"),), "min_new_tokens": 2},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_every_option_keeps_to_the_grammar(grammars: Grammars, options: dict[str, Any]) -> None:
    sample = state(grammars, "[a-c]{4,6}!", **options)
    (text,) = draw([sample])
    assert sample.finish_reason() == Finish(kind="stop", matched=END)
    assert text.endswith("!")
    assert 4 <= len(text) - 1 <= 6
    assert set(text[:-1]) <= set("abc")


def test_the_end_is_put_off_only_as_far_as_the_grammar_goes(grammars: Grammars) -> None:
    eager = {END: 100.0}
    shortest = draw([state(grammars, "a{1,9}", logit_bias=eager)])
    longer = draw([state(grammars, "a{1,9}", logit_bias=eager, min_new_tokens=5)])
    longest = draw([state(grammars, "a{1,9}", logit_bias=eager, ignore_eos=True)])
    beyond = draw([state(grammars, "a{1,9}", logit_bias=eager, min_new_tokens=40)])
    assert [*shortest, *longer, *longest, *beyond] == ["a", "a" * 5, "a" * 9, "a" * 9]


def test_a_stop_token_that_is_text_ends_the_sample_where_it_is_drawn(grammars: Grammars) -> None:
    sample = state(grammars, "ab*c", stop_token_ids=(ord("b"),), logit_bias={ord("b"): 100.0})
    draw([sample])
    assert (sample.num_output, sample.finish_reason()) == (2, Finish(kind="stop", matched=ord("b")))


def test_rows_with_other_grammars_or_none_are_as_they_are_alone(grammars: Grammars) -> None:
    regexes = ["[ab]+c", None, "[xyz]{3}", "[ab]+c", None]
    together = draw([state(grammars, regex, seed=i) for i, regex in enumerate(regexes)], steps=1)
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    alone = [
        Sampler(VOCABULARY, CPU).sample(logits[i : i + 1], [state(grammars, regex, seed=i)])[0].token_id
        for i, regex in enumerate(regexes)
    ]
    assert [chr(token) if token < 256 else "" for token in alone] == together


def test_logprobs_are_of_the_distribution_without_the_grammar(grammars: Grammars) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    (drawn,) = Sampler(VOCABULARY, CPU).sample(logits, [state(grammars, "q", logprobs=2)])
    expected = torch.log_softmax(logits[0], -1)
    assert drawn.token_id == ord("q")
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(expected[ord("q")]))
    assert [token for token, _ in drawn.logprob.top] == expected.topk(2).indices.tolist()


def test_a_state_that_is_rebuilt_goes_on_in_the_middle_of_the_grammar(grammars: Grammars) -> None:
    matcher = matcher_of(grammars, Grammar("regex", "abcd"))
    rebuilt = SamplingState(
        SamplingParams(max_new_tokens=9, seed=1),
        [1],
        eos_token_ids=[END],
        vocab_size=VOCABULARY,
        device=CPU,
        output_ids=list(b"ab"),
        grammar=matcher,
    )
    assert draw([rebuilt]) == ["cd"]


def test_a_sample_that_its_grammar_fails_is_an_error_that_names_the_field(grammars: Grammars) -> None:
    sample = state(grammars, "ab")
    sample.append(CONTROL)
    finish = sample.finish_reason()
    assert finish is not None
    assert (finish.kind, finish.status, finish.param) == ("error", 400, "regex")
