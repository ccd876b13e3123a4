"""One sample while it runs: its tokens become text, stop strings end it, deltas wait to be taken."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.engine.wire import Finish, SamplingParams, TokenLogprob, TokenOutput
from diptych.server.detokenizer import IncrementalDetokenizer
from diptych.server.reasoning import ReasoningCounter
from diptych.server.requests import StreamOptions
from diptych.server.rooms import Pairing
from diptych.server.sampling_options import TextOptions
from diptych.server.stop_strings import StopStringMatcher
from diptych.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One sample to run."""

    index: int
    """Position among the request's samples, which is its choice index."""
    prompt_index: int
    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    rid: str
    """The id by which clients abort it."""
    pairing: Pairing | None = None


@dataclass(slots=True)
class SampleDelta:
    """News about one sample since the last take."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    matched: str | int | None = None
    """The stop string or stop token id that ended it."""


class Sample:
    """State of one sample. All times are `time.perf_counter()` seconds."""

    def __init__(self, spec: SampleSpec, wire_id: str, tokenizer: Tokenizer, *, match_stops: bool) -> None:
        self.spec = spec
        self.wire_id = wire_id
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cached_tokens = 0
        self.finish: Finish | None = None
        self.matched: str | int | None = None
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        text = spec.text
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.showing(text.shown_special),
            spec.prompt_ids,
            skip_special_tokens=text.skip_special_tokens,
        )
        self._reasoning: ReasoningCounter | None = None
        if text.reasoning is not None:
            self._reasoning = ReasoningCounter(text.reasoning, tokenizer, inside=text.inside_reasoning)
        self._matcher = StopStringMatcher(spec.text.stops if match_stops else ())
        self._taken_tokens = 0
        self._taken_logprobs = 0
        self._pieces: list[str] = []
        self._taken_finish = False

    def absorb(self, output: TokenOutput) -> int:
        """Take what the scheduler says; returns how many tokens counted. When a stop string matched,
        `finish` is set although the scheduler knows of none: the caller aborts it there."""
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        stop_token = output.finish.matched if output.finish is not None else None
        counted = 0
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            counted += 1
            self.token_ids.append(token_id)
            if self._reasoning is not None:
                self._reasoning.push(token_id)
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs[position])
            is_stop_token = stop_token is not None and position == len(output.token_ids) - 1
            if is_stop_token and not self.spec.text.keep_stop:
                continue
            pieces.append(self._matcher.feed(self._detokenizer.push(token_id)))
            if self._matcher.matched is not None:
                break
        if counted:
            self.last_token = time.perf_counter()
            self.first_token = self.first_token or self.last_token
        if output.finish is not None and self._matcher.matched is None:
            pieces.append(self._matcher.feed(self._detokenizer.flush()))
            if self._matcher.matched is None:
                pieces.append(self._matcher.flush())
                self.finish, self.matched = output.finish, stop_token
        if self._matcher.matched is not None:
            if self.spec.text.keep_stop:
                pieces.append(self._matcher.matched)
            self.finish, self.matched = Finish(kind="stop"), self._matcher.matched
        self._pieces.extend(piece for piece in pieces if piece)
        return counted

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of its thinking so far; None for a model that isn't known to think."""
        return None if self._reasoning is None else self._reasoning.count

    def take(self) -> SampleDelta:
        """Everything new since the last take."""
        delta = SampleDelta(
            index=self.spec.index,
            text="".join(self._pieces),
            token_ids=self.token_ids[self._taken_tokens :],
            logprobs=self.logprobs[self._taken_logprobs :],
        )
        self.text += delta.text
        self._pieces.clear()
        self._taken_tokens = len(self.token_ids)
        self._taken_logprobs = len(self.logprobs)
        if self.finish is not None and not self._taken_finish:
            self._taken_finish = True
            delta.finish, delta.matched = self.finish, self.matched
        return delta


def usage(samples: Sequence[Sample]) -> dict[str, object]:
    """OpenAI's usage object: each prompt counts once, however many samples it has."""
    prompts = {sample.spec.prompt_index: sample for sample in reversed(samples)}
    prompt_tokens = sum(len(sample.spec.prompt_ids) for sample in prompts.values())
    completion_tokens = sum(len(sample.token_ids) for sample in samples)
    counts: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(sample.cached_tokens for sample in prompts.values())},
    }
    thinking = [sample.reasoning_tokens for sample in samples if sample.reasoning_tokens is not None]
    if thinking:
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(thinking)}
    return counts


class StreamUsage:
    """What a stream says of usage, as its `stream_options` ask."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._asked = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)

    def field(self, samples: Sequence[Sample]) -> dict[str, object]:
        """The field of an ordinary chunk: nothing, null, or what was used so far."""
        if not self._asked:
            return {}
        return {"usage": usage(samples) if self._continuous else None}

    def closing(self, samples: Sequence[Sample], envelope: dict[str, object]) -> list[dict[str, object]]:
        """The chunk after the last one of text, if it was asked for."""
        return [{**envelope, "choices": [], "usage": usage(samples)}] if self._asked else []
