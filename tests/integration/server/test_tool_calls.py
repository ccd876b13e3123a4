"""Tools and thinking over HTTP: a worker that reads Hermes' calls and Qwen's thoughts, told what to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model
from diptych.server.tokenizer import Tokenizer

from .conftest import MODEL, Client, Worker, chat, say

ROUTE = "/v1/chat/completions"


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER = function(
    "get_weather",
    description="The weather of a place.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
TOOLS = [WEATHER, function("now")]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THOUGHT = "<think>\nWhere is Zürich 世?\n</think>\n\n"
CITY = '{"city": "Zürich \\"世\\" } </tool_call>"}'
ANSWERS = {
    "text": "It is sunny, I guess. ",
    "call": call("get_weather", CITY),
    "text and calls": "Let me look.\n" + call("get_weather", CITY) + "\n" + call("now", "{}"),
    "thought and call": THOUGHT + call("get_weather", CITY),
    "thought and text": THOUGHT + "Sunny.",
    "no call": call("other", "{}") + "<tool_call>{",
    "broken call": call("get_weather", '{"city": Zürich}') + " or so",
}

SLOWLY = {"delay": 0.003}
"""Token by token, so that they don't come together."""


@pytest.fixture(scope="module")
def reader() -> Iterator[Worker]:
    worker = Worker("colocated", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    yield worker
    code = worker.stop()
    assert (code, worker.stderr) == (0, "")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(prepare_model(MODEL, cache_dir=default_cache_dir()))


@pytest.fixture
def client(reader: Worker, session: aiohttp.ClientSession) -> Client:
    return Client(reader.url, session)


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return chat(text, **{"tools": TOOLS, **fields})


def assembled(events: list[dict]) -> list[dict]:
    """The choices that a stream adds up to, put together as OpenAI's client does."""
    choices: dict[int, dict] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            if choice["index"] not in choices:
                assert delta["role"] == "assistant"
                choices[choice["index"]] = {"message": {"role": "assistant"}, "logprobs": []}
            held = choices[choice["index"]]
            message = held["message"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
            held["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            if choice["finish_reason"] is not None:
                held["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def without_ids(message: dict) -> dict:
    calls = [{**made, "id": None} for made in message.get("tool_calls", ())]
    shown = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    return {**shown, "tool_calls": calls}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_adds_up_to_the_whole_answer(client: Client, name: str):
    body = asking(ANSWERS[name], logprobs=True, top_logprobs=1)
    _, answer = await client.post(ROUTE, body)
    events = await client.events(ROUTE, {**body, "stream_options": {"include_usage": True}})
    (whole,), (streamed,) = answer["choices"], assembled(events)
    assert without_ids(streamed["message"]) == without_ids(whole["message"])
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert streamed["logprobs"] == whole["logprobs"]["content"]
    assert len(streamed["logprobs"]) == answer["usage"]["completion_tokens"]
    assert events[-1]["usage"] == answer["usage"]


async def test_what_was_called_is_said(client: Client):
    _, answer = await client.post(ROUTE, asking(ANSWERS["text and calls"]))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me look."
    calls = [(made["type"], made["function"]) for made in message["tool_calls"]]
    assert calls == [
        ("function", {"name": "get_weather", "arguments": CITY}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    assert len({made["id"] for made in message["tool_calls"]}) == 2
    _, answer = await client.post(ROUTE, asking(ANSWERS["call"]))
    assert answer["choices"][0]["message"]["content"] is None


async def test_a_text_that_is_no_call_stays_content(client: Client):
    for name in ("text", "no call"):
        _, answer = await client.post(ROUTE, asking(ANSWERS[name]))
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWERS[name], "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_calls_come_as_openai_streams_them(client: Client):
    events = await client.events(ROUTE, asking(ANSWERS["call"], script=SLOWLY))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    ((first,),) = [deltas[1]["tool_calls"]]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[2:-1]]
    assert len(pieces) > 5
    assert "".join(pieces) == CITY
    assert (deltas[-1], events[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


async def test_each_sample_has_its_own_calls(client: Client):
    body = asking(ANSWERS["text and calls"], n=3)
    _, answer = await client.post(ROUTE, body)
    streamed = assembled(await client.events(ROUTE, body))
    messages = [choice["message"] for choice in [*answer["choices"], *streamed]]
    assert len({made["id"] for message in messages for made in message["tool_calls"]}) == 12
    assert [without_ids(message) for message in messages] == [without_ids(messages[0])] * 6


async def test_only_one_call_without_parallel_ones(client: Client):
    _, answer = await client.post(ROUTE, asking(ANSWERS["text and calls"], parallel_tool_calls=False))
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"


async def test_a_call_that_is_cut_off_is_no_finished_call(client: Client):
    _, answer = await client.post(ROUTE, asking(ANSWERS["call"], max_tokens=20))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert CITY.startswith(arguments)
    _, answer = await client.post(ROUTE, asking(ANSWERS["call"], stop=["rich"]))
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "rich")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zü'


async def test_a_call_can_be_aborted(client: Client):
    body = {**asking(ANSWERS["call"], script={"delay": 0.01, "after": 20, "hang": True}), "rid": "r1"}
    async with client.session.post(client.url + ROUTE, json={**body, "stream": True}) as response:
        async for line in response.content:
            if b'"city' in line:
                break
        assert (await client.post("/abort_request", {"rid": "r1"}))[1] == {"aborted": 1}
        rest = (await response.read()).decode()
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")


# ---- tool_choice ------------------------------------------------------------------------------------


async def sent(client: Client) -> dict:
    return (await client.received())[-1]


async def test_with_tool_choice_none_the_model_knows_of_no_tools(client: Client):
    _, answer = await client.post(ROUTE, asking(ANSWERS["call"], tool_choice="none"))
    hidden = await sent(client)
    assert answer["choices"][0]["message"]["content"] == ANSWERS["call"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    await client.post(ROUTE, chat(ANSWERS["call"]))
    assert hidden["prompt_ids"] == (await sent(client))["prompt_ids"]


async def test_a_required_call_is_held_to_its_schema(client: Client):
    _, answer = await client.post(ROUTE, asking(ANSWERS["call"], tool_choice="required"))
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    grammar = (await sent(client))["sampling"]["grammar"]
    assert (grammar["kind"], grammar["param"]) == ("structural_tag", "tool_choice")
    assert '"required":["city"]' in grammar["text"].replace(" ", "")
    assert "now" in grammar["text"]


async def test_a_named_call_ends_with_stop_as_openais_does(client: Client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = asking(ANSWERS["call"], tool_choice=choice)
    _, answer = await client.post(ROUTE, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert "now" not in (await sent(client))["sampling"]["grammar"]["text"]
    (streamed,) = assembled(await client.events(ROUTE, body))
    assert streamed["finish_reason"] == "stop"


def allowed(mode: str, *names: str) -> dict[str, object]:
    chosen = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}


async def test_only_allowed_tools_are_called_though_all_are_shown(client: Client):
    await client.post(ROUTE, asking(ANSWERS["call"]))
    prompt = (await sent(client))["prompt_ids"]
    for name, called in (("get_weather", True), ("now", False)):
        body = asking(ANSWERS["call"], tool_choice=allowed("auto", name))
        _, answer = await client.post(ROUTE, body)
        (choice,) = answer["choices"]
        received = await sent(client)
        assert received["prompt_ids"] == prompt
        assert "grammar" not in received["sampling"]
        assert ("tool_calls" in choice["message"]) is called
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")
        assert choice["message"]["content"] == (None if called else ANSWERS["call"])
        (streamed,) = assembled(await client.events(ROUTE, body))
        assert without_ids(streamed["message"]) == without_ids(choice["message"]) | {"role": "assistant"}


async def test_a_required_call_is_one_of_the_allowed_tools(client: Client):
    body = asking(ANSWERS["call"], tool_choice=allowed("required", "get_weather"))
    _, answer = await client.post(ROUTE, body)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    grammar = (await sent(client))["sampling"]["grammar"]
    assert grammar["param"] == "tool_choice"
    assert "get_weather" in grammar["text"]
    assert "now" not in grammar["text"]


async def test_strictness_counts_for_allowed_tools(client: Client):
    tools = [function("f", strict=True), WEATHER, function("g", strict=True)]
    for name, param in (("g", "tools[2].function.strict"), ("get_weather", None)):
        await client.post(ROUTE, asking("Hi", tools=tools, tool_choice=allowed("auto", name)))
        assert (await sent(client))["sampling"].get("grammar", {}).get("param") == param


async def test_a_free_answer_has_a_grammar_only_if_something_asks_for_one(client: Client):
    await client.post(ROUTE, asking("Hi"))
    assert "grammar" not in (await sent(client))["sampling"]
    await client.post(ROUTE, asking("Hi", tools=[function("f", strict=True)]))
    assert (await sent(client))["sampling"]["grammar"]["param"] == "tools[0].function.strict"
    await client.post(ROUTE, asking("{}", response_format={"type": "json_object"}))
    grammar = (await sent(client))["sampling"]["grammar"]
    assert (grammar["kind"], grammar["param"]) == ("structural_tag", "response_format")
    assert "get_weather" in grammar["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [WEATHER, {"function": {"name": "f"}}]}, "tools[1].type"),
        ({"tools": [function("get weather")]}, "tools[0].function.name"),
        ({"tools": [function("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [function("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function("f", parameters=[])]}, "tools[0].function.parameters"),
        (
            {"tools": [function("f", parameters={"properties": [1]})]},
            "tools[0].function.parameters.properties",
        ),
        ({"tools": [function("f", parameters={"required": "x"})]}, "tools[0].function.parameters.required"),
        (
            {"tools": [function("f", strict=True, parameters={"not": {}})]},
            "tools[0].function.parameters",
        ),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": allowed("auto", "now", "other")}, "tool_choice.allowed_tools.tools[1]"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("maybe", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [], "tool_choice": allowed("auto", "now")}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
async def test_bad_fields_are_named(client: Client, fields: dict, param: str):
    status, answer = await client.post(ROUTE, asking("Hi", **fields))
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_model_that_nobody_knows_to_call_tools_says_so(colocated: Worker, session):
    plain = Client(colocated.url, session)
    status, answer = await plain.post(ROUTE, asking("Hi"))
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer["error"]["message"]
    status, _ = await plain.post(ROUTE, asking("Hi", tool_choice="none"))
    assert status == 200
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    ]}]  # fmt: skip
    status, answer = await plain.post(ROUTE, {"messages": history})
    assert (status, answer["error"]["param"]) == (400, "messages[1].tool_calls")


# ---- the prompt -------------------------------------------------------------------------------------


async def test_a_template_without_tools_gets_them_in_a_system_message(client: Client, tokenizer: Tokenizer):
    made = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": CITY}}
    await client.post(
        ROUTE,
        {
            "tools": TOOLS,
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
                {"role": "user", "content": say("Warm.")},
            ],
        },
    )
    prompt = tokenizer.decode((await sent(client))["prompt_ids"], skip_special_tokens=False)
    system, _, rest = prompt.partition("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe brief.")
    for tool in TOOLS:
        assert json.dumps(tool) in system
    arguments = json.dumps(json.loads(CITY), ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in rest
    assert "<|im_start|>user\n<tool_response>\n20 degrees\n</tool_response><|im_end|>" in rest


async def test_tokenize_shows_the_same_prompt(client: Client):
    messages = [{"role": "user", "content": say("Hi")}]
    await client.post(ROUTE, {"messages": messages, "tools": TOOLS})
    _, answer = await client.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert answer["tokens"] == (await sent(client))["prompt_ids"]


# ---- thinking ---------------------------------------------------------------------------------------


async def test_thinking_is_apart_and_counted(client: Client, tokenizer: Tokenizer):
    _, answer = await client.post(ROUTE, chat(ANSWERS["thought and text"]))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Where is Zürich 世?", "Sunny.")
    thought = len(tokenizer.encode(THOUGHT.rstrip(), add_special_tokens=False))
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought <= counted <= thought + 1  # a token may hold the end of the tag and what follows
    _, answer = await client.post(ROUTE, chat("Sunny."))
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thinking_can_stay_in_the_content_or_be_left_out(client: Client):
    _, answer = await client.post(ROUTE, chat(ANSWERS["thought and text"], separate_reasoning=False))
    assert answer["choices"][0]["message"]["content"] == ANSWERS["thought and text"]
    body = chat(ANSWERS["thought and text"], include_reasoning=False)
    _, answer = await client.post(ROUTE, body)
    message = {"role": "assistant", "content": "Sunny."}
    assert answer["choices"][0]["message"] == {**message, "refusal": None}
    assert assembled(await client.events(ROUTE, body))[0]["message"] == message


async def test_thinking_streams_piece_by_piece_or_as_a_whole(client: Client):
    for pieces, options in ((3, {}), (1, {"stream_reasoning": False})):
        events = await client.events(ROUTE, chat(ANSWERS["thought and text"], script=SLOWLY, **options))
        deltas = [event["choices"][0]["delta"] for event in events]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        assert "".join(thoughts) == "Where is Zürich 世?"
        assert len(thoughts) >= pieces
        assert pieces > 1 or len(thoughts) == 1
        last_thought = max(at for at, delta in enumerate(deltas) if "reasoning_content" in delta)
        assert all(not delta.get("content") for delta in deltas[:last_thought])


@pytest.mark.parametrize(
    ("begun", "text", "thought", "content"),
    [
        ("<think>\nIt is ", "three.\n</think>\n\nThree.", "three.", "Three."),
        ("<think>\nIt is\n</think>\n\nThree, ", "I think.", None, "I think."),
    ],
)
async def test_a_thought_that_the_client_has_begun_goes_on(
    client: Client, begun: str, text: str, thought: str | None, content: str
):
    conversation = [
        {"role": "user", "content": say(text)},
        {"role": "assistant", "content": [{"type": "text", "text": begun}]},
    ]
    body = {"messages": conversation, "continue_final_message": True}
    _, answer = await client.post(ROUTE, body)
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, content)
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted > 0 if thought else counted == 0
    (streamed,) = assembled(await client.events(ROUTE, body))
    assert without_ids(streamed["message"]) == without_ids(message)
    form = {"response_format": {"type": "json_object"}}
    await client.post(ROUTE, body | form)
    grammar = (await sent(client))["sampling"]["grammar"]
    assert grammar["kind"] == ("structural_tag" if thought else "json_object")


async def test_a_grammar_holds_what_comes_after_thinking(client: Client):
    await client.post(ROUTE, chat("{}", response_format={"type": "json_object"}))
    grammar = (await sent(client))["sampling"]["grammar"]
    assert (grammar["kind"], grammar["param"]) == ("structural_tag", "response_format")
    assert "</think>" in grammar["text"]


async def test_the_readback_says_what_is_parsed(client: Client, colocated: Worker, session):
    _, info = await client.get("/server_info")
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")
    _, info = await Client(colocated.url, session).get("/server_info")
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("none", "none")
