"""The `openai` package's helpers: answers parsed into classes, streams that add themselves up, raw answers.

Argument: the server's address. Standard input: `{"model", "messages"}`.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel

asked = json.load(sys.stdin)
client = OpenAI(base_url=sys.argv[1] + "/v1", max_retries=0)
chat: dict[str, Any] = {
    "model": asked["model"],
    "messages": asked["messages"],
    "temperature": 0,
    "max_completion_tokens": 48,
}
respond: dict[str, Any] = {
    "model": asked["model"],
    "input": asked["messages"],
    "temperature": 0,
    "max_output_tokens": 48,
}


class Place(Enum):
    PARIS = "Paris"
    BERLIN = "Berlin"


class City(BaseModel):
    name: Place
    is_capital: bool


def streamed(**more: Any) -> Any:
    with client.chat.completions.stream(**chat, **more) as stream:
        kinds = {event.type for event in stream}
        return stream.get_final_completion(), kinds


parsed = client.chat.completions.parse(**chat, response_format=City).choices[0].message.parsed
assert isinstance(parsed, City)
completion, kinds = streamed(response_format=City)
assert completion.choices[0].message.parsed == parsed
assert {"content.delta", "content.done", "chunk"} <= kinds

tools = [openai.pydantic_function_tool(City)]
called, kinds = streamed(tools=tools, tool_choice="required", parallel_tool_calls=False)
(call,) = called.choices[0].message.tool_calls
assert isinstance(call.function.parsed_arguments, City)
assert "tool_calls.function.arguments.done" in kinds

response = client.responses.parse(**respond, text_format=City)
assert response.output_parsed == parsed
with client.responses.stream(**respond) as stream:
    events = [event.type for event in stream]
    final = stream.get_final_response()

raw = client.chat.completions.with_raw_response.create(**chat)
print(
    json.dumps(
        {
            "parsed": parsed.model_dump(mode="json"),
            "called": call.function.name,
            "response": final.output_text,
            "events": [events[0], events[-1]],
            "raw": [raw.status_code, raw.headers["content-type"], raw.parse().choices[0].message.content],
        }
    )
)
