"""Requests that decode parks on the host when its pool runs short, and the room it keeps against that."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
from unit.schedulers.cell import Cell, DecodeSide, PrefillSide, prompt

from diptych.decode.request import DecodeRequest, DecodeState
from diptych.engine.wire import Abort

POOL = 8
PROMPT = 7  # two pages
OUTPUT = 20  # seven pages in all


def states(decode: DecodeSide, rids: list[str]) -> list[DecodeState | None]:
    found = []
    for rid in rids:
        request = decode.scheduler.requests.get(rid)
        assert request is None or isinstance(request, DecodeRequest)
        found.append(None if request is None else request.phase)
    return found


def parked_request(
    cell: Cell, prefill: PrefillSide, decode: DecodeSide
) -> tuple[str, str, weakref.ref[torch.Tensor]]:
    """Ids of one that runs and of one that is parked, and the latter's KV on the host."""
    rids = [cell.request(prompt(PROMPT, i), prefill, decode, of=prefill, tokens=OUTPUT) for i in (1, 2)]
    cell.until(lambda: decode.metric("diptych_retractions_total") > 0)
    phases = states(decode, rids)
    assert sorted(phase.name for phase in phases if phase) == ["RETRACTED", "RUNNING"]
    parked = phases.index(DecodeState.RETRACTED)
    (entry,) = decode.scheduler._batch.parked
    return rids[1 - parked], rids[parked], weakref.ref(entry.kv)


@pytest.mark.parametrize(("reserved", "together"), [(0, True), (4 * 4, True), (5 * 4, False)])
def test_admission_leaves_the_reserved_tokens_to_those_that_run(
    cell: Cell, reserved: int, together: bool
) -> None:
    """Eight pages: one request is about to run on two; the next needs two and must leave the reserve."""
    prefill, decode = cell.prefill(), cell.decode(pages=POOL, reserved_tokens=reserved)
    cell.introduce(prefill, decode)
    rids = [cell.request(prompt(PROMPT, i), decode, of=prefill) for i in (1, 2)]
    cell.settle(decode)
    second = DecodeState.RECEIVING if together else DecodeState.PREALLOCATING
    assert states(decode, rids) == [DecodeState.RECEIVING, second]
    for rid in rids:
        decode.send(Abort(rid=rid))
    cell.settle()
    assert decode.at_baseline()


def test_a_parked_request_resumes_with_the_tokens_it_would_have_had(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=POOL)
    running, parked, copy = parked_request(cell, prefill, decode)
    cell.until(lambda: bool(decode.samples[running].finish and decode.samples[parked].finish))
    for i, rid in enumerate(sorted([running, parked], key=lambda rid: int(rid[1:])), start=1):
        assert decode.samples[rid].tokens == cell.answer(prompt(PROMPT, i), OUTPUT)
    assert copy() is None
    cell.settle()
    assert decode.at_baseline()


def test_aborting_a_parked_request_frees_its_copy_and_leaks_nothing(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=POOL)
    running, parked, copy = parked_request(cell, prefill, decode)
    # A client that leaves is an abort whose answer nobody reads.
    decode.send(Abort(rid=parked, quiet=True))
    decode.turn()
    assert copy() is None
    assert parked not in decode.scheduler.requests
    assert decode.samples[parked].finish is None
    cell.until(lambda: decode.samples[running].finish is not None)
    cell.settle()
    assert decode.at_baseline()
    again = cell.request(prompt(PROMPT, 9), prefill, decode, of=prefill)
    cell.until(lambda: decode.samples[again].finish is not None)
    assert decode.samples[again].tokens == cell.answer(prompt(PROMPT, 9))


def test_a_request_is_not_parked_for_ever(cell: Cell) -> None:
    """Pages that nobody gives back, as in a quarantine without end, would keep it waiting."""
    prefill, decode = cell.prefill(), cell.decode(pages=POOL, retracted_timeout=0.3)
    running, parked, copy = parked_request(cell, prefill, decode)
    decode.send(Abort(rid=running))
    decode.turn()
    decode.pool.allocate(decode.pool.available)
    started = time.monotonic()
    cell.until(lambda: decode.samples[parked].finish is not None)
    finish = decode.samples[parked].finish
    assert finish is not None
    if finish.kind == "length":
        pytest.fail("it was resumed before its pages were taken")
    assert (finish.status, time.monotonic() - started < 2) == (504, True)
    assert "no pages became free for the parked request within 0.3 s" in finish.message
    assert copy() is None
    decode.pool.release(list(range(POOL)), None)
    assert decode.at_baseline()


def test_a_room_is_taken_until_its_request_has_all_its_tokens(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    first = cell.request(prompt(PROMPT, 1), prefill, decode, of=prefill, tokens=OUTPUT, room=77)
    cell.until(lambda: len(decode.samples[first].tokens) > 1)
    assert decode.samples[first].finish is None
    second = cell.request(prompt(PROMPT, 2), decode, of=prefill, room=77)
    cell.until(lambda: decode.samples[second].finish is not None)
    refused = decode.samples[second].finish
    assert refused is not None
    assert (refused.status, refused.message) == (400, "bootstrap_room 77 is already active on this worker")
    cell.until(lambda: decode.samples[first].finish is not None)
    assert decode.samples[first].tokens == cell.answer(prompt(PROMPT, 1), OUTPUT)
    third = cell.request(prompt(PROMPT, 3), prefill, decode, of=prefill, room=77)
    cell.until(lambda: decode.samples[third].finish is not None)
    assert decode.samples[third].tokens == cell.answer(prompt(PROMPT, 3))
