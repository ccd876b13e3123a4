"""Where one sample stands in its grammar."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import xgrammar

MAX_STEP_SECONDS = 0.1
"""Processor time that one token of one sample may take. Ambiguous grammars take more with every token, and
all running requests wait for it; usual ones take a few microseconds."""


class Matcher:
    """Follows a sample's tokens, each accepted exactly once, and says which may come next.

    Trouble ends the sample, not the step that it shares with others: `failure` then says why, and every token
    is allowed."""

    __slots__ = ("_matcher", "_row", "_stops", "failure", "param")

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        *,
        vocab_size: int,
        end_ids: Collection[int],
        stop_ids: Collection[int],
        param: str | None,
    ) -> None:
        """`end_ids` end the text where the grammar allows its end, and are no text themselves. `stop_ids`:
        others that end the sample, drawn as the text that they are. `param`: the request field of the
        grammar."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(end_ids))
        self._row: npt.NDArray[np.int32] = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self._stops = np.array(sorted({*end_ids, *stop_ids}), dtype=np.int64)
        self.param = param
        self.failure: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the end of the text was drawn."""
        return bool(self._matcher.is_terminated())

    def allowed(self, *, go_on: bool) -> npt.NDArray[np.int32]:
        """Bit i % 32 of word i // 32 tells whether token i may come next: [ceil(V / 32)] int32, valid until
        the next call. With `go_on` a stop token may only where nothing else does."""
        started = time.thread_time()
        row: npt.NDArray[np.int32] = self._row[0]
        limited = self.failure is None and self._matcher.fill_next_token_bitmask(self._row)
        self._check_time(started)
        if self.failure is None and limited and not row.any():
            self.failure = "the grammar allows no token here"
        if self.failure is not None or not limited:
            row.fill(-1)
        if go_on and self.failure is None:
            self._without_stops(row)
        return row

    def allows(self, token_id: int) -> bool:
        word = int(self.allowed(go_on=False)[token_id // 32])
        return self.failure is None and bool(word >> token_id % 32 & 1)

    def accept(self, token_id: int) -> None:
        """A token that is now part of the sample."""
        if self.failure is not None:
            return
        started = time.thread_time()
        if not self._matcher.accept_token(token_id):
            self.failure = f"token {token_id} doesn't fit the grammar"
        self._check_time(started)

    def _check_time(self, started: float) -> None:
        if self.failure is None and time.thread_time() - started > MAX_STEP_SECONDS:
            self.failure = "the grammar is too ambiguous to be followed in time"

    def _without_stops(self, row: npt.NDArray[np.int32]) -> None:
        before = row.copy()
        bits = row.view(np.uint32)
        np.bitwise_and.at(bits, self._stops // 32, ~(np.uint32(1) << (self._stops % 32).astype(np.uint32)))
        if not row.any():
            row[:] = before
