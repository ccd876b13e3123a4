"""Requests that between them ask for every feature of the OpenAI routes: `{name: (resource, body)}`."""

from __future__ import annotations

from typing import Any

from support.cluster import MODEL

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a river."}]},
    {"role": "assistant", "content": "The Nile."},
    {"role": "user", "content": "Another one."},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Berlin"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Berlin"]}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}
NAMED_CITY = {"name": "city", "schema": CITY, "strict": True}
USED_TOOL = [
    {"role": "user", "content": "How is the weather in Paris?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
]


def chat(messages: list[dict[str, Any]] = QUESTION, **body: Any) -> tuple[str, dict[str, Any]]:
    defaults = {"model": MODEL, "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    return "chat.completions", {**defaults, **body}


def completion(prompt: Any = "The sea", **body: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, **body}


def response(question: Any = "What is the capital of France?", **body: Any) -> tuple[str, dict[str, Any]]:
    defaults = {"model": MODEL, "input": question, "max_output_tokens": 16, "temperature": 0}
    return "responses", {**defaults, **body}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(),
    "chat in turns": chat(TALK, max_completion_tokens=8),
    "chat n": chat(n=2, temperature=1, top_p=0.9, seed=7),
    "chat stop": chat(stop=[" is", "!"]),
    "chat logprobs": chat(logprobs=True, top_logprobs=3, max_completion_tokens=4),
    "chat logit_bias": chat(logit_bias={"504": -100}, max_completion_tokens=4),
    "chat penalties": chat(frequency_penalty=0.5, presence_penalty=0.5, max_tokens=8),
    "chat beyond the package": chat(temperature=1, seed=3, top_k=1, ignore_eos=True),
    "chat json_schema": chat(
        response_format={"type": "json_schema", "json_schema": NAMED_CITY}, max_completion_tokens=32
    ),
    "chat json_object": chat(response_format={"type": "json_object"}),
    "chat regex": chat(guided_regex="(yes|no)"),
    "chat tool required": chat(
        tools=[WEATHER], tool_choice="required", max_completion_tokens=32, parallel_tool_calls=False
    ),
    "chat tool named": chat(
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_completion_tokens=32,
    ),
    "chat tool auto": chat(tools=[WEATHER]),
    "chat tool none": chat(tools=[WEATHER], tool_choice="none", max_completion_tokens=4),
    "chat tool used": chat(USED_TOOL, tools=[WEATHER], max_completion_tokens=6),
    "completion": completion(),
    "completion n": completion(n=2, temperature=1, seed=11),
    "completion batch": completion(["The sea", "The sky is"], stop="\n"),
    "completion of token ids": completion([504, 3575, 282]),
    "completion of lists of token ids": completion([[504, 3575], [504, 3575, 282]], max_tokens=1),
    "completion logprobs": completion(logprobs=2),
    "completion echo": completion(echo=True, logprobs=1, max_tokens=1),
    "completion of nothing but the prompt": completion(echo=True, logprobs=1, max_tokens=0),
    "completion best_of": completion(best_of=3, n=2, temperature=1, seed=5),
    "response": response(),
    "response to messages": response([*TALK[:1], *QUESTION], instructions="Answer in one word."),
    "response json_schema": response(
        max_output_tokens=32, text={"format": {"type": "json_schema", **NAMED_CITY}}
    ),
}
