"""The fields of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from .rows import Fields, Rows, no
from .shared_rows import LENGTH, SAMPLING, STREAMING

QUESTION = [{"role": "user", "content": "Write three sentences about a lighthouse."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["sea", "port"]}}, "required": ["at"]},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
LONG = "long " * 4200
"""Longer than the model's context of 4,096 tokens, shorter than what is refused by its characters."""


def messages(*given: tuple[str, Any], **more: Any) -> Fields:
    return {"messages": [{"role": role, "content": content} for role, content in given], **more}


def allowed(mode: str, *names: str) -> Fields:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CHAT: Rows = {
    **SAMPLING,
    **STREAMING,
    **LENGTH,
    "messages": [
        messages(("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
        messages(("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "More")),
        messages(("developer", "Be short."), ("user", "Hi")),
        messages(("user", "What is the weather?"), ("tool", "rain")),
        {"messages": [{"role": "user", "content": "Hi", "name": "me"}]},
        no({"messages": []}),
        no({"messages": "hi"}),
        no({"messages": None}),
        no(messages(("robot", "x"))),
        no(messages(("user", None))),
        no(messages(("user", [{"type": "image_url", "image_url": {"url": "data:,"}}]))),
        no(messages(("user", LONG))),
    ],
    "logprobs": [{"logprobs": True}, {"logprobs": False}, no({"logprobs": 3})],
    "top_logprobs": [
        {"logprobs": True, "top_logprobs": 4},
        {"logprobs": True, "top_logprobs": 4, "max_tokens": 1, "n": 2},
        no({"logprobs": True, "top_logprobs": 21}),
        no({"top_logprobs": 2}),
    ],
    "continue_final_message": [
        messages(("user", "Count."), ("assistant", "One, two,"), continue_final_message=True),
        messages(("user", "Count."), ("assistant", "<think>\nIt is"), continue_final_message=True),
    ],
    "add_generation_prompt": [{"add_generation_prompt": False}],
    "chat_template_kwargs": [
        {"chat_template_kwargs": {"enable_thinking": False}},
        no({"chat_template_kwargs": 1}),
    ],
    "tools": [
        {"tools": [TOOL]},
        {"tools": []},
        no({"tools": [{"type": "function"}]}),
        no({"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ],
    "tool_choice": [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 60,
        },
        {"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "weather")},
        {"tools": [TOOL, OTHER], "tool_choice": allowed("required", "weather"), "max_tokens": 60},
        no({"tools": [TOOL], "tool_choice": "perhaps"}),
        no({"tools": [TOOL], "tool_choice": allowed("auto", "other")}),
    ],
    "parallel_tool_calls": [
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    ],
    "reasoning_effort": [no({"reasoning_effort": "low"})],
    "separate_reasoning": [{"separate_reasoning": False, "regex": "<think>a</think>b", "max_tokens": 30}],
    "stream_reasoning": [{"stream_reasoning": False, "regex": "b"}],
    "include_reasoning": [{"include_reasoning": False, "regex": "b"}],
}
