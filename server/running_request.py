"""The samples of one HTTP request while they run, and the news of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from diptych.server.errors import ApiError, engine_error
from diptych.server.sample import Sample, SampleDelta


class RunningRequest:
    """The samples of one HTTP request. Leaving the `with` block aborts those that haven't ended, so a
    handler that is cancelled (the client left) or fails frees everything at once."""

    def __init__(
        self, samples: Sequence[Sample], *, whole: bool, release: Callable[[RunningRequest], None]
    ) -> None:
        """`release` aborts what still runs; called once, at the end of the `with` block."""
        self.samples = list(samples)
        self._release = release
        self._whole = whole
        self._dirty: dict[int, None] = {}
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self._open = len(self.samples)

    def notice(self, sample: Sample) -> None:
        """Something of `sample` is new. With `whole`, only its end is news."""
        if sample.finish is not None:
            self._open -= 1
            if sample.finish.kind == "error" and self._error is None:
                finish = sample.finish
                self._error = engine_error(finish.message, status=finish.status, param=finish.param)
        elif self._whole:
            return
        self._dirty[sample.spec.index] = None
        if not self._whole or not self._open or self._error:
            self._news.set()

    def fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._news.set()

    @property
    def has_output(self) -> bool:
        return any(sample.first_token is not None for sample in self.samples)

    @property
    def ended(self) -> bool:
        return self._open == 0 and not self._dirty

    async def next(self) -> list[SampleDelta]:
        """Wait for news and take it. Raises the request's `ApiError` if it failed. Not when `ended`."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        deltas = [self.samples[index].take() for index in self._dirty]
        self._dirty.clear()
        return deltas

    async def finished(self) -> list[Sample]:
        """Wait for the end of every sample."""
        while not self.ended:
            await self.next()
        return self.samples

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self)
