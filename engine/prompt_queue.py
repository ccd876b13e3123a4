"""Which prompt tokens the next prefill step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych.engine.kv_pool import KVPool
from diptych.engine.request import Request
from diptych.engine.runner import Chunk


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    chunks: list[Chunk]
    admitted: list[Request]
    """Requests that got their pages, and perhaps a cached prefix, in this plan."""


def _nothing() -> bool:
    return False


class PromptQueue:
    """First come, first served, under a token budget per step that several prompts share.

    A request gets pages for its whole prompt when it is admitted: they are then as contiguous as the pool
    allows, and a started prompt can always be finished.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        token_budget: int,
        chunked: bool,
        reuse_prefix: bool,
        keep_free: Callable[[], int],
    ) -> None:
        """`token_budget`: prompt tokens per step; without `chunked`, a longer prompt runs alone and whole.
        `keep_free()`: pages that admission must leave available for requests that are decoding."""
        self._pool = pool
        self._budget = token_budget
        self._chunked = chunked
        self._reuse_prefix = reuse_prefix
        self._keep_free = keep_free
        self._waiting: deque[Request] = deque()
        self._started: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """One that has its pages from another queue of this pool goes on where it stood there."""
        (self._started if len(request.pages) else self._waiting).append(request)

    def remove(self, request: Request) -> None:
        """Forget a request; its pages are the caller's to release."""
        if request in self._started:
            self._started.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def plan(self, *, max_admit: int, reclaim: Callable[[], bool] = _nothing) -> PrefillPlan:
        """Chunks for one step, oldest prompts first; empty when nothing can run now. `reclaim()` is asked for
        pages when the next prompt finds too few; False: there is nothing more to take back."""
        chunks: list[Chunk] = []
        admitted: list[Request] = []
        budget = self._budget
        for request in self._started:
            budget -= self._take(chunks, request, budget)
        while (
            self._waiting
            and budget > 0
            and len(admitted) < max_admit
            and self._admit(self._waiting[0], reclaim)
        ):
            request = self._waiting.popleft()
            admitted.append(request)
            self._started.append(request)
            budget -= self._take(chunks, request, budget)
        return PrefillPlan(chunks, admitted)

    def completed(self, chunks: list[Chunk]) -> list[Request]:
        """After the step: the requests whose prompt is now computed leave the queue, in plan order."""
        done = [chunk.request for chunk in chunks if chunk.request.prefilled]
        self._started = [request for request in self._started if not request.prefilled]
        return done

    def _take(self, chunks: list[Chunk], request: Request, budget: int) -> int:
        remaining = request.num_prompt - request.num_computed
        if self._chunked:
            length = min(remaining, budget)
        else:
            length = remaining if remaining <= budget or not chunks else 0
        if length > 0:
            chunks.append(Chunk(request, length))
        return max(length, 0)

    def _admit(self, request: Request, reclaim: Callable[[], bool]) -> bool:
        """Give `request` its cached prefix and pages for the rest of its prompt, if they are available."""
        # Prompt logprobs need the logits of every prompt token, so those prompts are computed whole.
        reuse = self._reuse_prefix and request.params.prompt_logprobs is None
        while True:
            # Anew each time: what is reclaimed may go to the cache and be part of this very prompt.
            match = self._pool.match_prefix(request.prompt_ids if reuse else request.prompt_ids[:1])
            needed = self._pool.layout.pages_for(request.num_prompt) - len(match.pages)
            if self._pool.can_allocate(needed + self._keep_free()):
                break
            self._pool.release([], match)
            if not reclaim():
                return False
        request.match = match
        request.cached_tokens = request.num_computed = match.num_tokens
        request.add_pages(match.pages)
        request.add_pages(self._pool.allocate(needed, after=request.last_page))
        return True
