"""Chats that share beginnings, the same for the same seed: what a router that knows of prefix caches is for.

A workload is a list of sessions. The requests of a session follow each other; sessions run side by side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diptych.bench.echo_answers import WORD
from diptych.bench.simulated_cache import SimulatedCache, prompts_of

ANSWER_TOKENS = 8
_CHAT = "/v1/chat/completions"

Session = list[dict[str, Any]]
"""Bodies for the chat route."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How big a workload is."""

    requests: int = 600
    groups: int = 24
    """Beginnings that are shared: system prompts, or characters in the case of conversations."""
    system_tokens: int = 1000
    question_tokens: int = 60
    turns: int = 6
    """Of a conversation."""
    seed: int = 0


def _words(source: random.Random, tokens: int) -> str:
    """Text of about so many tokens for an echo worker: four bytes each."""
    return "".join(f"{source.getrandbits(12):03x} " for _ in range(tokens))


def _request(messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {"model": "echo", "messages": list(messages), "max_tokens": ANSWER_TOKENS}


def _single(shape: Shape, weights: Sequence[float]) -> list[Session]:
    source = random.Random(f"single {shape.seed}")
    systems = [_words(source, shape.system_tokens) for _ in range(shape.groups)]
    sessions = []
    for system in source.choices(systems, weights, k=shape.requests):
        question = _words(source, shape.question_tokens)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        sessions.append([_request(messages)])
    return sessions


def system_prompts(shape: Shape) -> list[Session]:
    """One question each; the system prompts are equally popular."""
    return _single(shape, [1.0] * shape.groups)


def skewed(shape: Shape) -> list[Session]:
    """One question each; the system prompts' popularity falls as 1/rank (Zipf)."""
    return _single(shape, [1 / rank for rank in range(1, shape.groups + 1)])


def conversations(shape: Shape) -> list[Session]:
    """Several turns, each with all that was said before; a system prompt is shared by some conversations."""
    source = random.Random(f"conversations {shape.seed}")
    systems = [_words(source, shape.system_tokens // 4) for _ in range(shape.groups)]
    sessions = []
    for _ in range(shape.requests // shape.turns):
        messages = [{"role": "system", "content": source.choice(systems)}]
        session = []
        for _ in range(shape.turns):
            messages.append({"role": "user", "content": _words(source, 2 * shape.question_tokens)})
            session.append(_request(messages))
            messages.append({"role": "assistant", "content": WORD * ANSWER_TOKENS})
        sessions.append(session)
    return sessions


WORKLOADS: dict[str, Callable[[Shape], list[Session]]] = {
    "system_prompts": system_prompts,
    "skewed": skewed,
    "conversations": conversations,
}


def ideal_hit_rate(sessions: Sequence[Session], page_size: int) -> float:
    """Share of prompt tokens that one worker which never forgets would find cached."""
    cache = SimulatedCache(capacity_pages=1 << 40, page_size=page_size)
    cached = total = 0
    for session in sessions:
        for body in session:
            (prompt,) = prompts_of(_CHAT, body)
            cached += cache.match_and_insert(prompt)
            total += len(prompt)
    return cached / total
