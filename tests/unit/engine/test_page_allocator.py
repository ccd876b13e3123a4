import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.engine.page_allocator import OutOfPages, PageAllocator


def test_allocates_the_smallest_run_that_fits() -> None:
    pool = PageAllocator(20)
    pages = pool.allocate(20)
    pool.release(pages[0:8])
    pool.release(pages[10:13])
    assert pool.allocate(3) == [10, 11, 12]
    assert pool.allocate(3) == [0, 1, 2]


def test_extends_the_callers_run_when_the_next_page_is_free() -> None:
    pool = PageAllocator(8)
    first = pool.allocate(2)
    assert pool.allocate(1, after=first[-1]) == [2]


def test_falls_back_to_the_fewest_runs_in_address_order() -> None:
    pool = PageAllocator(10)
    pages = pool.allocate(10)
    pool.release(pages[0:2])
    pool.release(pages[4:8])
    assert pool.allocate(5) == [0, 4, 5, 6, 7]


def test_refuses_more_than_is_free_and_takes_nothing() -> None:
    pool = PageAllocator(4)
    pool.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 free of 4"):
        pool.allocate(2)
    assert (pool.free, pool.held) == (1, 3)
    pool.check()


@pytest.mark.parametrize("wrong", ["twice in one call", "not held", "quarantined"])
def test_a_page_can_not_be_released_by_somebody_who_does_not_hold_it(wrong: str) -> None:
    pool = PageAllocator(4)
    page = pool.allocate(1)[0]
    if wrong == "not held":
        pool.release([page])
    if wrong == "quarantined":
        pool.quarantine([page])
    with pytest.raises(AssertionError):
        pool.release([page, page] if wrong == "twice in one call" else [page])


class Accounting(RuleBasedStateMachine):
    """Any sequence of legal moves keeps every page in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PageAllocator(23)
        self.held: list[int] = []
        self.cached: list[int] = []
        self.quarantined: list[int] = []

    @rule(n=st.integers(0, 9), extend=st.booleans())
    def allocate(self, n: int, extend: bool) -> None:
        if self.pool.can_allocate(n):
            pages = self.pool.allocate(n, after=self.held[-1] if extend and self.held else None)
            assert len(set(pages)) == n
            assert not set(pages) & {*self.held, *self.cached, *self.quarantined}
            self.held += pages
        else:
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)

    @rule(data=st.data(), move=st.sampled_from(["release", "cache", "evict", "quarantine", "confirm"]))
    def move_some(self, data: st.DataObject, move: str) -> None:
        source = {"evict": self.cached, "confirm": self.quarantined}.get(move, self.held)
        pages = data.draw(st.lists(st.sampled_from(source), unique=True)) if source else []
        for page in pages:
            source.remove(page)
        match move:
            case "release":
                self.pool.release(pages)
            case "cache":
                self.pool.give_to_cache(pages)
                self.cached += pages
            case "evict":
                self.pool.evicted(pages)
            case "quarantine":
                self.pool.quarantine(pages)
                self.quarantined += pages
            case "confirm":
                self.pool.end_quarantine(pages)

    @invariant()
    def adds_up(self) -> None:
        pool = self.pool
        pool.check()
        assert (pool.held, pool.cached, pool.quarantined) == (
            len(self.held),
            len(self.cached),
            len(self.quarantined),
        )
        assert pool.free + pool.held + pool.cached + pool.quarantined == pool.total


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
