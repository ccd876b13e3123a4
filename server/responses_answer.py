"""The response object of `/v1/responses`, whole or as a sequence of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import msgspec

from diptych.engine.wire import SamplingParams, TokenLogprob
from diptych.server.errors import ApiError
from diptych.server.frontend import Frontend
from diptych.server.logprobs import chat_logprobs
from diptych.server.plan import check_rid
from diptych.server.responses_request import ResponsesRequest
from diptych.server.sample import Sample, SampleDelta, usage

Fields = dict[str, object]


def event_frame(event: object) -> bytes:
    """An event with its name, which is its `type`, on a line of its own."""
    name = cast("dict[str, str]", event)["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class ResponseAnswer:
    """Of one request. `sample` is set once it runs."""

    sample: Sample

    def __init__(
        self,
        frontend: Frontend,
        asked: ResponsesRequest,
        sampling: SamplingParams,
        *,
        with_logprobs: bool,
    ) -> None:
        self.id = check_rid(asked.rid) if asked.rid is not None else f"resp_{secrets.token_hex(24)}"
        self._item_id = f"msg_{secrets.token_hex(24)}"
        self._tokenizer = frontend.tokenizer
        self._with_logprobs = with_logprobs
        self._asked = asked
        self._sampling = sampling
        self._model = frontend.served_name
        self._created = int(time.time())
        self._next_number = 0
        self._started = False

    # ---- the whole answer -------------------------------------------------------------------------

    def whole(self) -> Fields:
        return self._response(self._status(), [self._item(self._status())])

    def _status(self) -> str:
        finish = self.sample.finish
        match finish.kind if finish else None:
            case "stop":
                return "completed"
            case "length":
                return "incomplete"
            case "abort":
                return "cancelled"
        return "in_progress"

    def _response(self, status: str, output: Sequence[Fields], error: Fields | None = None) -> Fields:
        asked, sampling = self._asked, self._sampling
        ended = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": response_usage(self.sample) if ended else None,
        }

    def _text_format(self) -> object:
        form = self._asked.text.format if self._asked.text else None
        return {"type": "text"} if form is None else form

    def _item(self, status: str) -> Fields:
        ended = status if status in ("completed", "in_progress") else "incomplete"
        content = [self._part(self.sample.text, self.sample.logprobs)] if ended != "in_progress" else []
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": ended,
            "content": content,
        }

    def _part(self, text: str, logprobs: Sequence[TokenLogprob]) -> Fields:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs(logprobs),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> object:
        return chat_logprobs(self._tokenizer, tokens)["content"] if self._with_logprobs else []

    # ---- events -----------------------------------------------------------------------------------

    def events(self, deltas: Sequence[SampleDelta]) -> Iterator[Fields]:
        """What to send for this news: at first that the response and its one message have begun."""
        if not self._started:
            self._started = True
            yield self._event("created", response=self._response("in_progress", []))
            yield self._event("in_progress", response=self._response("in_progress", []))
            yield self._event("output_item.added", output_index=0, item=self._item("in_progress"))
            yield self._part_event("content_part.added", part=self._part("", []))
        for delta in deltas:
            logprobs = self._logprobs(delta.logprobs)
            if delta.text or logprobs:
                yield self._part_event("output_text.delta", delta=delta.text, logprobs=logprobs)

    def closing(self) -> Iterable[Fields]:
        """The end of each part, then the whole answer once more."""
        sample, status = self.sample, self._status()
        part, item = self._part(sample.text, sample.logprobs), self._item(status)
        yield self._part_event("output_text.done", text=sample.text, logprobs=part["logprobs"])
        yield self._part_event("content_part.done", part=part)
        yield self._event("output_item.done", output_index=0, item=item)
        # OpenAI has no name for the end of a response that was aborted from elsewhere.
        yield self._event(
            "completed" if status == "completed" else "incomplete", response=self._response(status, [item])
        )

    def failed(self, error: ApiError) -> Iterable[Fields]:
        reason: Fields = {"code": "server_error", "message": error.message}
        yield self._event("failed", response=self._response("failed", [], reason))

    def _part_event(self, kind: str, **fields: object) -> Fields:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> Fields:
        number = self._next_number
        self._next_number += 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}


def response_usage(sample: Sample) -> Fields:
    """The counts of `usage` by their names on this route."""
    counts = usage([sample])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**cast("Fields", counts["prompt_tokens_details"]), "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
