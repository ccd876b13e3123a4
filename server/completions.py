"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, inf
from typing import cast

from aiohttp import web

from diptych.server.body import decode_json, read_body
from diptych.server.bounds import MAX_TOP_LOGPROBS
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.logprobs import CompletionLogprobs, TextOffset
from diptych.server.plan import PromptPlan, check_rid, plan_samples
from diptych.server.requests import CompletionRequest
from diptych.server.sample import Sample, SampleDelta, StreamUsage, usage
from diptych.server.sampling_options import (
    LengthFields,
    check_token_ids,
    samples_per_prompt,
    sampling_params,
    text_options,
    whole,
)
from diptych.server.sse import json_response, stream
from diptych.server.unsupported import refuse_unsupported

USUAL_OUTPUT = 16
"""Tokens, as OpenAI has it."""
MAX_PROMPTS = 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """None when the client sent token ids."""


async def completions(request: web.Request) -> web.StreamResponse:
    frontend = request.app[FRONTEND]
    body = await read_body(request)
    asked = decode_json(body, CompletionRequest)
    refuse_unsupported(body)
    frontend.check_model(asked.model)
    frontend.manager.check_admission()
    n = samples_per_prompt(asked.n)
    drawn = _samples_drawn(asked, n)
    prompts = await tokenize_prompts(frontend, asked.prompt, "prompt")
    logprobs = None if asked.logprobs is None else whole(asked.logprobs, 0, 0, MAX_TOP_LOGPROBS, "logprobs")
    use_new_name = asked.max_completion_tokens is not None
    length = LengthFields(
        max_tokens=asked.max_completion_tokens if use_new_name else asked.max_tokens,
        max_name="max_completion_tokens" if use_new_name else "max_tokens",
        min_tokens=asked.min_tokens,
        min_name="min_tokens",
        prompt_name="prompt",
        usual=USUAL_OUTPUT,
    )
    answer = _CompletionAnswer(frontend, asked, prompts, logprobs)
    text = text_options(asked)
    plans = [
        PromptPlan(
            ids=prompt.ids,
            sampling=sampling_params(
                asked,
                length,
                len(prompt.ids),
                frontend.model.limits,
                # To choose among samples takes their logprobs, shown or not.
                logprobs=0 if logprobs is None and drawn > n else logprobs,
                prompt_logprobs=logprobs if asked.echo else None,
            ),
            text=text,
            n=drawn,
            rid=answer.id,
        )
        for prompt in prompts
    ]
    with frontend.manager.start(plan_samples(frontend, plans, asked)) as running:
        answer.samples = running.samples
        if asked.stream:
            return await stream(request, running, answer.chunks, answer.usage_chunk)
        return json_response(answer.whole(await running.finished(), n))


def _samples_drawn(asked: CompletionRequest, n: int) -> int:
    """Of each prompt. Raises `BadRequest` for a `best_of` that can't be had."""
    drawn = n if asked.best_of is None else samples_per_prompt(asked.best_of, "best_of")
    if drawn < n:
        raise BadRequest(
            f"best_of is {drawn}, and n, the number of choices to return, is {n}", param="best_of"
        )
    if drawn > n and asked.stream:
        raise BadRequest(
            "which samples are best is known at the end: best_of can't be streamed", param="best_of"
        )
    return drawn


def best_samples(samples: Sequence[Sample], n: int) -> list[Sample]:
    """Of each prompt the `n` samples with the highest log-probability per token, the best one first. All of
    them, in their order, if there are no more."""
    prompts: dict[int, list[Sample]] = {}
    for sample in samples:
        prompts.setdefault(sample.spec.prompt_index, []).append(sample)
    return [
        sample
        for drawn in prompts.values()
        for sample in (drawn if len(drawn) == n else sorted(drawn, key=_mean_logprob, reverse=True)[:n])
    ]


def _mean_logprob(sample: Sample) -> float:
    logprobs = [token.logprob for token in sample.logprobs]
    return fsum(logprobs) / len(logprobs) if logprobs else -inf


