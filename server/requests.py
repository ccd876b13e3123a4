"""Request bodies. Types are strict; fields that aren't declared are ignored, as clients send many.

A field that a text model can't honour yet is declared in `UNSUPPORTED` and refused by name when it asks
for something.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from diptych.server.bounds import (
    MAX_NATIVE_LOGPROBS,
    MAX_RID_LENGTH,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    TOKEN_KEYS,
    long,
    many,
    within,
)

ABSENT = msgspec.Raw(b"null")

NOT_SENT: Any = msgspec.field(default_factory=lambda: ABSENT)
"""The default of `Raw` fields: as a plain value it couldn't be written into a JSON schema."""

Count = Annotated[int, within(0)]
StopString = Annotated[str, long(1, MAX_STOP_LENGTH)]
Seed = Annotated[int, within(0, MAX_SEED)]
RequestId = Annotated[str, long(1, MAX_RID_LENGTH)]
TopLogprobs = Annotated[int, within(0, MAX_TOP_LOGPROBS)]
NativeTopLogprobs = Annotated[int, within(0, MAX_NATIVE_LOGPROBS)]
Port = Annotated[int, within(1, 65535)]
Room = Annotated[int, within(0, MAX_SEED)]
FirstLogprob = Annotated[int, within(-1)]


class PairFields(msgspec.Struct, kw_only=True):
    """What a router adds so that the two workers of a pair find each other."""

    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer spelling of what the answer must match; one of these. Others there would change the
    answer's form, so they can't be ignored as elsewhere."""

    json: msgspec.Raw = NOT_SENT
    """A JSON schema, or a string that holds one."""
    regex: str | None = None
    choice: Annotated[list[str], many(1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NOT_SENT
    whitespace_pattern: str | None = None
    """Refused: nothing here would follow it."""


class GrammarFields(msgspec.Struct, kw_only=True):
    """What the answer's text must match, in every spelling that clients use: at most one may ask for
    something. `server/grammar_options.py` reads them. Schemas stay the bytes that were sent."""

    response_format: msgspec.Raw = NOT_SENT
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = NOT_SENT
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], many(1)] | None = None
    guided_grammar: str | None = None
    json_schema: msgspec.Raw = NOT_SENT
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: msgspec.Raw = NOT_SENT


class SamplingFields(GrammarFields, kw_only=True):
    """The sampling fields that the OpenAI routes share, extensions of other servers included."""

    temperature: Annotated[float, within(0, 2)] | None = None
    top_p: Annotated[float, within(0, 1)] | None = None
    top_k: Annotated[int, within(-1, MAX_SEED)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    repetition_penalty: Annotated[float, within(0, 10, above=True)] | None = None
    presence_penalty: Annotated[float, within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, within(-2, 2)] | None = None
    seed: Seed | None = None
    n: Annotated[int, within(1)] | None = None
    stop: StopString | Annotated[list[StopString], many(0, MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Count], many(0, MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: Annotated[dict[int, Annotated[float, within(-100, 100)]], TOKEN_KEYS] | None = None
    max_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """A last chunk of its own says what the request used."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk says what was used so far."""


class OpenAIRequest(SamplingFields, kw_only=True):
    # `PairFields` again: a struct can't inherit from two with fields.
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: RequestId | None = None


class TextPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, object] | None = None
    """JSON text, or what it says."""


class MadeCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer, as the client got it."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class FunctionTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema of an object; without one the function takes nothing."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, tag="function"):
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], many(1)]


class AllowedToolsChoice(msgspec.Struct, kw_only=True, tag="allowed_tools"):
    """The model sees all tools and may call these."""

    allowed_tools: AllowedTools


class ReasoningFields(OpenAIRequest, kw_only=True):
    """What the routes that tell thinking from the answer share."""

    separate_reasoning: bool | None = None
    """False leaves thinking in the content."""
    stream_reasoning: bool | None = None
    """False sends thinking as one piece when it has ended."""
    include_reasoning: bool | None = None
    """False leaves it out of the answer."""


class ChatRequest(ReasoningFields, kw_only=True):
    messages: list[ChatMessage]
    max_tokens: Annotated[int, within(1)] | None = None
    max_completion_tokens: Annotated[int, within(1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    """`Tool`s; the template gets them as they were sent."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """Text, texts, token ids, or several lists of token ids."""
    max_completion_tokens: Count | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, within(1)] | None = None


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of `/generate`; `max_tokens` and `min_tokens` have other names there."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    """Another name of `seed`."""


class GenerateRequest(PairFields, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: FirstLogprob | list[FirstLogprob] | None = None
    top_logprobs_num: NativeTopLogprobs | list[NativeTopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    rid: str | list[str] | None = None
    abort_all: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Count | list[Count]]
    skip_special_tokens: bool | None = None


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "guided_whitespace_pattern": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "moderation": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "return_hidden_states": (None, False),
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "token_ids_logprob": (None, []),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
}
"""Fields that would change the output, with the values that ask for nothing. Checked on every generating
route, inside `sampling_params` too."""
