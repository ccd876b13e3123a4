"""`transformers` as the judge of greedy output."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

NEAR_TIE = 1e-3
"""Where the reference's two best logits are closer than this, either token is right."""


class GreedyOracle:
    """Judges a greedy continuation with one forward over prompt and output: the output is what
    `transformers` would generate exactly if each token is the argmax given everything before it."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._judged: dict[tuple[int, ...], list[tuple[list[int], list[bool]]]] = {}

    def near_ties(self, prompt: list[int], output: list[int]) -> int:
        """Number of tokens that differ from the argmax within `NEAR_TIE`; AssertionError on a real
        difference, with the position, both tokens and the margin."""
        outputs = self._judged.setdefault(tuple(prompt), [])
        for judged, ties in outputs:
            # The verdict on a token needs only what comes before it: one on an output holds for its start.
            if judged[: len(output)] == output:
                return sum(ties[: len(output)])
        ties = self._judge(prompt, output)
        outputs.append((list(output), ties))
        return sum(ties)

    @torch.inference_mode()
    def _judge(self, prompt: list[int], output: list[int]) -> list[bool]:
        """For each token, whether it is a near tie."""
        logits = self._model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
        ties = []
        for i, token in enumerate(output):
            best = int(logits[i].argmax())
            if token != best:
                margin = float(logits[i, best] - logits[i, token])
                assert margin < NEAR_TIE, (
                    f"prompt of {len(prompt)} tokens: output token {i} is {token}, transformers says {best} "
                    f"(margin {margin:.4f})"
                )
            ties.append(token != best)
        return ties

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] log-probabilities; row i predicts token i + 1."""
        return torch.log_softmax(self._model(torch.tensor([tokens])).logits[0], dim=-1)


@cache
def greedy_oracle(model_dir: Path) -> GreedyOracle:
    return GreedyOracle(model_dir)
