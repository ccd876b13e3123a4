"""Drawing tokens from logits: one sample's state, the batched sampler, and prompt log-probabilities."""

from diptych.engine.sampling.logprobs import prompt_logprobs
from diptych.engine.sampling.sampler import SampledToken, Sampler
from diptych.engine.sampling.state import SamplingState

__all__ = ["SampledToken", "Sampler", "SamplingState", "prompt_logprobs"]
