"""Routes that act on the worker: health, cache flush, abort, tokenise."""

from __future__ import annotations

import asyncio
import secrets
from typing import cast

from aiohttp import web

from diptych.engine.wire import FlushCache, SamplingParams
from diptych.server.body import read_json
from diptych.server.chat_prompt import render_chat
from diptych.server.chat_tools import checked_functions
from diptych.server.errors import BadRequest, DeadlineExceeded, Unavailable
from diptych.server.frontend import FRONTEND, WorkerKind
from diptych.server.plan import PromptPlan, plan_samples
from diptych.server.requests import AbortRequest, DetokenizeRequest, PairFields, TokenizeRequest
from diptych.server.sampling_options import TextOptions, check_token_ids
from diptych.server.sse import json_response

FLUSH_TIMEOUT = 30.0
PROBE_TIMEOUT = 20.0
"""Seconds for one token, with other requests running."""


async def health(request: web.Request) -> web.Response:
    """200 while this worker serves; anyone may ask."""
    request.app[FRONTEND].manager.check_alive()
    return web.Response()


async def health_generate(request: web.Request) -> web.Response:
    """200 when the scheduler works: a colocated worker generates a token; half of a pair can't do so alone
    and answers for its event loop."""
    frontend = request.app[FRONTEND]
    manager = frontend.manager
    manager.check_admission()
    if frontend.kind is not WorkerKind.COLOCATED:
        try:
            await manager.calls.state(PROBE_TIMEOUT)
        except DeadlineExceeded as error:
            raise Unavailable(error.message) from None
        return web.Response()
    if manager.paused:
        raise Unavailable("paused; POST /continue_generation ends that")
    plan = PromptPlan(
        ids=[0],
        sampling=SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
        text=TextOptions(),
        n=1,
        rid=f"health-{secrets.token_hex(8)}",
    )
    with manager.start(plan_samples(frontend, [plan], PairFields())) as running:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await running.finished()
        except TimeoutError:
            raise Unavailable(f"no token within {PROBE_TIMEOUT:g} s") from None
    return web.Response()


async def flush_cache(request: web.Request) -> web.Response:
    calls = request.app[FRONTEND].manager.calls
    reply = await calls.act(lambda call_id: FlushCache(call_id=call_id), FLUSH_TIMEOUT)
    if not reply.ok:
        raise BadRequest(reply.message or "the cache can't be flushed now", code="flush_refused")
    return json_response({"success": True, "message": reply.message or "the prefix cache is empty"})


async def abort_request(request: web.Request) -> web.Response:
    """Ends requests by their id; unknown ones have ended already, which is no error."""
    manager = request.app[FRONTEND].manager
    asked = await read_json(request, AbortRequest)
    if asked.abort_all:
        return json_response({"aborted": manager.abort_all()})
    if asked.rid is None:
        raise BadRequest("give rid or abort_all", param="rid")
    rids = [asked.rid] if isinstance(asked.rid, str) else asked.rid
    return json_response({"aborted": sum(manager.abort(rid) for rid in rids)})


async def tokenize(request: web.Request) -> web.Response:
    frontend = request.app[FRONTEND]
    asked = await read_json(request, TokenizeRequest)
    frontend.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    special = asked.add_special_tokens
    tokens: list[int] | list[list[int]]
    if asked.messages is not None:
        checked_functions(asked.tools or [])
        text = render_chat(
            frontend,
            asked.messages,
            add_generation_prompt=asked.add_generation_prompt is not False,
            tools=asked.tools or (),
            extra=asked.chat_template_kwargs,
        )
        tokens = await frontend.manager.encode(text, add_special_tokens=bool(special))
        count: int | list[int] = len(tokens)
    elif isinstance(asked.prompt, list):
        tokens = [
            await frontend.manager.encode(text, add_special_tokens=special is not False)
            for text in asked.prompt
        ]
        count = [len(ids) for ids in tokens]
    else:
        tokens = await frontend.manager.encode(asked.prompt or "", add_special_tokens=special is not False)
        count = len(tokens)
    return json_response(
        {"tokens": tokens, "count": count, "max_model_len": frontend.model.limits.context_length}
    )


async def detokenize(request: web.Request) -> web.Response:
    frontend = request.app[FRONTEND]
    asked = await read_json(request, DetokenizeRequest)
    frontend.check_model(asked.model)
    skip = asked.skip_special_tokens is not False
    limits = frontend.model.limits

    def decode(ids: list[int], param: str) -> str:
        return frontend.tokenizer.decode(check_token_ids(ids, limits, param), skip_special_tokens=skip)

    text: str | list[str]
    kinds = {type(entry) for entry in asked.tokens}
    if kinds == {list}:
        lists = cast("list[list[int]]", asked.tokens)
        text = [decode(ids, f"tokens[{position}]") for position, ids in enumerate(lists)]
    elif kinds <= {int}:
        text = decode(cast("list[int]", asked.tokens), "tokens")
    else:
        raise BadRequest("tokens mixes token ids and lists", param="tokens")
    # Two names for one thing: clients of either kind of server find theirs.
    return json_response({"text": text, "prompt": text})
