"""Server-sent events: one `data:` line of JSON each, `[DONE]` at the end, unless a route has others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from aiohttp import web

from diptych.server.errors import ApiError
from diptych.server.running_request import RunningRequest
from diptych.server.sample import SampleDelta

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Render = Callable[[Sequence[SampleDelta]], Iterable[object]]


DONE = b"data: [DONE]\n\n"


def frame(event: object) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def error_object(error: ApiError) -> Iterable[object]:
    return [error.body()]


async def stream(
    request: web.Request,
    running: RunningRequest,
    render: Render,
    closing: Callable[[], Iterable[object]],
    *,
    failed: Callable[[ApiError], Iterable[object]] = error_object,
    frame: Callable[[object], bytes] = frame,
    end: bytes = DONE,
) -> web.StreamResponse:
    """Send what `render` makes of each batch of news, then `closing()` and `end`.

    Headers go out with the first news, so a request that fails before it raises its `ApiError` and gets a
    plain HTTP status; one that fails later gets the events of `failed`."""
    deltas = await running.next()
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    try:
        while True:
            events = b"".join(frame(event) for event in render(deltas))
            if events:
                await response.write(events)
            if running.ended:
                break
            deltas = await running.next()
        last = closing()
    except ApiError as error:
        last = failed(error)
    await response.write(b"".join(frame(event) for event in last) + end)
    await response.write_eof()
    return response


def json_response(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
