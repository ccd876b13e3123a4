"""One token for every row of a batch, each row under its own sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diptych.engine.sampling.draw import draw_filtered, draw_unfiltered, scale
from diptych.engine.sampling.edits import edit_logits
from diptych.engine.sampling.logprobs import token_logprobs
from diptych.engine.sampling.noise import uniforms
from diptych.engine.sampling.state import SamplingState
from diptych.engine.sampling.top import first_argmax
from diptych.engine.wire import TokenLogprob


class SampledToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    """Present if the sample's parameters ask for logprobs."""


class Sampler:
    """Draws the next tokens of a batch. Holds no state of requests: a row's token depends on its logits
    and its `SamplingState` only, not on what else is in the batch.

    Rows are grouped by what they need (greedy or drawn, edited or not, filtered or not), and a group works
    on its own copy of the logits: the batch pays only for the options in use."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Logits [B, V] float32, left as they are; row i belongs to `states[i]`. The caller appends an
        accepted token to its state. Raises ValueError on a shape that doesn't fit."""
        if logits.shape != (len(states), self.vocab_size):
            raise ValueError(f"logits {tuple(logits.shape)}, expected {(len(states), self.vocab_size)}")
        if not states:
            return []
        tokens = self._draw(logits, states).tolist()
        logprobs = self._logprobs(logits, states, tokens)
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]

    def _draw(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        groups: dict[tuple[bool, bool, bool], list[int]] = {}
        for row, state in enumerate(states):
            key = (state.greedy, state.edits_logits, not state.greedy and state.filtered)
            groups.setdefault(key, []).append(row)
        if list(groups) == [(True, False, False)]:
            return first_argmax(logits)
        tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
        for (greedy, edited, filtered), rows in groups.items():
            index = torch.tensor(rows, device=logits.device)
            members = [states[row] for row in rows]
            own = logits.index_select(0, index)
            if edited:
                edit_logits(own, members)
            if greedy:
                tokens[index] = first_argmax(own)
                continue
            params = [state.params for state in members]
            noise = uniforms([state.stream for state in members], [state.num_output for state in members])
            u = torch.from_numpy(noise).to(logits.device)
            scaled = scale(own, [p.temperature for p in params])
            tokens[index] = (draw_filtered if filtered else draw_unfiltered)(scaled, params, u)
        return tokens

    @staticmethod
    def _logprobs(
        logits: torch.Tensor, states: Sequence[SamplingState], tokens: Sequence[int]
    ) -> dict[int, TokenLogprob]:
        asked = {row: n for row, state in enumerate(states) if (n := state.params.logprobs) is not None}
        if not asked:
            return {}
        rows = list(asked)
        chosen = logits if len(rows) == len(states) else logits[torch.tensor(rows, device=logits.device)]
        found = token_logprobs(chosen, [tokens[row] for row in rows], list(asked.values()))
        return dict(zip(rows, found, strict=True))
