"""The response objects of `/v1/chat/completions`, whole and as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

from diptych.server.bounds import MAX_TOP_LOGPROBS
from diptych.server.chat_reading import Reading
from diptych.server.errors import BadRequest
from diptych.server.frontend import Frontend
from diptych.server.logprobs import chat_logprobs
from diptych.server.message import Arguments, CallStart, Content, Message, Piece, Reasoning
from diptych.server.message_parser import MessageParser
from diptych.server.plan import check_rid
from diptych.server.requests import ChatRequest
from diptych.server.sample import Sample, SampleDelta, StreamUsage, usage
from diptych.server.sampling_options import whole

Fields = dict[str, object]


class ChatAnswer:
    """Of one chat request."""

    def __init__(self, frontend: Frontend, asked: ChatRequest, reading: Reading) -> None:
        self.id = check_rid(asked.rid) if asked.rid is not None else f"chatcmpl-{secrets.token_hex(16)}"
        self.logprobs: int | None = None
        if asked.top_logprobs is not None and not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.logprobs:
            self.logprobs = whole(asked.top_logprobs, 0, 0, MAX_TOP_LOGPROBS, "top_logprobs")
        self.samples: Sequence[Sample] = ()
        self._reading = reading
        self._stream_usage = StreamUsage(asked.stream_options)
        self._tokenizer = frontend.tokenizer
        self._model = frontend.served_name
        self._created = int(time.time())
        self._parsers: dict[int, MessageParser | None] = {}

    def _envelope(self, kind: str) -> Fields:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    # ---- the whole answer -------------------------------------------------------------------------

    def whole(self, samples: Sequence[Sample]) -> Fields:
        choices = [self._choice(sample) for sample in samples]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": usage(samples)}

    def _choice(self, sample: Sample) -> Fields:
        parser = self._reading.parser()
        parsed = Message(content=sample.text)
        if parser is not None:
            parsed = Message()
            parsed.add(parser.feed(sample.text))
            parsed.add(parser.finish())
        kind = sample.finish.kind if sample.finish else None
        return {
            "index": sample.spec.index,
            "message": self._message(parsed),
            "logprobs": None if self.logprobs is None else chat_logprobs(self._tokenizer, sample.logprobs),
            "finish_reason": kind and self._reading.finish_reason(kind, parser),
            "matched_stop": sample.matched,
        }

    def _message(self, parsed: Message) -> Fields:
        # A message that is calls alone has no content; one that is neither has an empty one.
        content = parsed.content or (None if parsed.calls else "")
        fields: Fields = {"role": "assistant", "content": content, "refusal": None}
        if parsed.calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        if parsed.reasoning and self._reading.shows_reasoning:
            fields["reasoning_content"] = parsed.reasoning
        return fields

    # ---- a stream ---------------------------------------------------------------------------------

    def chunks(self, deltas: Sequence[SampleDelta]) -> Iterable[Fields]:
        for delta in deltas:
            if delta.index not in self._parsers:
                self._parsers[delta.index] = self._reading.parser()
                content = None if self._reading.may_call else ""
                yield self._chunk(delta.index, {"role": "assistant", "content": content})
            parser = self._parsers[delta.index]
            pieces = self._pieces(parser, delta)
            logprobs = None
            shown = [_delta(piece) for piece in pieces]
            if self.logprobs is not None and delta.logprobs:
                logprobs = chat_logprobs(self._tokenizer, delta.logprobs)
                # Text may be held back; its tokens' logprobs aren't.
                shown = shown or [{} if self._reading.may_call else {"content": ""}]
            for fields in shown:
                yield self._chunk(delta.index, fields, logprobs)
                logprobs = None
            if delta.finish is not None:
                reason = self._reading.finish_reason(delta.finish.kind, parser)
                yield self._chunk(delta.index, {}, finish=reason, matched=delta.matched)

    def _pieces(self, parser: MessageParser | None, delta: SampleDelta) -> list[Piece]:
        if parser is None:
            return [Content(delta.text)] if delta.text else []
        pieces = parser.feed(delta.text)
        if delta.finish is not None:
            pieces += parser.finish()
        if not self._reading.shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def _chunk(
        self,
        index: int,
        delta: Fields,
        logprobs: Fields | None = None,
        finish: str | None = None,
        matched: str | int | None = None,
    ) -> Fields:
        choice: Fields = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["matched_stop"] = matched
        envelope = self._envelope("chat.completion.chunk")
        return {**envelope, "choices": [choice], **self._stream_usage.field(self.samples)}

    def usage_chunk(self) -> Iterable[Fields]:
        return self._stream_usage.closing(self.samples, self._envelope("chat.completion.chunk"))


def _delta(piece: Piece) -> Fields:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function: Fields = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
