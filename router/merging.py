"""Relaying an answer into which something of prefill's answer may have to be merged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import msgspec

from diptych.router.attempt import Attempt
from diptych.router.legs import relayed_headers
from diptych.router.prompt_logprobs import Json, PromptLogprobs

EVENT_STREAM = "text/event-stream"


class Merged:
    """Decode's answer as it goes to the client: `begin()`, then `next_bytes()` until there are none.

    A plain answer is held back until it is whole. A stream goes on event by event; if its first event already
    has what prefill could add, or prefill has nothing to add, the bytes are decode's as they come.
    """

    def __init__(
        self, attempt: Attempt, head: aiohttp.ClientResponse, first: bytes, shape: PromptLogprobs
    ) -> None:
        self._attempt = attempt
        self._shape = shape
        self.headers = relayed_headers(head)
        """For the client, once `begin` has returned."""
        streams = head.content_type == EVENT_STREAM
        self._pieces = self._stream(first) if streams else self._plain(first)

    async def begin(self) -> bytes:
        """The first bytes. Raises LegFailure."""
        return await self.next_bytes()

    async def next_bytes(self) -> bytes:
        """The next bytes, `b""` at the end. Raises LegFailure."""
        return await anext(self._pieces, b"")

    async def _plain(self, first: bytes) -> AsyncIterator[bytes]:
        body = bytearray(first)
        while chunk := await self._attempt.next_bytes():
            body += chunk
        whole = await self._completed(bytes(body))
        if "Content-Length" in self.headers:
            self.headers["Content-Length"] = str(len(whole))
        yield whole

    async def _stream(self, first: bytes) -> AsyncIterator[bytes]:
        buffer, chunk = bytearray(), first
        merging = False
        while chunk:
            buffer += chunk.replace(b"\r", b"")  # JSON has none, so it is only ever the other end of a line
            if not merging and (event := _first_json_event(buffer)) is not None:
                merging = self._shape.lacking(event) and self._shape.learn(await self._prefill_answers())
                if not merging:
                    break
            while merging and (end := buffer.find(b"\n\n")) >= 0:
                event_bytes = bytes(buffer[: end + 2])
                del buffer[: end + 2]
                yield self._completed_event(event_bytes)
            chunk = await self._attempt.next_bytes()
        if buffer:
            yield bytes(buffer)
        while chunk and (chunk := await self._attempt.next_bytes()):
            yield chunk

    async def _completed(self, body: bytes) -> bytes:
        answer = _json(body)
        if answer is None or not self._shape.lacking(answer):
            return body
        if not self._shape.learn(await self._prefill_answers()):
            return body
        return msgspec.json.encode(self._shape.complete(answer))

    def _completed_event(self, event: bytes) -> bytes:
        answer = _json(_data(event))
        if answer is None:  # the end mark, a comment
            return event
        return b"data: " + msgspec.json.encode(self._shape.complete(answer)) + b"\n\n"

    async def _prefill_answers(self) -> list[Json]:
        """Waits for the end of prefill's answer."""
        body = await self._attempt.prefill_body()
        if (whole := _json(body)) is not None:
            return [whole]
        events = (_json(_data(event)) for event in body.replace(b"\r\n", b"\n").split(b"\n\n"))
        return [event for event in events if event is not None]


def _json(text: bytes) -> Json | None:
    try:
        answer = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return answer if isinstance(answer, dict | list) else None


def _data(event: bytes) -> bytes:
    """What one server-sent event carries."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _first_json_event(buffer: bytearray) -> Json | None:
    """The first whole event that carries JSON, if it has come."""
    *events, _ = bytes(buffer).split(b"\n\n")
    return next((answer for event in events if (answer := _json(_data(event))) is not None), None)
