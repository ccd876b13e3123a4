from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from diptych.engine.radix_cache import RadixCache


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_match_finds_the_longest_prefix_in_whole_pages(page_size: int) -> None:
    cache = RadixCache(page_size)
    tokens = list(range(5 * page_size))
    assert cache.insert(tokens, [10, 11, 12, 13, 14]).num_new_pages == 5
    assert cache.match(tokens).pages == [10, 11, 12, 13, 14]
    assert cache.match([*tokens, 7]).num_tokens == 5 * page_size
    differs_in_page_3 = [*tokens[: 4 * page_size - 1], 999, *tokens[4 * page_size :]]
    match = cache.match(differs_in_page_3)
    assert (match.pages, match.num_tokens) == ([10, 11, 12], 3 * page_size)
    assert cache.match([999, *tokens]).pages == []
    assert cache.match([]).num_tokens == 0
    assert cache.match(tokens[: page_size - 1]).pages == []
    cache.check()


def test_insert_reports_whose_page_serves_each_token() -> None:
    cache = RadixCache(2)
    cache.insert([1, 1, 2, 2, 3, 3], [10, 11, 12])
    # The caller took page 10 from a match, computed 21 itself, and brings 22 for tokens not cached yet.
    result = cache.insert([1, 1, 2, 2, 9, 9, 5], [10, 21, 22])
    assert result.duplicates == [21]
    assert result.num_new_pages == 1
    assert cache.match([1, 1, 2, 2, 9, 9]).pages == [10, 11, 22]
    assert cache.match([1, 1, 2, 2, 3, 3]).pages == [10, 11, 12]
    assert cache.cached_pages == 4
    cache.check()


def test_insert_wants_one_page_for_each_whole_page_of_tokens() -> None:
    cache = RadixCache(2)
    for pages in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"{len(pages)} pages for 2 whole pages"):
            cache.insert([1, 2, 3, 4, 5], pages)
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)


def test_eviction_takes_the_least_recently_used_branch_from_its_end() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2, 3], [1, 2, 3])
    cache.insert([1, 2, 4, 5], [1, 2, 4, 5])
    cache.insert([8, 9], [8, 9])
    cache.match([1, 2, 3])
    assert cache.evict(1) == [5]
    assert cache.evict(2) == [4, 9]
    cache.match([8])
    assert cache.evict(10) == [3, 2, 1, 8]
    assert cache.cached_pages == cache.evictable_pages == 0
    assert cache.evict(1) == []
    cache.check()


def test_a_locked_path_survives_eviction_until_the_last_unlock() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2, 3, 4], [1, 2, 3, 4])
    match = cache.match([1, 2])
    cache.lock(match.node)
    cache.lock(match.node)
    assert cache.evictable_pages == 2
    assert cache.evict(10) == [4, 3]
    cache.unlock(match.node)
    assert cache.evict(10) == []
    cache.unlock(match.node)
    assert cache.evictable_pages == 2
    assert cache.evict(10) == [2, 1]
    cache.check()


def test_a_lock_still_covers_its_whole_path_after_splits_above_its_end() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2, 3, 4], [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4])
    cache.lock(match.node)
    cache.insert([1, 2, 7], [1, 2, 7])
    cache.match([1])
    assert cache.evict(10) == [7]
    cache.check()
    cache.unlock(match.node)
    assert cache.evictable_pages == 4
    assert cache.evict(10) == [4, 3, 2, 1]
    cache.check()


def test_lock_and_unlock_out_of_order_are_refused() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2], [1, 2])
    match = cache.match([1, 2])
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(match.node)
    cache.evict(1)
    with pytest.raises(ValueError, match="evicted"):
        cache.lock(match.node)
    assert cache.evictable_pages == 1
    nothing = cache.match([5])
    cache.lock(nothing.node)
    cache.unlock(nothing.node)
    cache.check()


def test_reset_returns_every_page_and_refuses_while_one_is_in_use() -> None:
    cache = RadixCache(1)
    cache.insert([1, 2, 3], [1, 2, 3])
    cache.insert([1, 5], [1, 5])
    match = cache.match([1, 5])
    cache.lock(match.node)
    with pytest.raises(RuntimeError, match="2 cached pages are in use"):
        cache.reset()
    assert cache.cached_pages == 4
    cache.unlock(match.node)
    assert sorted(cache.reset()) == [1, 2, 3, 5]
    assert cache.match([1, 2]).pages == []
    assert cache.evict(5) == []
    with pytest.raises(ValueError, match="evicted"):
        cache.lock(match.node)
    cache.insert([1, 2], [7, 8])
    assert cache.evict(5) == [8, 7]
    cache.check()


def test_a_disabled_cache_finds_and_takes_nothing() -> None:
    cache = RadixCache(2, enabled=False)
    result = cache.insert([1, 2, 3, 4], [6, 7])
    assert (result.duplicates, result.num_new_pages) == ([6, 7], 0)
    match = cache.match([1, 2, 3, 4])
    assert (match.pages, match.num_tokens) == ([], 0)
    cache.lock(match.node)
    cache.unlock(result.node)
    assert (cache.cached_pages, cache.evictable_pages) == (0, 0)
    assert cache.evict(3) == []
    assert cache.reset() == []
    cache.check()


