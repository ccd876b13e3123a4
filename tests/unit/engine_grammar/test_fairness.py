"""Grammars that take long to compile: they hold up no others, and are given up when nobody waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from support.byte_tokenizer import KeptLink
from unit.engine_grammar.following import accept, matcher_of, refusal_of, sampling, wait

from diptych.engine.grammar import GrammarRefused, Grammars, WaitingForGrammar
from diptych.engine.grammar.compiler_link import JobHandle
from diptych.engine.grammar.grammars import grammar_key
from diptych.engine.grammar.vocabulary import Text
from diptych.engine.wire import Generate, Grammar


def endless(number: int) -> Grammar:
    """Takes minutes: in each of its states every one of the other properties may follow."""
    names = [f"{number} {i}" for i in range(3000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return Grammar("json_schema", json.dumps(schema), "guided_json")


QUICK = Grammar("regex", "quick")


@pytest.fixture
def patient(grammar_link: KeptLink) -> Iterator[Grammars]:
    """It ends no job of itself while a test runs."""
    made = Grammars(grammar_link, timeout=300)
    yield made
    for number in range(20):
        made.give_up(grammar_key(endless(number)))
    made.close()


def until_jobs(link: KeptLink, number: int) -> None:
    """Waits until so many jobs have a process."""
    assert link._process is not None
    pid = link._process.pid
    deadline = time.monotonic() + 20
    while True:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            jobs = file.read().split()
        if len(jobs) == number:
            return
        assert time.monotonic() < deadline, f"{len(jobs)} jobs run, not {number}"
        time.sleep(0.01)


def test_many_long_ones_hold_up_no_other_and_are_killed_when_nobody_waits(
    patient: Grammars, grammar_link: KeptLink
) -> None:
    long = [endless(number) for number in range(6)]
    assert [patient.matcher(sampling(grammar)) for grammar in long] == [None] * 6
    accept(matcher_of(patient, QUICK), "quick")
    assert [patient.matcher(sampling(grammar)) for grammar in long] == [None] * 6, "they still are compiled"
    for grammar in long:
        patient.give_up(grammar_key(grammar))
    until_jobs(grammar_link, 0)


def test_long_ones_that_would_wait_for_too_many_others_are_refused_for_now(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.engine.grammar.grammars.MAX_LONG", 1)
    assert patient.matcher(sampling(endless(1))) is None
    while not any(job.is_long for job in patient._jobs.values()):
        wait(patient)
    refusal = refusal_of(patient, endless(2))
    assert (refusal.status, refusal.message) == (
        429,
        "it takes long to compile, and 1 others that do wait; try again later",
    )
    patient.trim()
    patient.give_up(grammar_key(endless(1)))
    assert patient.matcher(sampling(endless(2))) is None, "later it has another try"


def test_a_grammar_is_given_up_with_the_last_who_waits_for_it(
    patient: Grammars, grammar_link: KeptLink
) -> None:
    waiting = WaitingForGrammar(patient)
    messages = [
        Generate(rid=rid, prompt_ids=[1], sampling=sampling(endless(number)))
        for rid, number in (("first", 1), ("second", 1), ("other", 2))
    ]
    assert [waiting.matcher(message) for message in messages] == [None] * 3
    until_jobs(grammar_link, 2)
    waiting.remove("first")
    assert len(patient._jobs) == 2
    waiting.remove("second")
    assert list(patient._jobs) == [grammar_key(endless(2))]
    waiting.remove("other")
    until_jobs(grammar_link, 0)
    assert not list(waiting.finished())


def test_who_comes_after_a_grammar_was_given_up_gets_it_all_the_same(patient: Grammars) -> None:
    again = Grammar("regex", "again")
    assert patient.matcher(sampling(again)) is None
    patient.give_up(grammar_key(again))
    accept(matcher_of(patient, again), "again")


def test_what_was_given_up_before_its_turn_never_starts(grammar_link: KeptLink) -> None:
    handle = JobHandle()
    handle.give_up()
    with pytest.raises(ConnectionError):
        grammar_link.compile(QUICK, Text(), timeout=1, handle=handle)


def test_what_takes_longer_than_a_brief_try_is_compiled_all_the_same(
    patient: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.engine.grammar.grammars.BRIEF_SECONDS", 0.001)
    assert matcher_of(patient, Grammar("regex", "[a-z]{0,400}")).allows(ord("q"))
    with pytest.raises(GrammarRefused, match="parenthesis"):
        matcher_of(patient, Grammar("regex", "(" + "a?" * 300))
