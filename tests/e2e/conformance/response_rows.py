"""The fields of `/v1/responses`."""

from __future__ import annotations

from .chat_rows import CHAT, LONG, QUESTION
from .rows import Rows, no
from .shared_rows import SAMPLING, SCHEMA, STREAMING

RESPONSES: Rows = {
    **{name: variants for name, variants in SAMPLING.items() if name not in ("n", "response_format")},
    **STREAMING,
    "n": [{"n": 1}, no({"n": 2})],
    "response_format": [no({"response_format": {"type": "json_object"}})],
    "max_tokens": [no({"max_tokens": 20})],
    "max_completion_tokens": [no({"max_completion_tokens": 20})],
    "max_output_tokens": [
        {"max_output_tokens": 16},
        {"max_output_tokens": None},
        no({"max_output_tokens": 15}),
        no({"max_output_tokens": 10**6}),
    ],
    "input": [
        {"input": [{"role": "user", "content": "Hi"}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        {
            "input": [
                {"type": "message", "role": "developer", "content": "Be short."},
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
                {"role": "user", "content": "More"},
            ]
        },
        no({"input": ""}),
        no({"input": []}),
        no({"input": None}),
        no({"input": LONG}),
        no({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
        no({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        no({"input": [{"role": "robot", "content": "x"}]}),
    ],
    "instructions": [{"instructions": "Be short."}, no({"instructions": 7})],
    "top_logprobs": [{"top_logprobs": 3}, no({"top_logprobs": 21})],
    "include": [
        {"include": ["message.output_text.logprobs"]},
        {"include": ["reasoning.encrypted_content"]},
        no({"include": ["everything"]}),
    ],
    "text": [
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        no({"text": {"format": {"type": "xml"}}}),
        no({"text": {"format": {"type": "json_object"}}, "regex": "a"}, param="regex"),
    ],
    "reasoning": [{"reasoning": {"summary": "auto"}}, no({"reasoning": {"effort": "low"}})],
    "metadata": [{"metadata": {"a": "b"}}, no({"metadata": {"a": 1}})],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "separate_reasoning": [{"separate_reasoning": False, "regex": "<think>a</think>b"}],
    "stream_reasoning": CHAT["stream_reasoning"],
    "include_reasoning": CHAT["include_reasoning"],
    "previous_response_id": [no({"previous_response_id": "resp_1"})],
    "conversation": [no({"conversation": "conv_1"})],
    "prompt": [no({"prompt": {"id": "p"}})],
    "background": [{"background": False}, no({"background": True})],
    "truncation": [{"truncation": "disabled"}, no({"truncation": "auto"})],
    "context_management": [no({"context_management": [{"type": "compaction"}]})],
    "messages": [no({"messages": QUESTION})],
    "reasoning_effort": [no({"reasoning_effort": "low"})],
    "tools": [{"tools": []}, no({"tools": [{"type": "web_search"}]})],
    "tool_choice": [{"tool_choice": "auto"}, no({"tool_choice": "required"})],
}