def test_long_prompts_at_page_size_1_run_no_python_loop_per_token() -> None:
    cache = RadixCache(1)
    shared = [token * 7919 % 50_000 for token in range(8000)]
    cache.insert(shared, range(8000))
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    for parting in (7_900, 3_000, 1, 5_555):
        prompt = [*shared[:parting], 60_000 + parting, *shared[parting:]]
        first_new = 10_000 * parting
        previous = sys.gettrace()
        sys.settrace(count)
        try:
            match = cache.match(prompt)
            result = cache.insert(prompt, [*match.pages, *range(first_new, first_new + 8001 - parting)])
        finally:
            sys.settrace(previous)
        assert (match.num_tokens, result.num_new_pages) == (parting, 8001 - parting)
    assert lines < 1000
    cache.check()


class _Page:
    def __init__(self, page: int) -> None:
        self.page = page
        self.last_used = 0
        self.locks = 0


class RadixCacheAgainstPageDict(RuleBasedStateMachine):
    """The model: a dict from every cached prefix (a tuple of whole pages) to the page that ends it."""

    matches = Bundle("matches")
    tokens = st.lists(st.integers(0, 2), max_size=14)

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.cache = RadixCache(page_size)
        self.model: dict[tuple[int, ...], _Page] = {}
        self.clock = 0
        self.next_page = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def cached(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [prefix for prefix in self.prefixes(tokens) if prefix in self.model]

    def use(self, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.model[prefix].last_used = self.clock

    @rule(tokens=tokens)
    def match(self, tokens: list[int]) -> None:
        expected = self.cached(tokens)
        self.use(expected)
        found = self.cache.match(tokens)
        assert found.pages == [self.model[prefix].page for prefix in expected]
        assert found.num_tokens == len(found.pages) * self.page_size

    @rule(target=matches, tokens=tokens)
    def match_and_lock(self, tokens: list[int]) -> tuple[Any, list[_Page]]:
        self.use(self.cached(tokens))
        node = self.cache.match(tokens).node
        self.cache.lock(node)
        pages = [self.model[prefix] for prefix in self.cached(tokens)]
        for page in pages:
            page.locks += 1
        return node, pages

    @rule(match=consumes(matches))
    def unlock(self, match: tuple[Any, list[_Page]]) -> None:
        node, pages = match
        self.cache.unlock(node)
        for page in pages:
            page.locks -= 1

    @rule(tokens=tokens, reuse=st.booleans())
    def insert(self, tokens: list[int], reuse: bool) -> None:
        self.offer(tokens, reuse)

    @rule(target=matches, tokens=tokens, reuse=st.booleans())
    def insert_and_lock(self, tokens: list[int], reuse: bool) -> tuple[Any, list[_Page]]:
        node = self.offer(tokens, reuse)
        self.cache.lock(node)
        pages = [self.model[prefix] for prefix in self.prefixes(tokens)]
        for page in pages:
            page.locks += 1
        return node, pages

    def offer(self, tokens: list[int], reuse: bool) -> Any:
        """`reuse`: bring the cached pages of the prefix, as a request that matched it does."""
        prefixes = self.prefixes(tokens)
        pages, duplicates = [], []
        for prefix in prefixes:
            if prefix in self.model and reuse:
                pages.append(self.model[prefix].page)
                continue
            pages.append(self.next_page)
            self.next_page += 1
            if prefix in self.model:
                duplicates.append(pages[-1])
            else:
                self.model[prefix] = _Page(pages[-1])
        before = self.cache.cached_pages
        self.use(prefixes)
        result = self.cache.insert(tokens, pages)
        assert result.duplicates == duplicates
        assert before + result.num_new_pages == len(self.model)
        return result.node

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        expected = []
        while len(expected) < count:
            inner = {prefix[: -self.page_size] for prefix in self.model}
            leaves = [p for p, page in self.model.items() if p not in inner and not page.locks]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.model[prefix].last_used)
            expected.append(self.model.pop(oldest).page)
        assert self.cache.evict(count) == expected

    @rule()
    def reset(self) -> None:
        if any(page.locks for page in self.model.values()):
            with pytest.raises(RuntimeError):
                self.cache.reset()
        else:
            assert sorted(self.cache.reset()) == sorted(page.page for page in self.model.values())
            self.model = {}

    @invariant()
    def counts_agree(self) -> None:
        self.cache.check()
        assert self.cache.cached_pages == len(self.model)
        assert self.cache.evictable_pages == sum(not page.locks for page in self.model.values())


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_any_sequence_of_operations_agrees_with_a_dict_of_pages(page_size: int) -> None:
    run_state_machine_as_test(
        lambda: RadixCacheAgainstPageDict(page_size),
        settings=settings(max_examples=100, stateful_step_count=40, deadline=None),
    )
