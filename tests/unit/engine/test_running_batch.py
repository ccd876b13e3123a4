from collections.abc import Callable

import torch

from diptych.engine.kv_pool import KVPool
from diptych.engine.request import Request
from diptych.engine.running_batch import RunningBatch

MakePool = Callable[..., KVPool]
MakeRequest = Callable[..., Request]


def started(pool: KVPool, request: Request, output: int = 1) -> Request:
    """A request whose prompt is computed and whose first token is drawn."""
    request.add_pages(pool.allocate(pool.layout.pages_for(request.num_prompt)))
    request.num_computed = request.num_prompt
    for token in range(output):
        request.accept(token)
    return request


def step(batch: RunningBatch) -> None:
    for request in batch.running:
        request.num_computed += 1
        request.accept(7)


def test_a_page_is_added_when_the_next_token_needs_one(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(page_size=4)
    batch = RunningBatch(pool, reserved_tokens=0)
    request = started(pool, make_request(3))
    batch.add(request)
    batch.make_room()
    assert len(request.pages) == 1
    step(batch)
    batch.make_room()
    assert request.pages.tolist() == [0, 1]


def test_the_latest_arrival_is_parked_and_resumes_with_the_same_kv(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=4, page_size=4, cache=False)
    batch = RunningBatch(pool, reserved_tokens=4)
    old, young = started(pool, make_request(8)), started(pool, make_request(8))
    batch.add(old)
    batch.add(young)
    pool.slab[young.pages] = torch.randn_like(pool.slab[young.pages])
    kv = pool.slab[young.pages].clone()

    assert batch.make_room() == ([young], [])
    assert batch.running == [old]
    assert len(young.pages) == 0
    assert batch.resume() == []
    step(batch)

    batch.remove(old)
    pool.release(old.take_pages(), None)
    pool.slab.zero_()
    assert batch.resume() == [young]
    assert torch.equal(pool.slab[young.pages[:2]], kv)
    assert batch.make_room() == ([], [])
    assert len(young.pages) == 3


def test_a_request_that_outgrows_the_whole_pool_fails_alone(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=3, page_size=4, cache=False)
    batch = RunningBatch(pool, reserved_tokens=0)
    big = started(pool, make_request(12))
    batch.add(big)
    assert batch.make_room() == ([], [big])
    assert batch.running == []
    assert len(big.pages) == 3


def test_pages_held_elsewhere_park_a_lone_request_instead_of_failing_it(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=4, page_size=4, cache=False)
    elsewhere = pool.allocate(2)
    batch = RunningBatch(pool, reserved_tokens=0)
    request = started(pool, make_request(8))
    batch.add(request)
    assert batch.make_room() == ([request], [])
    pool.release(elsewhere, None)
    assert batch.resume() == [request]


def test_removing_a_parked_request_drops_its_copy(make_pool: MakePool, make_request: MakeRequest) -> None:
    pool = make_pool(num_pages=2, page_size=4, cache=False)
    batch = RunningBatch(pool, reserved_tokens=0)
    a, b = started(pool, make_request(4)), started(pool, make_request(4))
    batch.add(a)
    batch.add(b)
    batch.make_room()
    assert len(batch) == 2
    batch.remove(b)
    assert len(batch) == 1
    assert not batch.parked


def test_cached_pages_are_evicted_before_anybody_is_parked(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=3, page_size=4)
    pages = pool.allocate(1)
    match = pool.cache([1, 2, 3, 4], pages, pool.match_prefix([0]))
    pool.release([], match)
    batch = RunningBatch(pool, reserved_tokens=0)
    request = started(pool, make_request(8))
    batch.add(request)
    assert batch.make_room() == ([], [])
    assert len(request.pages) == 3
    assert pool.allocator.cached == 0
    pool.check()
