"""`POST /v1/chat/completions`."""

from __future__ import annotations

from aiohttp import web

from diptych.server.body import decode_json, read_body
from diptych.server.chat_answer import ChatAnswer
from diptych.server.chat_prompt import render_chat, template_variables, text_of
from diptych.server.chat_reading import Reading
from diptych.server.chat_tools import ToolUse, tool_use
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.grammar_options import grammar_option
from diptych.server.plan import PromptPlan, plan_samples
from diptych.server.requests import UNSUPPORTED, ChatRequest
from diptych.server.sampling_options import (
    LengthFields,
    samples_per_prompt,
    sampling_params,
    text_options,
)
from diptych.server.sse import json_response, stream
from diptych.server.unsupported import Unsupported

_HONOURED = ("tools", "tool_choice")
_refuse = Unsupported({name: values for name, values in UNSUPPORTED.items() if name not in _HONOURED}).refuse


async def chat_completions(request: web.Request) -> web.StreamResponse:
    frontend = request.app[FRONTEND]
    body = await read_body(request)
    asked = decode_json(body, ChatRequest)
    _refuse(body)
    frontend.check_model(asked.model)
    frontend.manager.check_admission()
    tools = tool_use(frontend, asked)
    prompt = _prompt(frontend, asked, tools)
    continued = text_of(asked.messages[-1]) if asked.continue_final_message else ""
    reading = Reading(frontend, asked, prompt, tools, grammar_option(asked), continued)
    answer = ChatAnswer(frontend, asked, reading)
    ids = await frontend.manager.encode_prompt(prompt, add_special_tokens=False, param="messages")
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
    sampling = sampling_params(
        asked,
        length,
        len(ids),
        frontend.model.limits,
        logprobs=answer.logprobs,
        grammar=reading.grammar(),
    )
    plan = PromptPlan(
        ids=ids, sampling=sampling, text=reading.text_options(text_options(asked)), n=n, rid=answer.id
    )
    specs = plan_samples(frontend, [plan], asked)
    with frontend.manager.start(specs) as running:
        answer.samples = running.samples
        if asked.stream:
            return await stream(request, running, answer.chunks, answer.usage_chunk)
        return json_response(answer.whole(await running.finished()))


def _prompt(frontend: Frontend, asked: ChatRequest, tools: ToolUse | None) -> str:
    effort = asked.reasoning_effort
    extra = template_variables(frontend, asked.chat_template_kwargs, effort, "reasoning_effort")
    return render_chat(
        frontend,
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        tools=tools.shown if tools else (),
        extra=extra,
    )
