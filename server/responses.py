"""`POST /v1/responses`: text in, text out; nothing is stored."""

from __future__ import annotations

from aiohttp import web

from diptych.server.body import decode_json, read_body
from diptych.server.bounds import LEAST_OUTPUT, MAX_TOP_LOGPROBS
from diptych.server.chat_prompt import render_chat, template_variables
from diptych.server.chat_reading import Reading
from diptych.server.errors import BadRequest
from diptych.server.frontend import FRONTEND, Frontend
from diptych.server.plan import PromptPlan, plan_samples
from diptych.server.responses_answer import ResponseAnswer, event_frame
from diptych.server.responses_request import (
    LOGPROBS,
    REFUSED,
    ResponsesRequest,
    effort_of,
    grammar_of,
    messages_of,
)
from diptych.server.sampling_options import LengthFields, sampling_params, text_options, whole
from diptych.server.sse import json_response, stream


async def responses(request: web.Request) -> web.StreamResponse:
    frontend = request.app[FRONTEND]
    body = await read_body(request)
    asked = decode_json(body, ResponsesRequest)
    REFUSED.refuse(body)
    frontend.check_model(asked.model)
    frontend.manager.check_admission()
    prompt = _prompt(frontend, asked)
    reading = Reading(frontend, asked, prompt, None, grammar_of(asked))
    ids = await frontend.manager.encode_prompt(prompt, add_special_tokens=False, param="input")
    length = LengthFields(
        max_tokens=asked.max_output_tokens,
        max_name="max_output_tokens",
        min_tokens=asked.min_tokens,
        min_name="min_tokens",
        prompt_name="input",
        least=LEAST_OUTPUT,
    )
    logprobs = _logprobs(asked)
    sampling = sampling_params(
        asked, length, len(ids), frontend.model.limits, logprobs=logprobs, grammar=reading.grammar()
    )
    answer = ResponseAnswer(frontend, asked, sampling, reading, with_logprobs=logprobs is not None)
    text = reading.text_options(text_options(asked))
    plan = PromptPlan(ids=ids, sampling=sampling, text=text, n=1, rid=answer.id)
    with frontend.manager.start(plan_samples(frontend, [plan], asked)) as running:
        (answer.sample,) = running.samples
        if asked.stream:
            return await stream(
                request,
                running,
                answer.events,
                answer.closing,
                failed=answer.failed,
                frame=event_frame,
                end=b"",
            )
        await running.finished()
        return json_response(answer.whole())


def _prompt(frontend: Frontend, asked: ResponsesRequest) -> str:
    messages = messages_of(asked)
    extra = template_variables(frontend, asked.chat_template_kwargs, effort_of(asked), "reasoning.effort")
    try:
        return render_chat(frontend, messages, add_generation_prompt=True, extra=extra)
    except BadRequest as error:
        # Here the messages have another name.
        raise BadRequest(error.message, param="input", code=error.code) from None


def _logprobs(asked: ResponsesRequest) -> int | None:
    """Alternatives per token, or None: either of two fields asks for logprobs."""
    most_likely = whole(asked.top_logprobs, 0, 0, MAX_TOP_LOGPROBS, "top_logprobs")
    return most_likely if most_likely or LOGPROBS in (asked.include or ()) else None