async def tokenize_prompts(
    frontend: Frontend, given: str | Sequence[str | int | list[int]], param: str
) -> list[Prompt]:
    """One text, several, one list of token ids, or several lists. Raises `BadRequest` naming `param`."""
    if isinstance(given, str):
        return [await _from_text(frontend, given, param)]
    if not given:
        raise BadRequest(f"{param} is empty", param=param)
    kinds = {type(entry) for entry in given}
    if len(kinds) != 1:
        raise BadRequest(f"{param} mixes texts, token ids and lists", param=param)
    if kinds == {int}:
        return [_from_ids(frontend, cast("list[int]", list(given)), param)]
    if len(given) > MAX_PROMPTS:
        raise BadRequest(f"{param} holds {len(given)} prompts; at most {MAX_PROMPTS} work", param=param)
    if kinds == {str}:
        return [await _from_text(frontend, cast("str", entry), param) for entry in given]
    return [
        _from_ids(frontend, cast("list[int]", entry), f"{param}[{position}]")
        for position, entry in enumerate(given)
    ]


async def _from_text(frontend: Frontend, text: str, param: str) -> Prompt:
    # A tokenizer that begins every text with a special token would make one token of nothing.
    ids: list[int] = []
    if text:
        ids = await frontend.manager.encode_prompt(text, add_special_tokens=True, param=param)
    if not ids:
        raise BadRequest(f"{param} is empty", param=param)
    return Prompt(ids=ids, text=text)


def _from_ids(frontend: Frontend, ids: list[int], param: str) -> Prompt:
    if not ids:
        raise BadRequest(f"{param} is empty", param=param)
    return Prompt(ids=check_token_ids(ids, frontend.model.limits, param), text=None)


class _CompletionAnswer:
    """The response objects of one completion request."""

    def __init__(
        self,
        frontend: Frontend,
        asked: CompletionRequest,
        prompts: Sequence[Prompt],
        logprobs: int | None,
    ) -> None:
        self.id = check_rid(asked.rid) if asked.rid is not None else f"cmpl-{secrets.token_hex(16)}"
        self.samples: Sequence[Sample] = ()
        self._echo = bool(asked.echo)
        self._prompts = prompts
        self._shown = logprobs
        self._stream_usage = StreamUsage(asked.stream_options)
        self._skip_special = asked.skip_special_tokens is not False
        self._tokenizer = frontend.tokenizer
        self._model = frontend.served_name
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffset] = {}

    def _envelope(self) -> dict[str, object]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model}

    def _prompt_text(self, sample: Sample) -> str:
        if not self._echo:
            return ""
        prompt = self._prompts[sample.spec.prompt_index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special_tokens=self._skip_special)

    def _logprobs(
        self, sample: Sample, delta: Sample | SampleDelta, *, prompt_text: str | None
    ) -> dict[str, object]:
        """Of the delta's tokens; with `echo`, and the first time, of the prompt's before them."""
        offset = self._offsets.setdefault(sample.spec.index, self._offset())
        lists = CompletionLogprobs(self._tokenizer, offset)
        if self._echo and prompt_text is not None:
            lists.extend(sample.spec.prompt_ids, sample.prompt_logprobs)
            offset.jump(len(prompt_text))
        lists.extend(delta.token_ids, delta.logprobs)
        return lists.result()

    def _offset(self) -> TextOffset:
        return TextOffset(self._tokenizer, skip_special_tokens=self._skip_special)

    def whole(self, samples: Sequence[Sample], n: int) -> dict[str, object]:
        choices = []
        for index, sample in enumerate(best_samples(samples, n)):
            prompt_text = self._prompt_text(sample)
            choices.append(
                {
                    "index": index,
                    "text": prompt_text + sample.text,
                    "logprobs": None
                    if self._shown is None
                    else self._logprobs(sample, sample, prompt_text=prompt_text),
                    "finish_reason": sample.finish.kind if sample.finish else None,
                    "matched_stop": sample.matched,
                }
            )
        return {**self._envelope(), "choices": choices, "usage": usage(samples)}

    def chunks(self, deltas: Sequence[SampleDelta]) -> Iterable[object]:
        for delta in deltas:
            first = delta.index not in self._begun
            self._begun.add(delta.index)
            sample = self.samples[delta.index]
            prompt_text = self._prompt_text(sample) if first else None
            logprobs = None
            if self._shown is not None and (delta.token_ids or (first and self._echo)):
                logprobs = self._logprobs(sample, delta, prompt_text=prompt_text)
            text = (prompt_text or "") + delta.text
            if not (text or logprobs or delta.finish):
                continue
            choice: dict[str, object] = {
                "index": delta.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": delta.finish.kind if delta.finish else None,
            }
            if delta.finish is not None:
                choice["matched_stop"] = delta.matched
            yield {**self._envelope(), "choices": [choice], **self._stream_usage.field(self.samples)}

    def usage_chunk(self) -> Iterable[object]:
        return self._stream_usage.closing(self.samples, self._envelope())
