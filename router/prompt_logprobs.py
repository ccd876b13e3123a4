"""Prompt log-probabilities that only the prefill worker's answer has, put into the decode worker's.

Diptych's decode workers answer them themselves. Workers of other systems that take the same bootstrap fields
run the prompt on prefill and tell of it there alone. Decode's first answer shows whether anything is missing,
so that a request whose decode worker has everything is relayed as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from diptych.router.call import Call

Json = Any
"""What a worker sent: of any shape."""


class PromptLogprobs(Protocol):
    """How one route carries them. One instance per attempt: a stream's pieces come one after the other."""

    def lacking(self, answer: Json) -> bool:
        """Whether decode's (first) answer leaves them out."""
        ...

    def learn(self, answers: list[Json]) -> bool:
        """All that prefill answered: one object, or the events of its stream. False if it has nothing."""
        ...

    def complete(self, answer: Json) -> Json:
        """Decode's answer, or the next event of it, with what was learnt."""
        ...


def prompt_logprobs(call: Call) -> PromptLogprobs | None:
    """How to complete the answer to this request; None if it asks for nothing that could be missing."""
    if call.path == "/generate" and _true(call, "return_logprob") and _starts_in_the_prompt(call):
        return NativeLogprobs()
    if call.path == "/v1/completions" and _true(call, "echo") and _value(call, "logprobs") is not None:
        return EchoedLogprobs(outputs=0 if _value(call, "max_tokens") == 0 else 1)
    return None


def _value(call: Call, name: str) -> Json:
    try:
        return msgspec.json.decode(call.fields.get(name) or b"null")
    except (msgspec.DecodeError, RecursionError):
        return None


def _true(call: Call, name: str) -> bool:
    value = _value(call, name)
    return any(entry is True for entry in value) if isinstance(value, list) else value is True


def _starts_in_the_prompt(call: Call) -> bool:
    value = _value(call, "logprob_start_len")
    starts = value if isinstance(value, list) else [value]
    return any(isinstance(start, int) and start >= 0 for start in starts)


class NativeLogprobs:
    """`/generate`: `meta_info` has a list for each kind, in every event of a stream."""

    FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

    def __init__(self) -> None:
        self._prompts: dict[int, dict[str, Json]] = {}

    def lacking(self, answer: Json) -> bool:
        return any(not meta.get(self.FIELDS[0]) for _, meta in _metas(answer))

    def learn(self, answers: list[Json]) -> bool:
        for answer in answers:
            for index, meta in _metas(answer):
                found = {name: meta[name] for name in self.FIELDS if meta.get(name)}
                self._prompts.setdefault(index, {}).update(found)
        return any(self._prompts.values())

    def complete(self, answer: Json) -> Json:
        for index, meta in _metas(answer):
            for name, value in self._prompts.get(index, {}).items():
                meta[name] = meta.get(name) or value
        return answer


def _metas(answer: Json) -> Iterator[tuple[int, dict[str, Json]]]:
    """Each sample's number and `meta_info`, of one answer or of a list of them."""
    many = isinstance(answer, list)
    for number, sample in enumerate(answer if many else [answer]):
        if isinstance(sample, dict) and isinstance(meta := sample.get("meta_info"), dict):
            index = number if many else sample.get("index", 0)
            yield index if isinstance(index, int) else 0, meta


class EchoedLogprobs:
    """`/v1/completions` with `echo`: the prompt's entries stand before the output's in four parallel lists.

    A list that begins with a prompt is known by its first log-probability: nothing precedes the first token
    of a prompt, so it is null, as an output's never is. `outputs` is how many tokens of output a prefill
    worker's choice ends with, if its usage doesn't tell.
    """

    FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._prompts: dict[int, dict[str, list[Json]]] = {}

    def lacking(self, answer: Json) -> bool:
        return any(not _begins_with_prompt(choice) for _, choice in _choices(answer))

    def learn(self, answers: list[Json]) -> bool:
        for answer in answers:
            choices = list(_choices(answer))
            self._count_outputs(answer, len(choices))
            for index, choice in choices:
                if index not in self._prompts and not _begins_with_prompt(choice):
                    continue  # output of a stream that has no prompt
                lists = self._prompts.setdefault(index, {})
                for name, entries in _lists(choice).items():
                    lists.setdefault(name, []).extend(entries)
        for lists in self._prompts.values():
            for entries in lists.values():
                del entries[max(0, len(entries) - self._outputs) :]
        return bool(self._prompts)

    def _count_outputs(self, answer: Json, choices: int) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        total = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(total, int) and choices:
            self._outputs = total // choices

    def complete(self, answer: Json) -> Json:
        for index, choice in _choices(answer):
            if (prompt := self._prompts.pop(index, None)) is None or _begins_with_prompt(choice):
                continue
            own = _lists(choice)
            choice["logprobs"] = (choice.get("logprobs") or {}) | {
                name: prompt[name] + own.get(name, []) for name in self.FIELDS if name in prompt
            }
        return answer


def _choices(answer: Json) -> Iterator[tuple[int, dict[str, Json]]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            index = choice.get("index", 0)
            yield index if isinstance(index, int) else 0, choice


def _lists(choice: dict[str, Json]) -> dict[str, list[Json]]:
    logprobs = choice.get("logprobs")
    found = logprobs if isinstance(logprobs, dict) else {}
    return {name: found[name] for name in EchoedLogprobs.FIELDS if isinstance(found.get(name), list)}


def _begins_with_prompt(choice: dict[str, Json]) -> bool:
    return _lists(choice).get("token_logprobs", [])[:1] == [None]
