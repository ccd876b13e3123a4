"""Requests with a grammar: held until it is compiled, and handed over in the middle of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.byte_tokenizer import KeptLink
from unit.schedulers.cell import Cell, Side, prompt

from diptych.engine.grammar import Grammars
from diptych.engine.models.decoder import DecoderLM
from diptych.engine.wire import Abort, Drain, Grammar

WORDS = Grammar("regex", "([a-e]{5}-){3}", "regex")
BAD = Grammar("regex", "(a", "guided_regex")
ENDLESS = Grammar(
    "json_schema",
    json.dumps({"type": "object", "properties": {f"name {i}": {"type": "string"} for i in range(3000)}}),
    "guided_json",
)


@pytest.fixture
def cell(model: DecoderLM, grammar_link: KeptLink) -> Iterator[Cell]:
    made = Cell(model, lambda: Grammars(grammar_link, timeout=0.5))
    yield made
    made.close()


def text(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens if token < 256)


def finished(side: Side, *rids: str) -> bool:
    return all(side.samples[rid].finish is not None for rid in rids)


def matches(tokens: list[int]) -> bool:
    groups = text(tokens).split("-")
    return (
        len(groups) == 4
        and groups[3] == ""
        and all(len(group) == 5 and set(group) <= set("abcde") for group in groups[:3])
    )


def test_the_first_token_is_prefills_and_counts_once(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    rid = cell.request(prompt(37), prefill, decode, of=prefill, tokens=30, grammar=WORDS)
    cell.until(lambda: finished(decode, rid) and finished(prefill, rid))
    tokens = decode.samples[rid].tokens
    assert matches(tokens)
    assert prefill.samples[rid].tokens == tokens[:1]
    assert decode.samples[rid].finish.kind == "stop"
    cell.settle()
    assert prefill.at_baseline()
    assert decode.at_baseline()


def test_samples_of_one_grammar_and_of_none_run_side_by_side(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=256)
    free = cell.request(prompt(9, 1), prefill, decode, of=prefill, tokens=12)
    rids = [
        cell.request(prompt(9, i), prefill, decode, of=prefill, tokens=30, grammar=WORDS) for i in range(2, 6)
    ]
    cell.until(lambda: finished(decode, free, *rids))
    assert all(matches(decode.samples[rid].tokens) for rid in rids)
    assert decode.samples[free].tokens == cell.answer(prompt(9, 1), 12)


def test_a_token_that_the_grammar_forbids_is_not_taken_over(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    other = Grammar("regex", "[v-z]+", "regex")
    rid = cell.request(prompt(9), prefill, of=prefill, room=5, grammar=WORDS)
    cell.request(prompt(9), decode, of=prefill, room=5, rid=rid, grammar=other)
    good = cell.request(prompt(9, 1), prefill, decode, of=prefill, tokens=30, grammar=WORDS)
    cell.until(lambda: finished(decode, rid, good))
    finish = decode.samples[rid].finish
    assert finish is not None
    assert (finish.kind, finish.status) == ("error", 502)
    assert "grammar doesn't allow" in finish.message
    assert decode.samples[rid].tokens == []
    assert matches(decode.samples[good].tokens)
    cell.settle()
    assert decode.at_baseline()


def test_a_retracted_sample_goes_on_where_it_was(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=8)
    rids = [cell.request(prompt(7, i), prefill, decode, of=prefill, tokens=20, grammar=WORDS) for i in (1, 2)]
    cell.until(lambda: finished(decode, *rids))
    assert decode.metric("diptych_retractions_total") > 0
    roomy = cell.decode(pages=64)
    alone = [cell.request(prompt(7, i), prefill, roomy, of=prefill, tokens=20, grammar=WORDS) for i in (1, 2)]
    cell.until(lambda: finished(roomy, *alone))
    assert [decode.samples[rid].tokens for rid in rids] == [roomy.samples[rid].tokens for rid in alone]
    assert all(matches(decode.samples[rid].tokens) for rid in rids)


def test_a_prompt_that_was_computed_ahead_and_put_back_draws_its_first_token_again(cell: Cell) -> None:
    prefill, decode = cell.prefill(pages=10, max_running=1), cell.decode()
    cell.introduce(prefill, decode)
    ahead = cell.request(prompt(9, 1), prefill, of=prefill, room=71, tokens=30, grammar=WORDS)
    cell.until(lambda: ahead in prefill.scheduler.requests, prefill)
    cell.settle(prefill)
    other = cell.request(prompt(9, 2), prefill, decode, of=prefill, tokens=2)
    cell.until(lambda: finished(decode, other))
    cell.request(prompt(9, 1), decode, of=prefill, room=71, rid=ahead, tokens=30, grammar=WORDS)
    cell.until(lambda: finished(decode, ahead))
    assert matches(decode.samples[ahead].tokens)


def test_both_legs_refuse_a_grammar_alike_before_anything_is_held(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    rid = cell.request(prompt(9), prefill, decode, of=prefill, grammar=BAD)
    cell.until(lambda: finished(decode, rid) and finished(prefill, rid))
    assert decode.samples[rid].finish == prefill.samples[rid].finish
    finish = decode.samples[rid].finish
    assert finish is not None
    assert (finish.status, finish.param) == (400, "guided_regex")
    assert finish.message.startswith("guided_regex can't be used: ")


def test_whoever_waits_for_a_grammar_holds_up_nobody_and_can_leave(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    slow = cell.request(prompt(9), prefill, decode, of=prefill, grammar=ENDLESS)
    leaves = cell.request(prompt(9, 1), prefill, decode, of=prefill, grammar=ENDLESS)
    quick = cell.request(prompt(9, 2), prefill, decode, of=prefill, tokens=30, grammar=WORDS)
    free = cell.request(prompt(9, 3), prefill, decode, of=prefill, tokens=3)
    cell.until(lambda: finished(decode, quick, free))
    assert not finished(decode, slow, leaves)
    for side in (prefill, decode):
        side.send(Abort(rid=leaves))
    cell.settle()
    for side in (prefill, decode):
        finish = side.samples[leaves].finish
        assert finish is not None
        assert finish.kind == "abort"
        assert side.at_baseline(), "who waits holds nothing"
    cell.until(lambda: finished(decode, slow) and finished(prefill, slow))
    assert "within 0.5 s of processor time" in decode.samples[slow].finish.message


def test_a_request_id_is_taken_while_its_request_waits(cell: Cell) -> None:
    prefill = cell.prefill()
    cell.request(prompt(9), prefill, of=prefill, rid="same", grammar=ENDLESS)
    prefill.turn()
    cell.request(prompt(9), prefill, of=prefill, rid="same")
    prefill.turn()
    finish = prefill.samples["same"].finish
    assert finish is not None
    assert finish.status == 409
    prefill.samples["same"].finish = None
    prefill.send(Abort(rid="same", quiet=True))
    prefill.turn()
    assert not prefill.scheduler._waiting


def test_draining_waits_for_those_who_wait(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    cell.introduce(prefill, decode)
    fresh = Grammar("regex", "[a-c]{7}", "regex")
    rid = cell.request(prompt(9), prefill, decode, of=prefill, tokens=30, grammar=fresh)
    for side in (prefill, decode):
        side.send(Drain())
    cell.until(lambda: finished(decode, rid))
    assert len(text(decode.samples[rid].tokens)) == 7


def test_without_a_backend_only_requests_with_a_grammar_are_refused(model: DecoderLM) -> None:
    cell = Cell(model)
    prefill, decode = cell.prefill(), cell.decode()
    refused = cell.request(prompt(9), prefill, decode, of=prefill, grammar=WORDS)
    free = cell.request(prompt(9), prefill, decode, of=prefill)
    cell.until(lambda: finished(decode, refused, free) and finished(prefill, refused))
    for side in (prefill, decode):
        finish = side.samples[refused].finish
        assert finish is not None
        assert (finish.status, finish.param) == (400, "regex")
        assert "--grammar-backend" in finish.message
    assert len(decode.samples[free].tokens) == 4
    cell.close()
