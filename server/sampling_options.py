"""From a request's sampling fields to `SamplingParams`, every range checked and every open value filled."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from diptych.common_config import get_serving
from diptych.engine.wire import Grammar, SamplingParams
from diptych.server.bounds import MAX_SEED, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from diptych.server.errors import BadRequest
from diptych.server.grammar_options import grammar_option
from diptych.server.reasoning import ReasoningFormat
from diptych.server.requests import SamplingFields
from diptych.server.rooms import derive_room


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take."""

    context_length: int
    """Tokens, prompt and output together."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a sample's tokens become text."""

    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    """Leave the stop string or stop token's text in the output."""
    skip_special_tokens: bool = True
    shown_special: frozenset[str] = frozenset()
    """Special tokens that are in the text all the same, because whoever parses it needs them."""
    reasoning: ReasoningFormat | None = None
    """Thinking that is counted in the usage."""
    inside_reasoning: bool = False
    """Whether it has begun with the prompt's end."""


@dataclass(frozen=True, slots=True)
class LengthFields:
    """The output length as this route calls it: the field's name is for error messages."""

    max_tokens: int | None
    max_name: str
    min_tokens: int | None
    min_name: str
    prompt_name: str
    least: int = 0
    usual: int | None = None
    """Output of a request that doesn't say, where neither it nor the operator does; None: the rest of the
    context."""


def number(
    value: float | None, default: float, low: float, high: float, param: str, *, above: bool = False
) -> float:
    """`value` or `default`; raises `BadRequest` outside [low, high], or (low, high] with `above`."""
    if value is None:
        return default
    if not (low < value if above else low <= value) or value > high:
        bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise BadRequest(f"{param} must be {bounds}, got {value:g}", param=param)
    return float(value)


def whole(value: int | None, default: int, low: int, high: int, param: str) -> int:
    """The same for integers."""
    if value is None:
        return default
    if not low <= value <= high:
        raise BadRequest(f"{param} must be between {low} and {high}, got {_short(value)}", param=param)
    return value


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "a number far outside it"


def output_length(length: LengthFields, prompt_tokens: int, limits: Limits) -> int:
    """Tokens to generate at most. Raises `BadRequest` when prompt and output don't fit the context."""
    room = limits.context_length - prompt_tokens
    asked = length.max_tokens
    if asked is not None and asked < length.least:
        raise BadRequest(
            f"{length.max_name} must be at least {length.least}, got {_short(asked)}", param=length.max_name
        )
    if room < min(1 if asked is None else asked, 1):
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens; with at least one token of output that is more than "
            f"the context of {limits.context_length}",
            param=length.prompt_name,
            code="context_length_exceeded",
        )
    if asked is None:
        operators: int | None = get_serving().default_max_tokens
        default = length.usual if operators is None else operators
        return room if default is None else min(room, default)
    if asked > room:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens and {length.max_name} is {_short(asked)}: together more "
            f"than the context of {limits.context_length}",
            param=length.max_name,
            code="context_length_exceeded",
        )
    return asked


def samples_per_prompt(n: int | None, param: str = "n") -> int:
    return whole(n, 1, 1, get_serving().max_n, param)


def text_options(fields: SamplingFields, prefix: str = "") -> TextOptions:
    """`prefix` says where in the body the fields are. Raises `BadRequest` naming the field."""
    param = f"{prefix}stop"
    stops = [fields.stop] if isinstance(fields.stop, str) else list(fields.stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest(f"{param} has {len(stops)} strings; at most {MAX_STOP_STRINGS} work", param=param)
    for stop in stops:
        if not stop:
            raise BadRequest(f"{param} contains an empty string", param=param)
        if len(stop) > MAX_STOP_LENGTH:
            raise BadRequest(f"a string of {param} is longer than {MAX_STOP_LENGTH} characters", param=param)
    return TextOptions(
        stops=tuple(dict.fromkeys(stops)),
        keep_stop=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def sampling_params(
    fields: SamplingFields,
    length: LengthFields,
    prompt_tokens: int,
    limits: Limits,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    prefix: str = "",
) -> SamplingParams:
    """For one prompt; `plan_samples` makes those of its samples. `grammar` replaces what the fields ask for.
    `prefix` says where in the body the fields are. Raises `BadRequest` naming the field."""
    max_new_tokens = output_length(length, prompt_tokens, limits)
    top_p = number(fields.top_p, 1.0, 0.0, 1.0, f"{prefix}top_p")
    top_k = whole(fields.top_k, 0, -1, MAX_SEED, f"{prefix}top_k")
    if top_p == 0.0:  # the smallest nucleus is the likeliest token
        top_p, top_k = 1.0, 1
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=whole(length.min_tokens, 0, 0, max_new_tokens, length.min_name),
        seed=secrets.randbits(63)
        if fields.seed is None
        else whole(fields.seed, 0, 0, MAX_SEED, f"{prefix}seed"),
        temperature=number(fields.temperature, 1.0, 0.0, 2.0, f"{prefix}temperature"),
        top_k=0 if top_k < 1 or top_k >= limits.vocab_size else top_k,
        top_p=top_p,
        min_p=number(fields.min_p, 0.0, 0.0, 1.0, f"{prefix}min_p"),
        repetition_penalty=number(
            fields.repetition_penalty, 1.0, 0.0, 10.0, f"{prefix}repetition_penalty", above=True
        ),
        presence_penalty=number(fields.presence_penalty, 0.0, -2.0, 2.0, f"{prefix}presence_penalty"),
        frequency_penalty=number(fields.frequency_penalty, 0.0, -2.0, 2.0, f"{prefix}frequency_penalty"),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, limits, f"{prefix}stop_token_ids"),
        ignore_eos=bool(fields.ignore_eos),
        logit_bias=_logit_bias(fields.logit_bias, limits, f"{prefix}logit_bias"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_option(fields, prefix) if grammar is None else grammar,
    )


def sample_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sample of a prompt: with one seed for all they would be equal."""
    return derive_room(seed, index)


def check_token_ids(ids: list[int], limits: Limits, param: str) -> list[int]:
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            raise BadRequest(
                f"{param}: {_short(token_id)} at position {position} is not a token id "
                f"(0 to {limits.vocab_size - 1})",
                param=param,
            )
    return ids


def _stop_token_ids(ids: list[int] | None, limits: Limits, param: str) -> tuple[int, ...]:
    if not ids:
        return ()
    if len(ids) > MAX_STOP_TOKENS:
        raise BadRequest(f"{param} has more than {MAX_STOP_TOKENS} entries", param=param)
    return tuple(dict.fromkeys(check_token_ids(ids, limits, param)))


def _logit_bias(bias: dict[int, float] | None, limits: Limits, param: str) -> dict[int, float]:
    if not bias:
        return {}
    check_token_ids(list(bias), limits, param)
    for token_id, value in bias.items():
        number(value, 0.0, -100.0, 100.0, f"{param}.{token_id}")
    return dict(bias)
