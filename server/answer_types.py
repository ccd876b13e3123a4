"""What the generating and reading routes answer, for the OpenAPI document: the fields that a client may count
on. The answers themselves are put together as plain dicts, and may hold more."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class CachedTokens(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Each prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class WrittenFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class WrittenCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: WrittenFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[WrittenCall] = []
    reasoning_content: str = ""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    matched_stop: str | int | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: str | int | None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Response(msgspec.Struct, kw_only=True):
    """The response object of OpenAI."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "cancelled"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class GeneratedMeta(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str


class Generated(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: GeneratedMeta


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelObject]


class ModelInfo(msgspec.Struct, kw_only=True):
    model_path: str
    served_model_name: str
    weight_version: str
    context_length: int
    vocab_size: int


class Load(msgspec.Struct, kw_only=True):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Tokens(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Detokenized(msgspec.Struct, kw_only=True):
    """Two names for one thing."""

    text: str | list[str]
    prompt: str | list[str]


class Aborted(msgspec.Struct, kw_only=True):
    aborted: int
    """Samples that were running."""


class Paused(msgspec.Struct, kw_only=True):
    paused: bool


class Trace(msgspec.Struct, kw_only=True):
    path: str


class Done(msgspec.Struct, kw_only=True):
    success: bool
    message: str
