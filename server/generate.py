"""`POST /generate`: the native route, in the shape that SGLang's clients know."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from diptych.server.body import decode_json, read_body
from diptych.server.bounds import MAX_NATIVE_LOGPROBS, MAX_SEED
from diptych.server.completions import tokenize_prompts
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.grammar_options import refuse_outside_sampling_params
from diptych.server.logprobs import native_logprobs, native_top
from diptych.server.plan import PromptPlan, check_rid, plan_samples
from diptych.server.requests import GenerateRequest, NativeSampling
from diptych.server.sample import Sample, SampleDelta
from diptych.server.sampling_options import (
    LengthFields,
    samples_per_prompt,
    sampling_params,
    text_options,
    whole,
)
from diptych.server.sse import json_response, stream
from diptych.server.unsupported import refuse_unsupported

USUAL_OUTPUT = 128
"""Tokens, as SGLang has it."""
_INSIDE = "sampling_params."
"""Before the names of the fields that are in there."""

T = TypeVar("T", bool, int, str, NativeSampling)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """What one prompt's samples report."""

    wanted: bool
    start: int
    """First prompt token reported; the prompt's length for none."""
    top: int


async def generate(request: web.Request) -> web.StreamResponse:
    frontend = request.app[FRONTEND]
    body = await read_body(request)
    asked = decode_json(body, GenerateRequest)
    refuse_unsupported(body)
    refuse_outside_sampling_params(body)
    frontend.manager.check_admission()
    plans, reports = await _plan(frontend, asked)
    with frontend.manager.start(plan_samples(frontend, plans, asked)) as running:
        single = len(running.samples) == 1 and not _is_batch(asked)
        answer = _NativeAnswer(frontend, asked, running.samples, reports, single=single)
        if asked.stream:
            return await stream(request, running, answer.chunks, lambda: ())
        return json_response(answer.whole(await running.finished()))


async def _plan(frontend: Frontend, asked: GenerateRequest) -> tuple[list[PromptPlan], list[_Logprobs]]:
    if (asked.text is None) == (asked.input_ids is None):
        raise BadRequest("give either text or input_ids", param="text")
    if asked.text is not None:
        prompts, prompt_name = await tokenize_prompts(frontend, asked.text, "text"), "text"
    else:
        prompts, prompt_name = (
            await tokenize_prompts(frontend, asked.input_ids or [], "input_ids"),
            "input_ids",
        )
    count = len(prompts)
    params = _each(asked.sampling_params, count, NativeSampling(), "sampling_params")
    wanted = _each(asked.return_logprob, count, False, "return_logprob")
    starts = _each(asked.logprob_start_len, count, -1, "logprob_start_len")
    tops = _each(asked.top_logprobs_num, count, 0, "top_logprobs_num")
    rids = _rids(asked.rid, count)
    plans, reports = [], []
    for number, prompt in enumerate(prompts):
        fields = params[number]
        if fields.seed is None:
            whole(fields.sampling_seed, 0, 0, MAX_SEED, f"{_INSIDE}sampling_seed")
            fields = msgspec.structs.replace(fields, seed=fields.sampling_seed)
        size = len(prompt.ids)
        start = whole(starts[number], -1, -1, size, "logprob_start_len")
        report = _Logprobs(
            wanted=wanted[number],
            start=size if start < 0 else start,
            top=whole(tops[number], 0, 0, MAX_NATIVE_LOGPROBS, "top_logprobs_num"),
        )
        # Their own names first; clients of the OpenAI routes send the other ones.
        openai_max = fields.max_new_tokens is None and fields.max_tokens is not None
        openai_min = fields.min_new_tokens is None and fields.min_tokens is not None
        length = LengthFields(
            max_tokens=fields.max_tokens if openai_max else fields.max_new_tokens,
            max_name=_INSIDE + ("max_tokens" if openai_max else "max_new_tokens"),
            min_tokens=fields.min_tokens if openai_min else fields.min_new_tokens,
            min_name=_INSIDE + ("min_tokens" if openai_min else "min_new_tokens"),
            prompt_name=prompt_name,
            usual=USUAL_OUTPUT,
        )
        sampling = sampling_params(
            fields,
            length,
            size,
            frontend.model.limits,
            logprobs=report.top if report.wanted else None,
            prompt_logprobs=report.top if report.wanted and report.start < size else None,
            prefix=_INSIDE,
        )
        n = samples_per_prompt(fields.n, f"{_INSIDE}n")
        text = text_options(fields, _INSIDE)
        plans.append(PromptPlan(ids=prompt.ids, sampling=sampling, text=text, n=n, rid=rids[number]))
        reports.append(report)
    return plans, reports


