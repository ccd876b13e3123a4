"""One step of compute: forward, then sample, counted and timed."""

from __future__ import annotations

import time

from diptych.engine.metrics import EngineMetrics
from diptych.engine.request import Request
from diptych.engine.runner import Chunk, ModelRunner
from diptych.engine.sampling import SampledToken, Sampler


class Stepper:
    """The runner and the sampler behind the two kinds of step a scheduler can take."""

    def __init__(self, runner: ModelRunner, metrics: EngineMetrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self._sampler = Sampler(runner.model.config.vocab_size, runner.pool.slab.device)

    def prefill(self, chunks: list[Chunk]) -> list[SampledToken | None]:
        """Compute chunks; the first output token of each chunk that completes its prompt, in order. The pages
        of all chunks are in memory when this returns: they may leave.

        None for a request that wants no token (`max_new_tokens` 0).
        """
        started = time.perf_counter()
        completing = [chunk.request for chunk in chunks if chunk.completes_prompt]
        logits = self._runner.prefill(chunks)
        rows = [i for i, request in enumerate(completing) if request.params.max_new_tokens > 0]
        sampled = iter(
            self._sampler.sample(logits[rows], [completing[i].state for i in rows]) if rows else ()
        )
        tokens = [next(sampled) if r.params.max_new_tokens > 0 else None for r in completing]
        self._runner.wait_for_kv()
        self._metrics.prefill_tokens.inc(sum(chunk.length for chunk in chunks))
        self._metrics.prefill_seconds.inc(time.perf_counter() - started)
        return tokens

    def decode(self, requests: list[Request]) -> list[SampledToken]:
        """One decode step: the next token of each request, in order."""
        started = time.perf_counter()
        tokens = self._sampler.sample(self._runner.decode(requests), [r.state for r in requests])
        self._metrics.decode_tokens.inc(len(requests))
        self._metrics.decode_seconds.inc(time.perf_counter() - started)
        return tokens


STEPPERS: dict[str, type[Stepper]] = {"none": Stepper}
"""How steps are taken, by speculative algorithm. Without one a decode step gives each request one token."""
