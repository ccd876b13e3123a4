"""What an echo worker answers on each generating route: streamed events, and whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

WORD = " tok"
"""Each token's text."""


def usage(prompt_tokens: int, tokens: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class Answer:
    """One request's answer of `tokens` tokens for each of `prompts` prompts."""

    def __init__(
        self, path: str, name: str, model: str, prompts: int, tokens: int, prompt_tokens: int, cached: int
    ) -> None:
        self._path = path
        self._frame: dict[str, Any] = {"id": name, "created": 0, "model": model}
        self._prompts = prompts
        self._tokens = tokens
        self._usage = usage(prompt_tokens, prompts * tokens, cached)
        self._meta = {
            "id": name,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": cached,
            "finish_reason": {"type": "length", "length": tokens},
        }

    def whole(self) -> Any:
        """The JSON of an answer that isn't streamed."""
        text = WORD * self._tokens
        if self._path == "/generate":
            one = {"text": text, "output_ids": list(range(self._tokens)), "meta_info": self._meta}
            return one if self._prompts == 1 else [one] * self._prompts
        chat = self._path.endswith("/chat/completions")
        body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices = [{"index": i, **body, "finish_reason": "length"} for i in range(self._prompts)]
        kind = "chat.completion" if chat else "text_completion"
        return {**self._frame, "object": kind, "choices": choices, "usage": self._usage}

    def events(self, include_usage: bool) -> Iterator[bytes]:
        """One item for each token (of all prompts together), the last with all that ends the stream."""
        tail = b"data: [DONE]\n\n"
        if include_usage and self._path != "/generate":
            tail = event({**self._frame, "object": self._kind(), "choices": [], "usage": self._usage}) + tail
        middle = b"".join(self._event(i, False) for i in range(self._prompts))
        for number in range(self._tokens - 1):
            yield middle if self._path != "/generate" else self._generate_events(number + 1)
        if self._path == "/generate":
            yield self._generate_events(self._tokens) + tail
        else:
            yield b"".join(self._event(i, True) for i in range(self._prompts)) + tail

    def _kind(self) -> str:
        chat = self._path.endswith("/chat/completions")
        return "chat.completion.chunk" if chat else "text_completion"

    def _event(self, index: int, last: bool) -> bytes:
        chat = self._path.endswith("/chat/completions")
        body = {"delta": {"role": "assistant", "content": WORD}} if chat else {"text": WORD}
        choice = {"index": index, **body, "finish_reason": "length" if last else None}
        return event({**self._frame, "object": self._kind(), "choices": [choice]})

    def _generate_events(self, so_far: int) -> bytes:
        """`/generate` repeats all output in each event."""
        meta = {**self._meta, "completion_tokens": so_far}
        if so_far < self._tokens:
            meta["finish_reason"] = None
        one = {"text": WORD * so_far, "output_ids": list(range(so_far)), "meta_info": meta}
        return b"".join(
            event(one if self._prompts == 1 else {**one, "index": i}) for i in range(self._prompts)
        )