def _each(given: T | list[T] | None, count: int, default: T, param: str) -> list[T]:
    """One value per prompt: a scalar is for all."""
    if given is None:
        return [default] * count
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise BadRequest(f"{param} has {len(given)} entries for {count} prompts", param=param)
    return given


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    if given is None:
        return [secrets.token_hex(16) for _ in range(count)]
    rids = [check_rid(rid) for rid in _each(given, count, "", "rid")]
    if isinstance(given, list) and len(set(rids)) != count:
        raise BadRequest("rid names a request twice", param="rid")
    return rids


def _is_batch(asked: GenerateRequest) -> bool:
    ids = asked.input_ids
    return isinstance(asked.text, list) or (ids is not None and isinstance(ids[0], list))


class _NativeAnswer:
    """The response objects of one native request. Streamed ones are cumulative, as clients expect here."""

    def __init__(
        self,
        frontend: Frontend,
        asked: GenerateRequest,
        samples: Sequence[Sample],
        reports: Sequence[_Logprobs],
        *,
        single: bool,
    ) -> None:
        self._tokenizer = frontend.tokenizer
        self._weight_version = frontend.weight_version
        self._samples = samples
        self._reports = reports
        self._single = single
        self._with_text = bool(asked.return_text_in_logprobs)

    def whole(self, samples: Sequence[Sample]) -> object:
        answers = [self._answer(sample) for sample in samples]
        return answers[0] if self._single else answers

    def chunks(self, deltas: Sequence[SampleDelta]) -> Iterable[object]:
        for delta in deltas:
            answer = self._answer(self._samples[delta.index])
            yield answer if self._single else answer | {"index": delta.index}

    def _answer(self, sample: Sample) -> dict[str, object]:
        meta: dict[str, object] = {
            "id": sample.spec.rid,
            "finish_reason": _finish_reason(sample),
            "prompt_tokens": len(sample.spec.prompt_ids),
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": sample.cached_tokens,
            "e2e_latency": time.perf_counter() - sample.started,
            "weight_version": self._weight_version,
        }
        report = self._reports[sample.spec.prompt_index]
        if report.wanted:
            meta |= self._logprobs(sample, report)
        return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": meta}

    def _logprobs(self, sample: Sample, report: _Logprobs) -> dict[str, object]:
        ids = sample.spec.prompt_ids
        prompt = sample.prompt_logprobs or []
        inputs: list[tuple[float | None, int, str | None]] = []
        # A decode worker has none: the prompt ran elsewhere, and whoever relays both answers merges them.
        for position in range(report.start, len(prompt)):
            entry = prompt[position]
            if entry is None:
                text = self._tokenizer.token_text(ids[position]) if self._with_text else None
                inputs.append((None, ids[position], text))
            else:
                inputs.extend(native_logprobs(self._tokenizer, [entry], with_text=self._with_text))
        result: dict[str, object] = {
            "input_token_logprobs": inputs,
            "output_token_logprobs": native_logprobs(
                self._tokenizer, sample.logprobs, with_text=self._with_text
            ),
        }
        if report.top:
            result["input_top_logprobs"] = native_top(
                self._tokenizer, prompt[report.start :], with_text=self._with_text
            )
            result["output_top_logprobs"] = native_top(
                self._tokenizer, sample.logprobs, with_text=self._with_text
            )
        return result


def _finish_reason(sample: Sample) -> dict[str, object] | None:
    finish = sample.finish
    if finish is None:
        return None
    match finish.kind:
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "stop":
            return {"type": "stop", "matched": sample.matched}
        case _:
            return {"type": finish.kind, "message": finish.message}
