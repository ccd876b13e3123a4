"""A prefill worker that doesn't deliver takes no more of a decode worker than its share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.schedulers.cell import Cell, prompt

from diptych.decode.receiving import ReceivingLimits
from diptych.engine.wire import Abort

POOL = 24
PROMPT = 14  # four pages


@pytest.mark.parametrize(("receiving", "pages"), [(1.0, POOL), (0.5, POOL // 2), (0.1, 4)])
def test_a_stuck_prefill_worker_holds_at_most_its_share(cell: Cell, receiving: float, pages: int) -> None:
    stuck, decode = cell.prefill(), cell.decode(pages=POOL, max_running=100, receiving=receiving)
    cell.introduce(stuck, decode)
    rids = [cell.request(prompt(PROMPT, i), decode, of=stuck) for i in range(10)]
    cell.settle(decode)
    assert decode.pool.allocator.held == pages
    for rid in rids:
        decode.send(Abort(rid=rid))
    cell.settle()
    assert decode.at_baseline()


def test_places_in_the_batch_are_shared_like_pages(cell: Cell) -> None:
    stuck, decode = cell.prefill(), cell.decode(pages=200, max_running=8, receiving=0.5)
    cell.introduce(stuck, decode)
    for i in range(10):
        cell.request(prompt(PROMPT, i), decode, of=stuck)
    cell.settle(decode)
    assert decode.pool.allocator.held == 4 * 4


def test_requests_of_another_prefill_worker_flow_past_a_stuck_one(cell: Cell) -> None:
    cell.settings = replace(cell.settings, receive_timeout=60, bootstrap_timeout=60)
    stuck, good = cell.prefill(), cell.prefill()
    decode = cell.decode(pages=POOL, max_running=4, receiving=0.5)
    cell.introduce(stuck, decode)
    cell.introduce(good, decode)
    lost = [cell.request(prompt(PROMPT, i), decode, of=stuck) for i in range(6)]
    cell.settle(decode)
    fine = [cell.request(prompt(PROMPT, 50 + i), good, decode, of=good) for i in range(6)]
    cell.until(lambda: all(decode.samples[rid].finish for rid in fine), stuck=stuck)
    # Before the stuck ones, which came first, have run into their deadlines.
    assert not any(decode.samples[rid].finish for rid in lost)
    for i, rid in enumerate(fine):
        finish = decode.samples[rid].finish
        assert finish is not None
        assert finish.kind == "length"
        assert decode.samples[rid].tokens == cell.answer(prompt(PROMPT, 50 + i))

    cell.passed = 61
    cell.until(lambda: all(decode.samples[rid].finish for rid in lost), stuck=stuck)
    for rid in lost:
        finish = decode.samples[rid].finish
        assert finish is not None
        assert finish.status == 504
    # What was reserved may still be written until the worker says otherwise, and counts as its share.
    assert decode.pool.allocator.quarantined == 8
    more = cell.request(prompt(PROMPT, 99), stuck, decode, of=stuck)
    cell.settle(decode)
    assert decode.pool.allocator.held + decode.pool.allocator.quarantined <= POOL // 2
    cell.until(lambda: decode.samples[more].finish is not None)
    cell.until(lambda: decode.at_baseline() and stuck.at_baseline() and good.at_baseline())


def test_delivered_and_safe_pages_count_no_more() -> None:
    limits = ReceivingLimits(max_pages=8, max_requests=2)
    limits.started("a", 6)
    assert not limits.allows("a", 3)
    assert limits.allows("a", 2)
    assert limits.allows("b", 8)
    limits.started("a", 2)
    assert not limits.allows("a", 0)
    limits.ended("a")
    assert limits.num_requests == 1
    assert not limits.allows("a", 1)
    limits.safe("a", 6)
    assert limits.allows("a", 6)
    limits.ended("a")
    limits.safe("a", 2)
    assert limits.allows("a", 100)
