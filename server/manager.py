"""The tokenizer manager: hands samples to the scheduler and turns its tokens into text for the routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from diptych.engine.wire import (
    Abort,
    ActionReply,
    Drain,
    FaultsReply,
    Generate,
    OutputBatch,
    SchedulerReady,
    SetLogLevel,
    StateReply,
    TokenOutput,
)
from diptych.server.config_overlay import ConfigOverlay
from diptych.server.errors import ApiError, BadRequest, Unavailable
from diptych.server.metrics import FrontendMetrics
from diptych.server.running_request import RunningRequest
from diptych.server.sample import Sample, SampleSpec
from diptych.server.scheduler_calls import SchedulerCalls
from diptych.server.scheduler_link import SchedulerLink
from diptych.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT = 2_000
"""Characters from which tokenising leaves the event loop (a few milliseconds)."""


class TokenizerManager:
    """One per worker. Everything runs on the event loop's thread but the tokenising of long texts."""

    def __init__(
        self,
        link: SchedulerLink,
        tokenizer: Tokenizer,
        metrics: FrontendMetrics,
        overlay: ConfigOverlay,
        *,
        prefill: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.overlay = overlay
        self.ready: asyncio.Future[SchedulerReady] = asyncio.get_running_loop().create_future()
        self.dead: Unavailable | None = None
        self.draining = False
        self.held: Unavailable | None = None
        """Why no request is taken for the moment."""
        self.paused = False
        """Requests are taken, and wait."""
        self.calls = SchedulerCalls(link)
        self._link = link
        self._prefill = prefill
        self._running: dict[str, tuple[Sample, RunningRequest]] = {}
        self._requests: set[RunningRequest] = set()
        self._public: dict[str, list[str]] = {}
        self._serial = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- requests ---------------------------------------------------------------------------------

    async def encode_prompt(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Raises `BadRequest`, before any work, for a text that can't fit the context however it is cut."""
        context_length = self.ready.result().context_length
        least = len(text) // self.tokenizer.longest_token
        if least > context_length:
            raise BadRequest(
                f"{param} has {len(text)} characters, which is more than {least} tokens; the context is "
                f"{context_length}",
                param=param,
                code="context_length_exceeded",
            )
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def start(self, specs: Sequence[SampleSpec]) -> RunningRequest:
        """Hand the samples over. Raises `Unavailable` while draining or without a scheduler, and
        `BadRequest` for a request id in use.

        A prefill worker's answer waits for the end of every sample, which is when its pages have left. It
        doesn't look for stop strings: ending a sample is for the decode worker, and an abort from here
        would stop the transfer."""
        self.check_admission()
        for rid in dict.fromkeys(spec.rid for spec in specs):
            if rid in self._public:
                raise BadRequest(f"a request with the id {rid!r} is running", param="rid")
        samples = []
        for spec in specs:
            self._serial += 1
            wire_id = f"{self._serial}:{spec.rid}"
            samples.append(Sample(spec, wire_id, self.tokenizer, match_stops=not self._prefill))
        request = RunningRequest(samples, whole=self._prefill, release=self.release)
        self._requests.add(request)
        self._idle.clear()
        try:
            for sample in samples:
                self._hand_over(sample, request)
        except ApiError:
            self.release(request)
            raise
        return request

    def check_alive(self) -> None:
        """Raises `Unavailable` for good reasons only: what holds requests for a moment is no illness."""
        if self.dead is not None:
            raise self.dead
        if self.draining:
            raise Unavailable("this worker is shutting down", headers={"Retry-After": "1"})

    def check_admission(self) -> None:
        """Whether a request is taken now. Raises `Unavailable`."""
        self.check_alive()
        if self.held is not None:
            raise self.held

    def _hand_over(self, sample: Sample, request: RunningRequest) -> None:
        spec = sample.spec
        message = Generate(
            rid=sample.wire_id,
            prompt_ids=spec.prompt_ids,
            sampling=spec.sampling,
            room=spec.pairing.room if spec.pairing else None,
            bootstrap_host=spec.pairing.host if spec.pairing else None,
            bootstrap_port=spec.pairing.port if spec.pairing else None,
        )
        if not self._link.send(message):
            raise Unavailable("the worker's scheduler is gone")
        self._running[sample.wire_id] = (sample, request)
        self._public.setdefault(spec.rid, []).append(sample.wire_id)
        self.metrics.running.inc()
        self.metrics.prompt_tokens.inc(len(spec.prompt_ids))

    def release(self, request: RunningRequest) -> None:
        """Forget a request; whatever of it still runs is aborted."""
        for sample in request.samples:
            if sample.wire_id in self._running:
                self._forget(sample, "abort")
                self._link.send(Abort(rid=sample.wire_id, quiet=True))
        self._requests.discard(request)
        if not self._requests:
            self._idle.set()

    def _forget(self, sample: Sample, reason: str) -> None:
        del self._running[sample.wire_id]
        others = self._public[sample.spec.rid]
        others.remove(sample.wire_id)
        if not others:
            del self._public[sample.spec.rid]
        self.metrics.running.dec()
        self.metrics.finished.labels(reason).inc()

    def abort(self, rid: str) -> int:
        """Ask the scheduler to end the samples of `rid` with finish reason `abort`; returns how many."""
        wire_ids = self._public.get(rid, [])
        for wire_id in wire_ids:
            self._link.send(Abort(rid=wire_id))
        return len(wire_ids)

    def abort_all(self) -> int:
        for wire_id in self._running:
            self._link.send(Abort(rid=wire_id))
        return len(self._running)

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    # ---- the scheduler ----------------------------------------------------------------------------

    async def receive(self) -> None:
        """Handle the scheduler's messages until cancelled."""
        async for message in self._link.messages():
            match message:
                case OutputBatch(outputs=outputs):
                    for output in outputs:
                        self._on_output(output)
                case SchedulerReady():
                    if not self.ready.done():
                        self.ready.set_result(message)
                case ActionReply() | StateReply() | FaultsReply():
                    self.calls.answered(message)

    def _on_output(self, output: TokenOutput) -> None:
        entry = self._running.get(output.rid)
        if entry is None:  # ended here already: a stop string, a client that left
            return
        sample, request = entry
        previous, first = sample.last_token, sample.first_token
        counted = sample.absorb(output)
        if counted and sample.last_token is not None:
            self.metrics.output_tokens.inc(counted)
            if first is None:
                self.metrics.ttft.observe(sample.last_token - sample.started)
            elif previous is not None:
                gap = (sample.last_token - previous) / counted
                for _ in range(counted):
                    self.metrics.itl.observe(gap)
        if sample.finish is not None:
            if sample.last_token is not None:
                self.metrics.e2e.observe(sample.last_token - sample.started)
            self._forget(sample, sample.finish.kind)
            if output.finish is None:
                self._link.send(Abort(rid=sample.wire_id, reason="stop", quiet=True))
        request.notice(sample)

    def scheduler_died(self, message: str) -> None:
        """Fail every request, with a 503 where no output came, and refuse new ones."""
        self.dead = Unavailable(message)
        # What has produced output must not be run again, which is what a 503 invites to.
        has_run = ApiError(message, code="engine_error")
        for request in self._requests:
            request.fail(has_run if request.has_output else self.dead)
        self.calls.fail(self.dead)

    def set_log_level(self, level: str) -> None:
        """Of this process and the scheduler's. Raises `Unavailable`, and changes nothing, without one."""
        if self.dead is not None:
            raise self.dead
        if not self._link.send(SetLogLevel(level=level)):
            raise Unavailable("the worker's scheduler is gone")
        logging.getLogger().setLevel(level.upper())

    def send_drain(self) -> None:
        self._link.send(Drain())

    # ---- this engine's configuration, as the control plane changed it ---------------------------------

    def record_config_updates(self, source: str, /, **values: object) -> None:
        self.overlay.record_config_updates(source, **values)

    def withdraw_config_updates(self, source: str, /, *names: str) -> None:
        self.overlay.withdraw_config_updates(source, *names)

    def config_value(self, name: str) -> object:
        return self.overlay.config_value(name)

    def resolved_config_dict(self) -> Mapping[str, object]:
        return self.overlay.resolved_config_dict()
