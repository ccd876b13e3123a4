"""Compiling: once for each grammar, apart from the scheduler, within bounds."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
from support.byte_tokenizer import END, VOCABULARY, KeptLink
from unit.engine_grammar.following import accept, matcher_of, refusal_of, sampling, wait

from diptych.engine.grammar import CompilerLink, GrammarRefused, Grammars
from diptych.engine.grammar.compiler_process import readable
from diptych.engine.grammar.vocabulary import Text
from diptych.engine.wire import Grammar

NO_REASON = "the grammar library refuses it without a reason"
ENDLESS = json.dumps({"type": "object", "properties": {f"name {i}": {"type": "string"} for i in range(3000)}})
"""Takes minutes: in each of its states every one of the other properties may follow."""


def count_jobs(link: KeptLink, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    jobs: list[str] = []
    compile_grammar = link.compile

    def counted(grammar: Grammar, text: Text, **options: Any) -> str | None:
        jobs.append(grammar.text)
        return compile_grammar(grammar, text, **options)

    monkeypatch.setattr(link, "compile", counted)
    return jobs


def test_a_grammar_is_compiled_once_for_all_who_wait_and_who_come_later(
    grammars: Grammars, grammar_link: KeptLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = count_jobs(grammar_link, monkeypatch)
    asked = sampling(Grammar("regex", "once"))
    assert [grammars.matcher(asked) for _ in range(3)] == [None] * 3
    wait(grammars)
    first, second = (grammars.matcher(asked) for _ in range(2))
    assert first is not None
    assert second is not None
    accept(first, "once")
    assert not second.allows(ord("n")), "samples of one grammar stand where each of them is"
    assert jobs == ["once"]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("regex", "(" * 100_000 + "a" + ")" * 100_000, "Nest layer exceeded"),
        ("ebnf", 'root ::= "a', 'Expect " in string literal'),
        ("ebnf", 'other ::= "a"', 'root rule with name "root" is not found'),
        ("ebnf", "root ::= root", "allows no text"),
        ("json_schema", '{"type":"nonsense"}', 'Unsupported type "nonsense"'),
        ("json_schema", '{"$ref":"#/$defs/missing"}', "Cannot find field"),
        ("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}', "Circular"),
        ("json_schema", "false", "cannot accept any value"),
        ("json_schema", '{"type":"integer","minimum":-1e30}', "Integer exceeds minimum limit"),
        ("structural_tag", '{"type":"structural_tag"}', "must have a format field"),
    ],
)
def test_a_malformed_grammar_is_refused_with_the_reason_and_without_its_source_lines(
    grammars: Grammars, kind: str, text: str, reason: str
) -> None:
    refusal = refusal_of(grammars, Grammar(kind, text))  # type: ignore[arg-type]
    assert reason in refusal.message
    assert not re.search(r"\.cc:|Check failed|std::", refusal.message)
    assert refusal.status == 400


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("std::bad_alloc", "it is too large to be compiled within 1024 MiB of memory"),
        ("[03:48:03] /src/a.cc:7: Check failed: (std::holds_alternative<G>(r)) is false: No G\n", "No G"),
        ("[03:48:03] /src/a.cc:7: [03:48:03] /src/b.cc:9: Not (b) is false: so\n", "Not (b) is false: so"),
        ("[a-z] is wrong", "[a-z] is wrong"),
        ("[03:48:03] /src/a.cc:7: Check failed: (v.size() > 3) is false: ", NO_REASON),
        ("vector::_M_range_check: __n (which is 3) >= this->size() (which is 3)", NO_REASON),
        ("map::at", NO_REASON),
        ("stoi", NO_REASON),
        ("", NO_REASON),
    ],
)
def test_of_the_librarys_messages_a_client_gets_what_is_meant_for_it(message: str, said: str) -> None:
    assert readable(message) == said


def test_what_takes_too_long_is_refused_and_holds_nobody_up(
    grammar_link: KeptLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = count_jobs(grammar_link, monkeypatch)
    impatient = Grammars(grammar_link, timeout=0.5)
    endless, quick = sampling(Grammar("json_schema", ENDLESS)), Grammar("regex", "quick")
    assert impatient.matcher(endless) is None
    accept(matcher_of(impatient, quick), "quick")
    assert impatient.matcher(endless) is None, "it is still being compiled"
    assert "within 0.5 s of processor time" in refusal_of(impatient, Grammar("json_schema", ENDLESS)).message
    with pytest.raises(GrammarRefused):
        impatient.matcher(endless)
    assert jobs == [ENDLESS, "quick", ENDLESS], "a brief try and a long one, and no other"
    impatient.close()


def children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_a_killed_compiler_is_started_again_and_closing_gives_up_its_jobs(grammar_link: KeptLink) -> None:
    link = CompilerLink(grammar_link.model_dir, vocab_size=VOCABULARY, end_ids=[END])
    closing = Grammars(link, timeout=60)
    link.start()
    assert link._process is not None
    link._process.kill()
    link._process.wait()
    matcher_of(closing, Grammar("regex", "a"))
    process = link._process
    closing.matcher(sampling(Grammar("json_schema", ENDLESS)))
    deadline = time.monotonic() + 20
    while not (jobs := children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    closing.close()
    assert process.returncode == -signal.SIGKILL
    while any(os.path.exists(f"/proc/{job}/exe") for job in jobs):
        assert time.monotonic() < deadline, "a job outlives the scheduler"
        time.sleep(0.01)


def test_the_least_recently_used_grammars_are_forgotten(
    grammars: Grammars, grammar_link: KeptLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = count_jobs(grammar_link, monkeypatch)
    monkeypatch.setattr("diptych.engine.grammar.grammars.MAX_KEPT", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        matcher_of(grammars, Grammar("regex", text))
        grammars.trim()
    assert jobs == ["a", "b", "c", "b"]
    monkeypatch.setattr("diptych.engine.grammar.grammars.MAX_KEPT_BYTES", 0)
    grammars.trim()
    assert grammars.matcher(sampling(Grammar("regex", "a"))) is None


def test_too_many_at_once_are_refused_for_now(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.engine.grammar.grammars.MAX_COMPILING", 1)
    assert grammars.matcher(sampling(Grammar("regex", "first"))) is None
    with pytest.raises(GrammarRefused) as refused:
        grammars.matcher(sampling(Grammar("regex", "second")))
    assert refused.value.status == 429
    wait(grammars)
    assert grammars.matcher(sampling(Grammar("regex", "second"))) is None
    wait(grammars)


def test_a_model_without_an_end_can_follow_no_grammar(grammar_link: KeptLink) -> None:
    endless = Grammars(CompilerLink(grammar_link.model_dir, vocab_size=VOCABULARY, end_ids=[]), timeout=20)
    assert "end-of-sequence" in refusal_of(endless, Grammar("regex", "a")).message
    endless.close()


def test_nothing_is_loaded_or_started_before_the_first_grammar(grammar_link: KeptLink) -> None:
    before = threading.active_count()
    link = CompilerLink(grammar_link.model_dir, vocab_size=VOCABULARY, end_ids=[END])
    idle = Grammars(link, timeout=20)
    assert not idle.collect()
    assert link._process is None
    assert threading.active_count() == before
    idle.close()
