"""From the chunks of a streamed answer to the answer that isn't streamed."""

from __future__ import annotations

from typing import Any

CHANGES = ("id", "created", "created_at", "completed_at", "cached_tokens", "matched_stop")
"""What two answers to one request may differ in."""


def unchanging(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: unchanging(value) for name, value in answer.items() if name not in CHANGES}
    if isinstance(answer, list):
        return [unchanging(value) for value in answer]
    return answer


def reassembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of chat, completions or responses."""
    if "type" in chunks[0]:
        return _response(chunks)
    kind = chunks[0]["object"]
    add = _chat if kind == "chat.completion.chunk" else _completion
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            add(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
    *_, last = chunks
    assert last["choices"] == [], "usage comes in a chunk of its own"
    return {
        **{name: last[name] for name in ("id", "created", "model", "usage")},
        "object": kind.removesuffix(".chunk"),
        "choices": [choices[index] for index in sorted(choices)],
    }


def _completion(whole: dict[str, Any], part: dict[str, Any]) -> None:
    whole["text"] = whole.get("text", "") + part["text"]
    _ending(whole, part)
    if part["logprobs"] is None:
        whole.setdefault("logprobs", None)
        return
    lists = whole.get("logprobs") or {name: [] for name in part["logprobs"]}
    whole["logprobs"] = {name: lists[name] + part["logprobs"][name] for name in lists}


def _chat(whole: dict[str, Any], part: dict[str, Any]) -> None:
    message = whole.setdefault("message", {"content": None, "refusal": None})
    for name, value in part["delta"].items():
        if name == "tool_calls":
            _calls(message.setdefault("tool_calls", []), value)
        elif name == "role":
            message["role"] = value
        elif value is not None:
            message[name] = (message.get(name) or "") + value
    _ending(whole, part)
    if part["logprobs"] is None:
        whole.setdefault("logprobs", None)
        return
    content = (whole.get("logprobs") or {"content": []})["content"]
    whole["logprobs"] = {**part["logprobs"], "content": content + part["logprobs"]["content"]}


def _calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": part["type"], "function": {**part["function"]}})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _ending(whole: dict[str, Any], part: dict[str, Any]) -> None:
    assert whole.get("finish_reason") is None, "nothing comes after the finish reason"
    whole["finish_reason"] = part["finish_reason"]


def _response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the last event holds; the deltas must add up to it."""
    whole: dict[str, Any] = events[-1]["response"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    return whole
