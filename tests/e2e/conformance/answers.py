"""Answers made comparable: ids and times out, a stream's chunks put together to what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Answer = dict[str, Any]

VARYING = {"id", "item_id", "created", "created_at", "completed_at", "e2e_latency"}


def comparable(value: Any) -> Any:
    """Without what may differ between two answers to one request."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in VARYING}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    return value


def names(events: Sequence[Answer]) -> set[str]:
    """Every field that the events of a stream have."""
    return {name for event in events for name in _names(event)}


def _names(event: Answer, path: str = "") -> Iterator[str]:
    for name, part in event.items():
        yield f"{path}{name}"
        for inner in part if isinstance(part, list) else [part]:
            if isinstance(inner, dict) and name in (
                "choices",
                "delta",
                "response",
                "item",
                "part",
                "meta_info",
            ):
                yield from _names(inner, f"{path}{name}.")


# ---- what a stream says, in the form of the whole answer's choices --------------------------------------


def chat_choices(answer: Answer) -> dict[int, Any]:
    choices = {}
    for choice in answer["choices"]:
        message = choice["message"]
        choices[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content", ""),
            "calls": [call["function"] for call in message.get("tool_calls", [])],
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "finish_reason": choice["finish_reason"],
            "matched_stop": choice["matched_stop"],
        }
    return choices


def chat_stream(events: Sequence[Answer]) -> dict[int, Any]:
    choices: dict[int, Any] = {}
    for event in events:
        for part in event["choices"]:
            empty = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
            choice = choices.setdefault(part["index"], empty)
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    choice["calls"].append(dict(call["function"]))
                else:
                    choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
            if part["finish_reason"]:
                choice |= {name: part[name] for name in ("finish_reason", "matched_stop")}
    return choices


def completion_choices(answer: Answer) -> dict[int, Any]:
    names = ("text", "logprobs", "finish_reason", "matched_stop")
    return {choice["index"]: {name: choice[name] for name in names} for choice in answer["choices"]}


def completion_stream(events: Sequence[Answer]) -> dict[int, Any]:
    choices: dict[int, Any] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"]
            if part["logprobs"]:
                lists = choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    lists[name] += values
            if part["finish_reason"]:
                choice |= {name: part[name] for name in ("finish_reason", "matched_stop")}
    return choices


def response_items(answer: Answer) -> dict[int, Any]:
    return dict(enumerate(comparable(answer["output"])))


def response_stream(events: Sequence[Answer]) -> dict[int, Any]:
    return response_items(events[-1]["response"])


def generated(answer: Any) -> dict[int, Any]:
    answers = answer if isinstance(answer, list) else [answer]
    return dict(enumerate(comparable(answers)))


def generated_stream(events: Sequence[Answer]) -> dict[int, Any]:
    """Each event says all of its sample so far."""
    last = {event.get("index", 0): event for event in events}
    return {
        index: comparable({name: value for name, value in event.items() if name != "index"})
        for index, event in sorted(last.items())
    }


READ: dict[str, tuple[Callable[[Any], dict[int, Any]], Callable[[Sequence[Answer]], dict[int, Any]]]] = {
    "/v1/chat/completions": (chat_choices, chat_stream),
    "/v1/completions": (completion_choices, completion_stream),
    "/v1/responses": (response_items, response_stream),
    "/generate": (generated, generated_stream),
}
"""By route: how to read a whole answer and a stream's events."""
