"""The KV memory of one scheduler: slab, page ownership and prefix cache, kept consistent with each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.kv_layout import KVLayout
from diptych.engine.page_allocator import OutOfPages, PageAllocator
from diptych.engine.radix_cache import PrefixMatch, RadixCache
from diptych.engine.slab import allocate_slab


class KVPool:
    """Allocation evicts cached pages when it must; pages that running requests read are locked."""

    def __init__(self, layout: KVLayout, num_pages: int, *, device: torch.device, cache: bool) -> None:
        self.layout = layout
        self.allocator = PageAllocator(num_pages)
        self.radix = RadixCache(layout.page_size, enabled=cache)
        self.slab = allocate_slab(layout, num_pages, device)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and cached ones that nobody reads."""
        return self.allocator.free + self.radix.evictable_pages

    def can_allocate(self, n: int) -> bool:
        return n <= self.available

    def allocate(self, n: int, *, after: int | None = None) -> list[int]:
        """Raises `OutOfPages`; then nothing was evicted or taken."""
        if n > self.available:
            raise OutOfPages(f"{n} pages asked for, {self.available} available of {self.allocator.total}")
        short = n - self.allocator.free
        if short > 0:
            self.allocator.evicted(self.radix.evict(short))
        return self.allocator.allocate(n, after=after)

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The cached whole pages of a prompt, locked for the caller (`unlock` with the match's node).

        At least one token is always left to compute, since its logits are needed.
        """
        usable = (len(token_ids) - 1) // self.layout.page_size * self.layout.page_size
        match = self.radix.match(token_ids[:usable])
        self.radix.lock(match.node)
        return match

    def cache(self, token_ids: Sequence[int], pages: Sequence[int], match: PrefixMatch) -> PrefixMatch:
        """Offer computed whole pages to the prefix cache; swaps the caller's lock to the longer path.

        Pages that the cache takes stop being the caller's; those that it already has under other numbers
        stay held by the caller. Returns the match that now locks the path.
        """
        whole = len(token_ids) // self.layout.page_size
        tokens = token_ids[: whole * self.layout.page_size]
        inserted = self.radix.insert(tokens, pages[:whole])
        duplicates = set(inserted.duplicates)
        taken = [page for page in self.allocator.held_among(pages[:whole]) if page not in duplicates]
        self.allocator.give_to_cache(taken)
        self.radix.lock(inserted.node)
        self.radix.unlock(match.node)
        return PrefixMatch(list(pages[:whole]), len(tokens), inserted.node)

    def release(self, pages: Sequence[int], match: PrefixMatch | None) -> None:
        """A request lets go of its pages: those it holds become free, those of the cache stay there."""
        self.allocator.release(self.allocator.held_among(pages))
        if match is not None:
            self.radix.unlock(match.node)

    def flush_cache(self) -> int:
        """Drop every cached page; raises if a running request reads one. Returns the number of pages."""
        pages = self.radix.reset()
        self.allocator.evicted(pages)
        return len(pages)

    def park(self, pages: Sequence[int]) -> torch.Tensor:
        """A host copy of pages, in order; the pages stay the caller's."""
        return self.slab[torch.as_tensor(pages, device=self.slab.device)].to("cpu", copy=True)

    def unpark(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        self.slab[torch.as_tensor(pages, device=self.slab.device)] = copy.to(self.slab.device)

    def counts(self) -> dict[str, int]:
        a = self.allocator
        return {
            "pages_total": a.total,
            "pages_free": a.free,
            "pages_cached": a.cached,
            "pages_held": a.held,
            "pages_quarantined": a.quarantined,
        }

    def check(self) -> None:
        """Raises AssertionError when page ownership and prefix cache disagree."""
        self.allocator.check()
        self.radix.check()
        assert self.allocator.cached == self.radix.cached_pages, (
            f"{self.allocator.cached} cached pages by state, {self.radix.cached_pages} in the prefix cache"
        )
