"""Prompts that are computed before decode has reserved pages for them.

They only use what nobody else wants: a step in which no prompt with a known destination can be computed, and
pages up to a limit. The newest gives way as soon as such a prompt needs its pages or its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.kv_pool import KVPool
from diptych.engine.prompt_queue import PrefillPlan, PromptQueue
from diptych.engine.runner import Chunk
from diptych.prefill.request import PrefillRequest


class OptimisticPrompts:
    def __init__(self, queue: PromptQueue, pool: KVPool, *, max_pages: int) -> None:
        """`queue`: of its own, on the same pool. `max_pages`: what these prompts may hold together, cached
        prefixes included; 0 computes nothing ahead."""
        self._queue = queue
        self._pool = pool
        self._max_pages = max_pages
        self._holding: dict[int, PrefillRequest] = {}
        """By room, oldest first: those that have pages, computed to the end or not."""

    def plan(self, candidates: Iterable[PrefillRequest], *, max_admit: int) -> PrefillPlan:
        """Chunks for one step: started prompts, then `candidates` in order while limit and pool allow."""
        if self._max_pages == 0:
            return PrefillPlan([], [])
        left = self._max_pages - sum(len(request.pages) for request in self._holding.values())
        tried: list[PrefillRequest] = []
        for request in candidates:
            if left <= 0 or len(tried) == max_admit:
                break
            pages = self._pool.layout.pages_for(request.num_prompt)
            if pages <= left:
                left -= pages
                tried.append(request)
                self._queue.add(request)
        plan = self._queue.plan(max_admit=max_admit)
        for request in tried:
            if len(request.pages):
                self._holding[request.room] = request
            else:
                self._queue.remove(request)
        return plan

    def completed(self, chunks: list[Chunk]) -> None:
        """After the step: prompts that are now computed stay here, but need no more of it."""
        self._queue.completed(chunks)

    def newest(self) -> PrefillRequest | None:
        return next(reversed(self._holding.values()), None)

    def release(self, request: PrefillRequest) -> bool:
        """It has a destination, is put back or has ended. False when it was not computed ahead."""
        self._queue.remove(request)
        return self._holding.pop(request.room, None) is not None
