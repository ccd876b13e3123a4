"""A prefix cache without KV: which pages of a prompt a worker with so many pages would still have."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

BYTES_PER_TOKEN = 4
"""Of text, roughly what a tokenizer makes of English."""


class SimulatedCache:
    """Page-granular and least recently used, like a worker's own. A page is known by the hash of all that
    leads up to its end, so equal pages behind different prefixes are different."""

    def __init__(self, capacity_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._capacity = capacity_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match_and_insert(self, tokens: Sequence[int]) -> int:
        """Tokens at the start of the prompt that were cached; now all its whole pages are. Never the whole
        prompt: the last token is always computed."""
        chain = list(self._chain(tokens))
        cached = 0
        for page in chain:
            if page not in self._pages:
                break
            cached += 1
        # From the end, so that a page is always more recent than what builds on it, and leaves go first.
        for page in reversed(chain):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)
        return min(cached * self.page_size, len(tokens) - 1) if tokens else 0

    def clear(self) -> None:
        self._pages.clear()

    def _chain(self, tokens: Sequence[int]) -> Sequence[int]:
        size = self.page_size
        key, chain = 0, []
        for start in range(0, len(tokens) - size + 1, size):
            key = hash((key, tuple(tokens[start : start + size])))
            chain.append(key)
        return chain


def text_tokens(text: str) -> list[int]:
    """Stand-in token ids: BYTES_PER_TOKEN bytes each."""
    raw = text.encode("utf-8", "surrogatepass")
    size = BYTES_PER_TOKEN
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


def prompts_of(path: str, fields: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of a request to a generating route as stand-in token ids. Raises ValueError when it has
    none."""
    if path.endswith("/chat/completions"):
        if not isinstance(fields.get("messages"), list):
            raise ValueError("messages: a list is expected")
        # Like a template: what comes first in a conversation comes first in the prompt.
        head = [json.dumps(fields["tools"])] if fields.get("tools") else []
        return [text_tokens("\n".join(head + [json.dumps(m) for m in fields["messages"]]))]
    if path == "/generate":
        prompt = fields.get("input_ids", fields.get("text"))
    else:
        prompt = fields.get("prompt")
    match prompt:
        case str():
            return [text_tokens(prompt)]
        case [int(), *_]:
            return [prompt]
        case [str(), *_]:
            return [text_tokens(one) for one in prompt]
        case [[*_], *_]:
            return list(prompt)
    raise ValueError("the prompt is missing or empty")
