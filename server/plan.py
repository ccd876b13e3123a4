"""From a request's prompts to the samples that the scheduler is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from diptych.common_config import get_disagg
from diptych.engine.wire import SamplingParams
from diptych.server.bounds import MAX_RID_LENGTH
from diptych.server.errors import BadRequest
from diptych.server.frontend import Frontend, WorkerKind
from diptych.server.requests import OpenAIRequest, PairFields
from diptych.server.rooms import Pairing, pair_samples
from diptych.server.sample import SampleSpec
from diptych.server.sampling_options import TextOptions, sample_seed

MAX_SAMPLES = 4096
"""Of one request: prompts times `n`."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt of a request, with how its samples are drawn."""

    ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    n: int
    rid: str


def check_rid(rid: str) -> str:
    if not 0 < len(rid) <= MAX_RID_LENGTH or not rid.isprintable():
        raise BadRequest(f"rid must be 1 to {MAX_RID_LENGTH} printable characters", param="rid")
    return rid


def plan_samples(
    frontend: Frontend, prompts: Sequence[PromptPlan], pair: PairFields | OpenAIRequest
) -> list[SampleSpec]:
    """Samples prompt by prompt, each with its seed and, in a pair, its room. Raises `BadRequest`."""
    total = sum(prompt.n for prompt in prompts)
    if total > MAX_SAMPLES:
        raise BadRequest(f"the request has {total} samples; at most {MAX_SAMPLES} work", param="n")
    pairings = _pairings(frontend, pair, total)
    specs: list[SampleSpec] = []
    for prompt_index, prompt in enumerate(prompts):
        for number in range(prompt.n):
            seed = sample_seed(prompt.sampling.seed, number)
            index = len(specs)
            specs.append(
                SampleSpec(
                    index=index,
                    prompt_index=prompt_index,
                    prompt_ids=prompt.ids,
                    sampling=msgspec.structs.replace(prompt.sampling, seed=seed),
                    text=prompt.text,
                    rid=prompt.rid,
                    pairing=pairings[index],
                )
            )
    return specs


def _pairings(frontend: Frontend, pair: PairFields | OpenAIRequest, samples: int) -> Sequence[Pairing | None]:
    if frontend.kind is WorkerKind.COLOCATED:
        return [None] * samples
    if pair.bootstrap_room is None:
        raise BadRequest(
            f"this is a {frontend.kind} worker: requests come through a router, which adds bootstrap_room",
            param="bootstrap_room",
        )
    pairings = pair_samples(
        pair.bootstrap_room,
        pair.bootstrap_host,
        pair.bootstrap_port,
        samples,
        default_port=get_disagg().disaggregation_bootstrap_port,
    )
    if frontend.kind is WorkerKind.DECODE and any(pairing.host is None for pairing in pairings):
        raise BadRequest(
            "this is a decode worker: bootstrap_host must say where the prefill's bootstrap service is",
            param="bootstrap_host",
        )
    return pairings
