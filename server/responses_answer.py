"""The response object of `/v1/responses`, whole or as a sequence of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import msgspec

from diptych.engine.wire import SamplingParams
from diptych.server.chat_reading import Reading
from diptych.server.errors import ApiError
from diptych.server.frontend import Frontend
from diptych.server.logprobs import chat_logprobs
from diptych.server.message import Content, Piece, Reasoning
from diptych.server.plan import check_rid
from diptych.server.responses_output import Fields, ResponseOutput
from diptych.server.responses_request import ResponsesRequest
from diptych.server.sample import Sample, SampleDelta, usage


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
        reading: Reading,
        *,
        with_logprobs: bool,
    ) -> None:
        self.id = check_rid(asked.rid) if asked.rid is not None else f"resp_{secrets.token_hex(24)}"
        self._asked = asked
        self._sampling = sampling
        self._tokenizer = frontend.tokenizer
        self._model = frontend.served_name
        self._created = int(time.time())
        self._parser = reading.parser()
        self._shows_reasoning = reading.shows_reasoning
        self._with_logprobs = with_logprobs
        self._logprobs_given = 0
        self._output = ResponseOutput(self._new_logprobs)
        self._next_number = 0

    def whole(self) -> Fields:
        for _ in self._output.feed(self._pieces(self.sample.text, last=True)):
            pass
        for _ in self._output.end(self._item_status()):
            pass
        return self._response(self._status())

    # ---- events -----------------------------------------------------------------------------------

    def events(self, deltas: Sequence[SampleDelta]) -> Iterator[Fields]:
        """What to send for this news: at first that the response has begun."""
        if not self._next_number:
            yield self._numbered({"type": "created", "response": self._response("in_progress")})
            yield self._numbered({"type": "in_progress", "response": self._response("in_progress")})
        for delta in deltas:
            pieces = self._pieces(delta.text, last=delta.finish is not None)
            yield from map(self._numbered, self._output.feed(pieces))

    def closing(self) -> Iterator[Fields]:
        """The end of what is open, then the whole answer once more."""
        yield from map(self._numbered, self._output.end(self._item_status()))
        # OpenAI has no name for the end of a response that was aborted from elsewhere.
        kind = "completed" if self._status() == "completed" else "incomplete"
        yield self._numbered({"type": kind, "response": self._response(self._status())})

    def failed(self, error: ApiError) -> Iterable[Fields]:
        reason: Fields = {"code": "server_error", "message": error.message}
        yield self._numbered({"type": "failed", "response": self._response("failed", reason)})

    def _numbered(self, event: Fields) -> Fields:
        number = self._next_number
        self._next_number += 1
        return {**event, "type": f"response.{event['type']}", "sequence_number": number}

    # ---- the sample -------------------------------------------------------------------------------

    def _pieces(self, text: str, *, last: bool) -> list[Piece]:
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.feed(text) + (self._parser.finish() if last else [])
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def _new_logprobs(self) -> tuple[object, ...]:
        """Of the message's tokens: those that the model thought in have no place in a response."""
        if not self._with_logprobs:
            return ()
        start = max(self._logprobs_given, self.sample.reasoning_tokens or 0)
        self._logprobs_given = len(self.sample.logprobs)
        tokens = self.sample.logprobs[start:]
        return tuple(cast("list[object]", chat_logprobs(self._tokenizer, tokens)["content"]))

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

    def _item_status(self) -> str:
        return "completed" if self._status() == "completed" else "incomplete"

    # ---- the response object ----------------------------------------------------------------------

    def _response(self, status: str, error: Fields | None = None) -> Fields:
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
            "output": self._output.items,
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


def response_usage(sample: Sample) -> Fields:
    """The counts of `usage` by their names on this route."""
    counts = usage([sample])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**cast("Fields", counts["prompt_tokens_details"]), "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": sample.reasoning_tokens or 0},
        "total_tokens": counts["total_tokens"],
    }
