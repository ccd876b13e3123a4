"""The right answers, from `launch-colocated`, and whether an output is one of them."""

from __future__ import annotations

from pathlib import Path

from support.cluster import Colocated
from support.oracle import greedy_oracle
from support.soak.plan import MAX_OUTPUT_TOKENS, prompt_set


class Answers:
    """Of one prompt set, as long as any request asks for."""

    def __init__(self, seed: int, model: Path) -> None:
        """Starts a colocated worker and ends it again."""
        self._model = model
        self.prompts = prompt_set(seed)
        sampling = {"temperature": 0, "max_new_tokens": MAX_OUTPUT_TOKENS, "ignore_eos": True}
        bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in self.prompts]
        colocated = Colocated("--dtype", "float32", "--max-total-tokens", "32768", model=str(model))
        try:
            answers = colocated.client.post_all("/generate", bodies)
            assert all(status == 200 for status, _ in answers), answers
            self.outputs: list[list[int]] = [answer["output_ids"] for _, answer in answers]
            colocated.close()
        finally:
            colocated.worker.launched.kill()

    def wrong(self, prompt: int, output: list[int]) -> str | None:
        """Why an output, whole or cut short, is not the beginning of the answer; None when it is."""
        right = self.outputs[prompt][: len(output)]
        if output == right:
            return None
        # Where two tokens are as good as equally likely, another order of additions may choose the other.
        try:
            greedy_oracle(self._model).near_ties(self.prompts[prompt], output)
        except AssertionError as error:
            return f"prompt {prompt}: {error}; output {output}, colocated {right}"
        return None
