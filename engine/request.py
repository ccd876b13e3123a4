"""One sample while a scheduler works on it: what both roles and the colocated worker have in common."""

from __future__ import annotations

import time

import numpy as np

from diptych.engine.radix_cache import PrefixMatch
from diptych.engine.sampling import SamplingState
from diptych.engine.wire import Generate, SamplingParams, TokenLogprob


class Request:
    """Tokens, pages and progress of one sample.

    Invariant: the KV of the first `num_computed` tokens of `prompt_ids + output_ids` is in `pages`, and
    `len(pages) * page_size >= num_computed`.
    """

    def __init__(self, message: Generate, state: SamplingState) -> None:
        self.rid = message.rid
        self.message = message
        self.prompt_ids = message.prompt_ids
        self.state = state
        self.output_ids: list[int] = []
        self.num_computed = 0
        self.cached_tokens = 0
        """Prompt tokens whose KV came from the prefix cache."""
        self.match: PrefixMatch | None = None
        """The locked prefix path, while the request reads cached pages."""
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.arrived_at = time.monotonic()
        self._pages = np.zeros(16, dtype=np.int64)
        self._num_pages = 0

    @property
    def params(self) -> SamplingParams:
        return self.message.sampling

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prefilled(self) -> bool:
        return self.num_computed >= self.num_prompt

    @property
    def pages(self) -> np.ndarray:
        """[num_pages] int64, in token order; a view, valid until the next change."""
        return self._pages[: self._num_pages]

    @property
    def last_page(self) -> int | None:
        return int(self._pages[self._num_pages - 1]) if self._num_pages else None

    def add_pages(self, pages: list[int]) -> None:
        needed = self._num_pages + len(pages)
        if needed > len(self._pages):
            grown = np.zeros(max(needed, 2 * len(self._pages)), dtype=np.int64)
            grown[: self._num_pages] = self.pages
            self._pages = grown
        self._pages[self._num_pages : needed] = pages
        self._num_pages = needed

    def take_pages(self) -> list[int]:
        """All pages, which the caller now answers for; the request has none left."""
        pages: list[int] = self.pages.tolist()
        self._num_pages = 0
        return pages

    def accept(self, token_id: int) -> None:
        """Append one output token."""
        self.output_ids.append(token_id)
        self.state.append(token_id)
