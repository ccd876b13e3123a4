"""Prefill computes before it knows where the pages go, and never at the expense of those that know."""

from __future__ import annotations

import pytest
from unit.schedulers.cell import PAGE_SIZE, Cell, PrefillSide, prompt

from diptych.engine.runner import Chunk
from diptych.engine.sampling import SampledToken
from diptych.engine.wire import Abort
from diptych.prefill.request import PrefillRequest, PrefillState


def state(side: PrefillSide, rid: str) -> PrefillState:
    request = side.scheduler.requests[rid]
    assert isinstance(request, PrefillRequest)
    return request.phase


def pages_posted_before_each_step(cell: Cell, prefill: PrefillSide) -> list[int]:
    """Grows by one number whenever prefill begins to compute. Writes must be stalled to be counted."""
    posted: list[int] = []
    compute = prefill.scheduler.stepper.prefill

    def watched(chunks: list[Chunk]) -> list[SampledToken | None]:
        posted.append(sum(write.num_pages for write in cell.fabric.in_flight))
        return compute(chunks)

    prefill.scheduler.stepper.prefill = watched  # type: ignore[method-assign]
    return posted


def test_a_prompt_is_computed_before_decode_has_heard_of_it(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode()
    rid = cell.request(prompt(37), prefill, of=prefill, room=7)
    cell.settle(prefill)
    assert state(prefill, rid) is PrefillState.TRANSFERRING
    assert cell.fabric.in_flight == []
    cell.request(prompt(37), decode, of=prefill, room=7, rid=rid)
    cell.until(lambda: decode.samples[rid].finish is not None)
    assert decode.samples[rid].tokens == cell.answer(prompt(37))
    assert prefill.metric("diptych_prefill_tokens_total") == 37
    cell.settle()
    assert prefill.at_baseline()
    assert decode.at_baseline()


def test_pages_computed_ahead_are_posted_in_the_turn_that_brings_the_destination(cell: Cell) -> None:
    prefill, decode = cell.prefill(budget=16), cell.decode()
    cell.introduce(prefill, decode)
    rid = cell.request(prompt(37), prefill, of=prefill, room=7)
    prefill.turn()
    prefill.turn()
    assert prefill.scheduler.requests[rid].num_computed == 32
    cell.request(prompt(37), decode, of=prefill, room=7, rid=rid)
    cell.fabric.stalled = True
    cell.until(lambda: decode.pool.allocator.held > 0, decode)
    cell.wait_for_news(prefill)
    posted = pages_posted_before_each_step(cell, prefill)
    prefill.turn()
    assert posted == [32 // PAGE_SIZE]
    assert sum(write.num_pages for write in cell.fabric.in_flight) == 10
    cell.fabric.stalled = False
    cell.until(lambda: decode.samples[rid].finish is not None)
    assert decode.samples[rid].tokens == cell.answer(prompt(37))


@pytest.mark.parametrize("optimistic", [0.0, 1.0])
def test_cached_pages_leave_before_the_first_step_of_the_prompt(cell: Cell, optimistic: float) -> None:
    """Where the destination is known first; else they are posted with it, before anything that is computed
    then."""
    prefill, decode = cell.prefill(budget=16, optimistic=optimistic), cell.decode()
    cell.introduce(prefill, decode, prompt(32))
    rid = cell.request(prompt(80), decode, of=prefill, room=7)
    cell.fabric.stalled = True
    posted = pages_posted_before_each_step(cell, prefill)
    if optimistic:
        cell.request(prompt(80), prefill, of=prefill, room=7, rid=rid)
        prefill.turn()
        assert posted == [0]
        cell.until(lambda: decode.pool.allocator.held > 0, decode)
        cell.wait_for_news(prefill)
        prefill.turn()
        assert posted == [0, 8 + 4]
    else:
        cell.until(lambda: decode.pool.allocator.held > 0, decode)
        cell.wait_for_news(prefill)
        cell.request(prompt(80), prefill, of=prefill, room=7, rid=rid)
        prefill.turn()
        assert posted == [8]
    cell.fabric.stalled = False
    cell.until(lambda: decode.samples[rid].finish is not None)
    assert decode.samples[rid].tokens == cell.answer(prompt(80))
    assert decode.samples[rid].cached_tokens == 32


def test_known_destinations_take_pages_from_prompts_computed_ahead(cell: Cell) -> None:
    prefill, decode = cell.prefill(pages=16, budget=16), cell.decode()
    ahead = cell.request(prompt(37, 1), prefill, of=prefill, room=7)
    cell.settle(prefill)
    assert state(prefill, ahead) is PrefillState.TRANSFERRING
    known = cell.request(prompt(50, 2), prefill, decode, of=prefill)
    cell.until(lambda: decode.samples[known].finish is not None)
    assert decode.samples[known].tokens == cell.answer(prompt(50, 2))
    cell.request(prompt(37, 1), decode, of=prefill, room=7, rid=ahead)
    cell.until(lambda: decode.samples[ahead].finish is not None)
    assert decode.samples[ahead].tokens == cell.answer(prompt(37, 1))
    assert decode.samples[ahead].cached_tokens == 0
    cell.settle()
    assert prefill.at_baseline()


def test_what_is_put_back_keeps_its_work_in_the_prefix_cache(cell: Cell) -> None:
    """One place: the known prompt takes it, and the other goes on from its cached pages."""
    prefill, decode = cell.prefill(max_running=1, budget=16), cell.decode()
    ahead = cell.request(prompt(37, 1), prefill, of=prefill, room=7)
    prefill.turn()
    prefill.turn()
    assert prefill.scheduler.requests[ahead].num_computed == 32
    known = cell.request(prompt(20, 2), prefill, decode, of=prefill)
    cell.until(lambda: decode.samples[known].finish is not None)
    cell.request(prompt(37, 1), decode, of=prefill, room=7, rid=ahead)
    cell.until(lambda: decode.samples[ahead].finish is not None)
    assert decode.samples[ahead].tokens == cell.answer(prompt(37, 1))
    # All but what doesn't fill a page.
    assert prefill.metric("diptych_prefill_tokens_total") <= 37 + 20 + PAGE_SIZE
    assert prefill.samples[ahead].cached_tokens == 0
    cell.settle()
    assert prefill.at_baseline()


@pytest.mark.parametrize(("fraction", "computed"), [(0.0, 0), (0.5, 1), (1.0, 3)])
def test_only_a_share_of_the_pool_is_computed_ahead(cell: Cell, fraction: float, computed: int) -> None:
    prefill = cell.prefill(pages=16, optimistic=fraction)
    rids = [cell.request(prompt(17, i), prefill, of=prefill) for i in range(5)]
    cell.settle(prefill)
    states = [state(prefill, rid) for rid in rids]
    assert states.count(PrefillState.TRANSFERRING) == computed
    assert states.count(PrefillState.BOOTSTRAPPING) == 5 - computed
    for rid in rids:
        prefill.send(Abort(rid=rid))
    cell.settle(prefill)
    assert prefill.at_baseline()


@pytest.mark.parametrize("turns", [0, 1, 5], ids=["waiting", "half computed", "computed"])
def test_another_prompt_at_decode_fails_both_legs_before_a_page_is_written(cell: Cell, turns: int) -> None:
    prefill, decode = cell.prefill(budget=16), cell.decode()
    rid = cell.request(prompt(37), prefill, of=prefill, room=7)
    for _ in range(turns):
        prefill.turn()
    cell.request(prompt(30), decode, of=prefill, room=7, rid=rid)
    cell.until(lambda: bool(decode.samples[rid].finish and prefill.samples[rid].finish))
    for side in (prefill, decode):
        finish = side.samples[rid].finish
        assert finish is not None
        assert (finish.kind, finish.status) == ("error", 400)
        assert "prefill counts 37 prompt tokens, decode 30" in finish.message
    assert prefill.metric("diptych_transfer_pages_total") == 0
    cell.settle()
    assert prefill.at_baseline()
    assert decode.at_baseline()


@pytest.mark.parametrize("turns", [1, 5], ids=["half computed", "computed"])
def test_an_abort_before_the_destination_returns_all_pages(cell: Cell, turns: int) -> None:
    prefill, decode = cell.prefill(budget=16), cell.decode()
    rid = cell.request(prompt(37), prefill, of=prefill, room=7)
    for _ in range(turns):
        prefill.turn()
    prefill.send(Abort(rid=rid))
    prefill.turn()
    assert prefill.at_baseline()
    # Decode's leg, late, is told.
    cell.request(prompt(37), decode, of=prefill, room=7, rid=rid)
    cell.until(lambda: decode.samples[rid].finish is not None)
    cell.settle()
    assert decode.at_baseline()


@pytest.mark.parametrize("turns", [1, 5], ids=["half computed", "computed"])
def test_waiting_for_the_destination_stays_bounded_by_the_bootstrap_timeout(cell: Cell, turns: int) -> None:
    cell.settings = cell.settings.__class__(
        handshake_timeout=20,
        bootstrap_timeout=0.2,
        receive_timeout=20,
        transfer_timeout=20,
        heartbeat_interval=20,
    )
    prefill = cell.prefill(budget=16)
    rid = cell.request(prompt(37), prefill, of=prefill)
    for _ in range(turns):
        prefill.turn()
    cell.until(lambda: prefill.samples[rid].finish is not None, prefill)
    finish = prefill.samples[rid].finish
    assert finish is not None
    assert finish.status == 504
    assert "no decode worker reserved pages within 0.2 s" in finish.message
    assert prefill.at_baseline()


def test_decode_giving_up_before_it_reserves_ends_what_was_computed_ahead(cell: Cell) -> None:
    prefill, decode = cell.prefill(), cell.decode(pages=16)
    # No page is free at decode: the handshake is done, the reservation isn't.
    taken = decode.pool.allocate(16)
    rid = cell.request(prompt(37), prefill, decode, of=prefill)
    cell.settle()
    assert state(prefill, rid) is PrefillState.TRANSFERRING
    decode.send(Abort(rid=rid, reason="the client left"))
    cell.until(lambda: prefill.samples[rid].finish is not None)
    finish = prefill.samples[rid].finish
    assert finish is not None
    assert (finish.kind, finish.message) == ("abort", "the client left")
    decode.pool.release(taken, None)
    cell.settle()
    assert prefill.at_baseline()
    assert decode.at_baseline()
