"""Messages between a worker's frontend process and its scheduler process.

They travel as msgpack over a ZMQ ipc socket. Every message is a tagged `msgspec.Struct`; nothing is ever
unpickled. Text never crosses this boundary: the frontend tokenises, detokenises and matches stop strings.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from diptych.engine.faults import FaultChange, FaultReport

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "lark", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a sample's text must match, from its first token to its end."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, a grammar in GBNF or in Lark's notation, or xgrammar's structural
    tag as JSON; nothing for `json_object`."""
    param: str | None = None
    """The request field it came from, for error messages."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw the tokens of one sample. The frontend validates ranges and fills every open value."""

    max_new_tokens: int
    """Tokens to generate at most; 0 computes the prompt only (for `echo` with logprobs)."""
    seed: int
    """Always set: the noise of the token at output position i depends on (seed, i) alone."""
    min_new_tokens: int = 0
    """Stop tokens (end-of-sequence ids included) can't be drawn before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """None: off. n ≥ 0: the chosen token's logprob and the n most likely alternatives."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first, which has none."""
    grammar: Grammar | None = None
    """Draw only tokens that keep the output a beginning of what this allows."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token (natural log, of the unmodified model distribution)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The n most likely (token id, logprob), best first."""


# ---- frontend → scheduler ---------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One sample of one prompt. `n > 1` and batches arrive as several of these."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    room: int | None = None
    """The room of this sample on both sides of a pair; None on a colocated worker."""
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop a request and free what it holds. No output for `rid` follows if `quiet`."""

    rid: str
    reason: str = "abort"
    quiet: bool = False


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Drop all cached prefix pages; refused (ok=False) while requests are running."""

    call_id: int


class GetState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Ask for counters, load and the effective configuration bags."""

    call_id: int


class PauseGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Compute nothing more until `ContinueGeneration`. Requests are taken and wait, with their deadlines."""

    call_id: int


class ContinueGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="continue"):
    call_id: int


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update_weights"):
    """Serve these weights from now on. Refused (ok=False) while requests are running; until the answer, new
    requests are."""

    call_id: int
    model_dir: str
    """As `weights.source.prepare_model` returns it."""
    load_format: str


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Record what the scheduler's thread computes, until `StopProfile` or for `num_steps` forward steps."""

    call_id: int
    path: str
    """Of the trace file to write; its folder exists."""
    num_steps: int | None = None
    record_shapes: bool = False
    with_stack: bool = False


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile"):
    call_id: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Stop admitting; exit once everything running has ended (the frontend sets the bound)."""


class SetLogLevel(msgspec.Struct, frozen=True, kw_only=True, tag="log_level"):
    """Log from this severity on; `level` is a value of the setting `log_level`."""

    level: str


class Faults(msgspec.Struct, frozen=True, kw_only=True, tag="faults"):
    """Ask what fault injection does, after `change`. Only to a scheduler that has it."""

    call_id: int
    change: FaultChange | None = None


Call = (
    FlushCache
    | GetState
    | PauseGeneration
    | ContinueGeneration
    | UpdateWeights
    | StartProfile
    | StopProfile
    | Faults
)
"""What gets one answer, a `Reply` with its `call_id`."""
FrontendMessage = Generate | Abort | Drain | SetLogLevel | Call

# ---- scheduler → frontend ---------------------------------------------------------------------------


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sample ended."""

    kind: str
    """`stop`, `length`, `abort` or `error`."""
    matched: int | None = None
    """The stop token id, when kind is `stop`."""
    message: str = ""
    """For `error` and `abort`: a sentence for the client."""
    status: int = 500
    """For `error`: the HTTP status to answer with."""
    param: str | None = None
    """For `error` with a 4xx status: the request field at fault."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News about one sample since the last output."""

    rid: str
    token_ids: list[int] = []
    """New tokens. A stop token that ended the sample is included (and counted in usage)."""
    logprobs: list[TokenLogprob] | None = None
    """One per new token, when asked for."""
    finish: Finish | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token (the first is None); in the first output only, when asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; valid in every output."""


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    outputs: list[TokenOutput]


class SchedulerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once: the scheduler can serve."""

    pid: int
    context_length: int
    vocab_size: int
    max_total_tokens: int
    """KV capacity in tokens."""
    eos_token_ids: list[int]


class ActionReply(msgspec.Struct, frozen=True, kw_only=True, tag="action_reply"):
    """To every order that carries a `call_id`."""

    call_id: int
    ok: bool
    message: str = ""
    """What was done, or why it was not: a sentence for the operator."""
    status: int = 400
    """Without `ok`: the HTTP status to answer with."""


class StateReply(msgspec.Struct, frozen=True, kw_only=True, tag="state_reply"):
    call_id: int
    metrics: str
    """Prometheus text exposition of the scheduler's registry."""
    load: dict[str, int]
    """`num_running_reqs`, `num_waiting_reqs`, `num_used_tokens`, and the pool's page counts
    `pages_total`, `pages_free`, `pages_cached`, `pages_held`, `pages_quarantined`."""
    config: dict[str, object]
    """The effective bags of the scheduler process, overrides included (see `common_config.readback`); under
    `runner` what was constructed."""


class FaultsReply(msgspec.Struct, frozen=True, kw_only=True, tag="faults_reply"):
    call_id: int
    report: FaultReport


Reply = ActionReply | StateReply | FaultsReply
SchedulerMessage = OutputBatch | SchedulerReady | Reply

MAX_MESSAGE_BYTES = 256 << 20

_encoder = msgspec.msgpack.Encoder()
_frontend_decoder: msgspec.msgpack.Decoder[FrontendMessage] = msgspec.msgpack.Decoder(FrontendMessage)
_scheduler_decoder: msgspec.msgpack.Decoder[SchedulerMessage] = msgspec.msgpack.Decoder(SchedulerMessage)


def encode(message: FrontendMessage | SchedulerMessage) -> bytes:
    return _encoder.encode(message)


def decode_from_frontend(data: bytes) -> FrontendMessage:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError` on anything else."""
    return _frontend_decoder.decode(data)


def decode_from_scheduler(data: bytes) -> SchedulerMessage:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError` on anything else."""
    return _scheduler_decoder.decode(data)
