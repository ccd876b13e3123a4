from collections.abc import Callable

from diptych.engine.kv_pool import KVPool
from diptych.engine.prompt_queue import PromptQueue
from diptych.engine.request import Request
from diptych.engine.runner import Chunk

MakePool = Callable[..., KVPool]
MakeRequest = Callable[..., Request]


def queue_for(pool: KVPool, *, budget: int = 8, chunked: bool = True, keep_free: int = 0) -> PromptQueue:
    return PromptQueue(
        pool, token_budget=budget, chunked=chunked, reuse_prefix=True, keep_free=lambda: keep_free
    )


def run(queue: PromptQueue, **options: int) -> list[tuple[str, int]]:
    """Plan and pretend to compute one step."""
    plan = queue.plan(max_admit=options.get("max_admit", 100))
    for chunk in plan.chunks:
        chunk.request.num_computed += chunk.length
    queue.completed(plan.chunks)
    return [(chunk.request.rid, chunk.length) for chunk in plan.chunks]


def test_a_long_prompt_is_computed_in_chunks_and_shares_its_last_step(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    queue = queue_for(make_pool())
    long, short = make_request(18), make_request(5)
    queue.add(long)
    queue.add(short)
    assert run(queue) == [(long.rid, 8)]
    assert run(queue) == [(long.rid, 8)]
    assert run(queue) == [(long.rid, 2), (short.rid, 5)]
    assert run(queue) == []
    assert len(queue) == 0


def test_without_chunking_a_prompt_over_the_budget_runs_alone_and_whole(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    queue = queue_for(make_pool(), chunked=False)
    requests = [make_request(n) for n in (18, 3, 4, 6)]
    for request in requests:
        queue.add(request)
    steps = []
    while len(queue):
        steps.append([length for _, length in run(queue)])
    assert steps == [[18], [3, 4], [6]]


def test_all_pages_of_a_prompt_are_taken_at_admission_in_one_run(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=16, page_size=4)
    queue = queue_for(pool)
    request = make_request(18)
    queue.add(request)
    run(queue)
    assert request.pages.tolist() == [0, 1, 2, 3, 4]
    assert pool.allocator.held == 5


def test_a_prompt_waits_for_pages_and_holds_none_meanwhile(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(num_pages=4, page_size=4)
    taken = pool.allocate(2)
    queue = queue_for(pool)
    request = make_request(12)
    queue.add(request)
    assert run(queue) == []
    assert (pool.allocator.held, queue.num_waiting) == (2, 1)
    pool.release(taken, None)
    assert run(queue) == [(request.rid, 8)]


def test_pages_kept_free_for_running_requests_are_not_given_to_prompts(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    queue = queue_for(make_pool(num_pages=4, page_size=4), keep_free=2)
    queue.add(make_request(12))
    assert run(queue) == []


def test_max_admit_bounds_new_prompts_only(make_pool: MakePool, make_request: MakeRequest) -> None:
    queue = queue_for(make_pool())
    first, second = make_request(10), make_request(4)
    queue.add(first)
    queue.add(second)
    assert run(queue, max_admit=1) == [(first.rid, 8)]
    assert run(queue, max_admit=0) == [(first.rid, 2)]
    assert run(queue, max_admit=1) == [(second.rid, 4)]


def test_a_cached_prefix_is_not_computed_again_and_leaves_a_token_to_compute(
    make_pool: MakePool, make_request: MakeRequest
) -> None:
    pool = make_pool(page_size=4)
    queue = queue_for(pool, budget=100)
    first = make_request(8)
    queue.add(first)
    run(queue)
    assert first.match is not None
    first.match = pool.cache(first.prompt_ids, first.pages.tolist(), first.match)
    pool.release(first.take_pages(), first.match)

    # The whole prompt is cached, yet its last token must run for its logits: only one page is reused.
    again = make_request(8)
    queue.add(again)
    assert run(queue) == [(again.rid, 4)]
    assert again.cached_tokens == 4
    longer = make_request(11)
    queue.add(longer)
    assert run(queue) == [(longer.rid, 3)]
    assert longer.cached_tokens == 8
    pool.check()


def test_prompt_logprobs_ignore_the_cache(make_pool: MakePool, make_request: MakeRequest) -> None:
    pool = make_pool(page_size=4)
    queue = queue_for(pool, budget=100)
    first = make_request(8)
    queue.add(first)
    run(queue)
    assert first.match is not None
    pool.cache(first.prompt_ids, first.pages.tolist(), first.match)
    scored = make_request(8, prompt_logprobs=0)
    queue.add(scored)
    assert run(queue) == [(scored.rid, 8)]
    assert scored.cached_tokens == 0


def test_a_removed_request_is_not_planned(make_pool: MakePool, make_request: MakeRequest) -> None:
    queue = queue_for(make_pool())
    started, waiting = make_request(18), make_request(5)
    queue.add(started)
    queue.add(waiting)
    run(queue)
    queue.remove(started)
    queue.remove(waiting)
    assert run(queue) == []


def test_a_chunk_knows_that_it_completes_the_prompt(make_request: MakeRequest) -> None:
    request = make_request(5)
    request.num_computed = 2
    assert Chunk(request, 3).completes_prompt
    assert not Chunk(request, 2).completes_prompt
