"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web

from diptych.server.body import decode_json, read_body
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.logprobs import chat_logprobs
from diptych.server.plan import PromptPlan, check_rid, plan_samples
from diptych.server.requests import ChatMessage, ChatRequest
from diptych.server.sample import Sample, SampleDelta, StreamUsage, usage
from diptych.server.sampling_options import (
    LengthFields,
    samples_per_prompt,
    sampling_params,
    text_options,
    whole,
)
from diptych.server.sse import json_response, stream
from diptych.server.unsupported import refuse_unsupported

MAX_TOP_LOGPROBS = 20


async def chat_completions(request: web.Request) -> web.StreamResponse:
    frontend = request.app[FRONTEND]
    body = await read_body(request)
    asked = decode_json(body, ChatRequest)
    refuse_unsupported(body)
    frontend.check_model(asked.model)
    frontend.manager.check_admission()
    answer = _ChatAnswer(frontend, asked)
    ids = await frontend.manager.encode_prompt(
        render_chat(
            frontend,
            asked.messages,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            extra=asked.chat_template_kwargs,
        ),
        add_special_tokens=False,
        param="messages",
    )
    n = samples_per_prompt(asked.n)
    use_new_name = asked.max_completion_tokens is not None
    length = LengthFields(
        max_tokens=asked.max_completion_tokens if use_new_name else asked.max_tokens,
        max_name="max_completion_tokens" if use_new_name else "max_tokens",
        min_tokens=asked.min_tokens,
        min_name="min_tokens",
        prompt_name="messages",
        least=1,
    )
    sampling = sampling_params(asked, length, len(ids), frontend.model.limits, logprobs=answer.logprobs)
    plan = PromptPlan(ids=ids, sampling=sampling, text=text_options(asked), n=n, rid=answer.id)
    specs = plan_samples(frontend, [plan], asked)
    with frontend.manager.start(specs) as running:
        answer.samples = running.samples
        if asked.stream:
            return await stream(request, running, answer.chunks, answer.usage_chunk)
        return json_response(answer.whole(await running.finished()))


def render_chat(
    frontend: Frontend,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    extra: dict[str, object] | None = None,
) -> str:
    """Messages to prompt text. Raises `BadRequest` naming the message at fault."""
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    return frontend.require_chat_template().render(
        [_template_message(message, position) for position, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        extra=extra,
    )


def _template_message(message: ChatMessage, position: int) -> dict[str, object]:
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise BadRequest("the message has no content", param=f"messages[{position}].content")
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    fields: dict[str, object] = {
        # OpenAI's newer name; templates know the older one.
        "role": "system" if message.role == "developer" else message.role,
        "content": content if content is not None else "",
    }
    optional = msgspec.structs.asdict(message)
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if optional[name] is not None:
            fields[name] = optional[name]
    return fields


class _ChatAnswer:
    """The response objects of one chat request."""

    def __init__(self, frontend: Frontend, asked: ChatRequest) -> None:
        self.id = check_rid(asked.rid) if asked.rid is not None else f"chatcmpl-{secrets.token_hex(16)}"
        self.logprobs: int | None = None
        if asked.top_logprobs is not None and not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.logprobs:
            self.logprobs = whole(asked.top_logprobs, 0, 0, MAX_TOP_LOGPROBS, "top_logprobs")
        self.samples: Sequence[Sample] = ()
        self._stream_usage = StreamUsage(asked.stream_options)
        self._tokenizer = frontend.tokenizer
        self._model = frontend.served_name
        self._created = int(time.time())
        self._greeted: set[int] = set()

    def _envelope(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, samples: Sequence[Sample]) -> dict[str, object]:
        choices = [
            {
                "index": sample.spec.index,
                "message": {"role": "assistant", "content": sample.text, "refusal": None},
                "logprobs": None
                if self.logprobs is None
                else chat_logprobs(self._tokenizer, sample.logprobs),
                "finish_reason": sample.finish.kind if sample.finish else None,
                "matched_stop": sample.matched,
            }
            for sample in samples
        ]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": usage(samples)}

    def chunks(self, deltas: Sequence[SampleDelta]) -> Iterable[object]:
        for delta in deltas:
            if delta.index not in self._greeted:
                self._greeted.add(delta.index)
                yield self._chunk(delta.index, {"role": "assistant", "content": ""})
            logprobs = None
            if self.logprobs is not None and delta.logprobs:
                logprobs = chat_logprobs(self._tokenizer, delta.logprobs)
            if delta.text or logprobs:
                yield self._chunk(delta.index, {"content": delta.text}, logprobs)
            if delta.finish is not None:
                yield self._chunk(delta.index, {}, finish=delta.finish.kind, matched=delta.matched)

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: dict[str, object] | None = None,
        finish: str | None = None,
        matched: str | int | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["matched_stop"] = matched
        envelope = self._envelope("chat.completion.chunk")
        return {**envelope, "choices": [choice], **self._stream_usage.field(self.samples)}

    def usage_chunk(self) -> Iterable[object]:
        return self._stream_usage.closing(self.samples, self._envelope("chat.completion.chunk"))
