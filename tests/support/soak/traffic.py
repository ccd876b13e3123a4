"""One request of a soak, from the client's side, to its one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.soak.answers import Answers
from support.soak.plan import RequestPlan

EXPECTED_STATUSES = frozenset({429, 502, 503, 504})
"""With which a request may fail while faults happen. A 4xx would blame the client, a 500 is a bug."""


@dataclass(slots=True)
class Outcome:
    """How a request ended. `kind`: `finished`, `aborted`, `left`, `failed`."""

    plan: RequestPlan
    kind: str = ""
    reason: str = ""
    """For the summary: status and sentence, without numbers."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What no fault excuses."""


class Traffic:
    def __init__(self, url: str, answers: Answers, session: aiohttp.ClientSession, limit: float) -> None:
        """`limit`: seconds within which every request must have ended."""
        self._url = url
        self._answers = answers
        self._session = session
        self._limit = limit
        self._number = 0

    async def run(self, plan: RequestPlan) -> Outcome:
        """Never raises for anything that the servers do."""
        self._number += 1
        rid = f"soak-{self._number}"
        outcome = Outcome(plan)
        began = time.monotonic()
        request = asyncio.create_task(self._request(plan, rid, outcome))
        ending = asyncio.create_task(self._end_early(plan, rid, request))
        done, _ = await asyncio.wait([request], timeout=self._limit)
        outcome.seconds = time.monotonic() - began
        if not done:
            outcome.kind, outcome.reason = "failed", "hung"
            outcome.wrong.append(f"no end within {self._limit:g} s: {plan}")
            request.cancel()
        # Also what the request raised, were it a bug of the soak itself.
        results = await asyncio.gather(request, return_exceptions=True)
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await ending
        if isinstance(results[0], asyncio.CancelledError):
            outcome.kind = outcome.kind or "left"
        elif isinstance(results[0], BaseException):
            raise results[0]
        return outcome

    async def _end_early(self, plan: RequestPlan, rid: str, request: asyncio.Task[None]) -> None:
        if plan.ending == "stay":
            return
        await asyncio.wait([request], timeout=plan.patience)
        if plan.ending == "leave":
            request.cancel()
            return
        async with self._session.post(f"{self._url}/abort_request", json={"rid": rid}) as response:
            await response.read()

    async def _request(self, plan: RequestPlan, rid: str, outcome: Outcome) -> None:
        body = {
            "rid": rid,
            "input_ids": self._answers.prompts[plan.prompt],
            "stream": plan.stream,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": plan.max_tokens,
                "ignore_eos": True,
                "n": plan.samples,
            },
        }
        try:
            async with self._session.post(f"{self._url}/generate", json=body) as response:
                if response.status != 200:
                    self._failed(outcome, response.status, await response.text())
                elif plan.stream:
                    await self._read_stream(response, plan, outcome)
                else:
                    answer = await response.json()
                    answers = answer if isinstance(answer, list) else [answer]
                    self._judge(outcome, answers)
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            # The head of an answer was on its way when a worker died: there is no other way to say so.
            outcome.kind, outcome.reason = "failed", f"cut short: {type(error).__name__}"

    async def _read_stream(
        self, response: aiohttp.ClientResponse, plan: RequestPlan, outcome: Outcome
    ) -> None:
        """Events are cumulative; each must be right by itself."""
        latest: dict[int, Any] = {}
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                self._failed(outcome, 0, data.decode())
                break
            index = event.get("index", 0)
            before = latest.get(index, {"output_ids": []})["output_ids"]
            if event["output_ids"][: len(before)] != before:
                outcome.wrong.append(f"a stream took tokens back: {before}, then {event['output_ids']}")
            latest[index] = event
        if outcome.kind != "failed":
            self._judge(outcome, [latest[index] for index in sorted(latest)])
        else:
            self._compare(outcome, [event["output_ids"] for event in latest.values()])

    def _judge(self, outcome: Outcome, answers: Sequence[dict[str, Any]]) -> None:
        plan = outcome.plan
        outputs = [answer["output_ids"] for answer in answers]
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        self._compare(outcome, outputs)
        if len(answers) != plan.samples:
            outcome.wrong.append(f"{len(answers)} samples instead of {plan.samples}")
        for output, reason in zip(outputs, reasons, strict=True):
            if reason == "length" and len(output) != plan.max_tokens:
                outcome.wrong.append(f"length {len(output)} instead of {plan.max_tokens}")
            if reason not in ("length", "abort"):
                outcome.wrong.append(f"finish_reason {reason}")
        outcome.kind = "aborted" if "abort" in reasons else "finished"

    def _compare(self, outcome: Outcome, outputs: Sequence[list[int]]) -> None:
        problems = [self._answers.wrong(outcome.plan.prompt, output) for output in outputs if output]
        outcome.wrong += [f"wrong tokens: {problem}" for problem in problems if problem is not None]

    def _failed(self, outcome: Outcome, status: int, text: str) -> None:
        outcome.kind = "failed"
        try:
            error = json.loads(text)["error"]
            message, code = str(error["message"]), error["code"]
        except (ValueError, KeyError, TypeError):
            outcome.wrong.append(f"status {status} without an error in OpenAI's shape: {text[:200]}")
            return
        outcome.reason = f"{status or 'in mid-stream'}: {_without_numbers(message)}"
        if status and status not in EXPECTED_STATUSES:
            outcome.wrong.append(f"status {status}: {message}")
        if not message or "internal error" in message:
            outcome.wrong.append(f"{error}")
        if code == "timeout" and "request-timeout" in message:
            outcome.wrong.append(f"only the router's time-out ended it: {message}")


def _without_numbers(message: str) -> str:
    message = re.sub(r"\b(prefill|decode)( worker)? http://\S+", r"\1", message)
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"\b[0-9a-f]{32}\b", "#", message))[:110]
