"""What the sampler must remember about one sample while it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from diptych.engine.grammar.matcher import Matcher
from diptych.engine.sampling.noise import stream_state
from diptych.engine.wire import Finish, SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only overflow."""


class SamplingState:
    """One sample's evolving facts, made at admission and updated with every accepted token.

    It can be rebuilt at any time from the prompt and the output so far, and then draws the same tokens:
    the noise depends on (seed, output position) alone.

    Dense per-vocabulary tensors (`seen`, `counts`) exist only if a penalty asks for them."""

    __slots__ = (
        "_last",
        "_stop_set",
        "bias_ids",
        "bias_values",
        "counts",
        "filtered",
        "grammar",
        "greedy",
        "num_output",
        "params",
        "seen",
        "stop_ids",
        "stream",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        output_ids: Sequence[int] = (),
        grammar: Matcher | None = None,
    ) -> None:
        """`output_ids` are tokens already accepted. `grammar`: this sample's own, at its beginning. Raises
        ValueError if `logit_bias` names a token outside the vocabulary."""
        self.params = params
        self.grammar = grammar
        self.num_output = 0
        self.greedy = params.temperature < GREEDY_BELOW
        self.filtered = 0 < params.top_k < vocab_size or params.top_p < 1.0
        self.stream = stream_state(params.seed)
        self._last: int | None = None

        # With ignore_eos an end-of-sequence id is an ordinary token: it may be drawn, and ends nothing.
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._stop_set = frozenset(stops)
        self.stop_ids = np.array(sorted(t for t in stops if 0 <= t < vocab_size), dtype=np.int64)

        self.bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        outside = self.bias_ids[(self.bias_ids < 0) | (self.bias_ids >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"logit_bias: token {outside[0]} is outside the vocabulary of {vocab_size} tokens"
            )

        self.seen: torch.Tensor | None = None
        """[V] bool: tokens of prompt and output, for the repetition penalty."""
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)] = True
        self.counts: torch.Tensor | None = None
        """[V] float32: occurrences in the output, for the presence and frequency penalties."""
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

        for token_id in output_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Record an accepted token: one drawn here, or handed over by the prefill worker."""
        self.num_output += 1
        self._last = token_id
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1

    @property
    def stops_masked(self) -> bool:
        """Whether the next token may not be a stop token (`min_new_tokens` not reached)."""
        return self.num_output < self.params.min_new_tokens and self.stop_ids.size > 0

    @property
    def edits_logits(self) -> bool:
        """Whether the model's logits change before the next draw: by bias, penalty or mask."""
        return (
            self.seen is not None
            or self.counts is not None
            or self.bias_ids.size > 0
            or self.grammar is not None
            or self.stops_masked
        )

    @property
    def goes_on(self) -> bool:
        """Whether a stop token may only come where the grammar allows nothing else."""
        return self.stops_masked or self.params.ignore_eos

    def allows(self, token_id: int) -> bool:
        """Whether a token that another worker drew may come next."""
        return self.grammar is None or self.grammar.allows(token_id)

    @property
    def failure(self) -> Finish | None:
        """Why the sample can't go on: its grammar can't be followed."""
        if self.grammar is None or self.grammar.failure is None:
            return None
        return Finish(kind="error", message=self.grammar.failure, status=400, param=self.grammar.param)

    def finish_reason(self) -> Finish | None:
        """Why the sample ends with the token appended last, or None if it goes on. A stop token on the
        last allowed position is a `stop`, not a `length`. A grammar that can't be followed is an `error`:
        that token is not the client's."""
        if self.failure is not None:
            return self.failure
        if self.grammar is not None and self.grammar.ended:
            return Finish(kind="stop", matched=self._last)
        if self._last in self._stop_set and self.num_output > self.params.min_new_tokens:
            return Finish(kind="stop", matched=self._last)
        if self.num_output >= self.params.max_new_tokens:
            return Finish(kind="length")
        return None
