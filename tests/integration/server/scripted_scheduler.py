"""A scheduler process without a model: it does what the prompt tells it, over the real wire.

A prompt may hold one directive, `@@{json}@@`:
  say: text to emit          tokens: token ids to emit instead     delay: seconds between tokens
  after: tokens before what follows        error: fields of Finish, kind error
  die: exit code             hang: emit no more                    stubborn: ignore Drain and the end of stdin
  transfer: seconds from the first token to the end, on a prefill worker
  unlike: samples have logprobs that differ, by their seeds
Every message that arrives is kept; the state reply's `config["received"]` shows them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tokenizers
import zmq

from diptych.common_config import LaunchConfig, Role, publish, readback
from diptych.engine import wire
from diptych.launch.processes import read_start

DIRECTIVE = re.compile(r"@@(\{.*?\})@@", re.DOTALL)
EOS = 2
CONTEXT = 8192
VOCABULARY = 49152


@dataclass
class Running:
    message: wire.Generate
    directive: dict
    tokens: list[int]
    emitted: int = 0
    received_at: float = field(default_factory=time.monotonic)


class Scripted:
    def __init__(self) -> None:
        start = read_start(0)
        publish(LaunchConfig.from_bytes(start.record), role=Role(start.role))
        self.prefill = start.role == Role.PREFILL_SCHEDULER.value
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(start.model_dir) / "tokenizer.json"))
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.connect(start.address)
        self.running: dict[str, Running] = {}
        self.due: list[tuple[float, int, str]] = []
        self.order = itertools.count()
        self.received: list[dict] = []
        self.draining = False
        self.stubborn = False

    def send(self, message: wire.SchedulerMessage) -> None:
        self.socket.send(wire.encode(message))

    def out(self, rid: str, **fields: object) -> None:
        self.send(wire.OutputBatch(outputs=[wire.TokenOutput(rid=rid, **fields)]))

    def run(self) -> None:
        if os.environ.get("SCRIPTED_FAIL"):
            sys.exit("scripted failure to start")
        self.send(
            wire.SchedulerReady(
                pid=os.getpid(),
                context_length=CONTEXT,
                vocab_size=VOCABULARY,
                max_total_tokens=100_000,
                eos_token_ids=[EOS],
            )
        )
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        while self.stubborn or not (self.draining and not self.running):
            wait = None if not self.due else max(0.0, self.due[0][0] - time.monotonic()) * 1000
            ready = dict(poller.poll(wait))
            if 0 in ready and not os.read(0, 1):
                if not self.stubborn:
                    return
                poller.unregister(0)
            while self.socket.poll(0):
                self.handle(wire.decode_from_frontend(self.socket.recv()))
            while self.due and self.due[0][0] <= time.monotonic():
                self.step(heapq.heappop(self.due)[2])

    def handle(self, message: wire.FrontendMessage) -> None:
        if not isinstance(message, wire.GetState):
            self.received.append(msgspec.to_builtins(message, str_keys=True) | {"at": time.monotonic()})
        match message:
            case wire.Generate():
                self.admit(message)
            case wire.Abort(rid=rid, reason=reason, quiet=quiet):
                if self.running.pop(rid, None) is not None and not quiet:
                    self.out(rid, finish=wire.Finish(kind="abort", message=reason))
            case wire.FlushCache(call_id=call_id):
                self.send(
                    wire.ActionReply(call_id=call_id, ok=not self.running, message="requests are running")
                )
            case wire.GetState(call_id=call_id):
                load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0, "num_used_tokens": 7}
                config = {**readback(), "received": self.received}
                metrics = "# TYPE scripted_scheduler gauge\nscripted_scheduler 1.0\n"
                self.send(wire.StateReply(call_id=call_id, metrics=metrics, load=load, config=config))
            case wire.Drain():
                self.draining = True

    def admit(self, message: wire.Generate) -> None:
        text = self.tokenizer.decode(message.prompt_ids, skip_special_tokens=False)
        found = DIRECTIVE.search(text)
        directive = json.loads(found[1]) if found else {"say": "Hello there, friend."}
        self.stubborn = self.stubborn or bool(directive.get("stubborn"))
        tokens = directive.get("tokens")
        if tokens is None:
            tokens = self.tokenizer.encode(directive.get("say", ""), add_special_tokens=False).ids
        self.running[message.rid] = Running(message, directive, list(tokens))
        self.later(message.rid, 0.0)

    def later(self, rid: str, delay: float) -> None:
        heapq.heappush(self.due, (time.monotonic() + delay, next(self.order), rid))

    def step(self, rid: str) -> None:
        run = self.running.get(rid)
        if run is None:
            return
        sampling, directive = run.message.sampling, run.directive
        if run.emitted == directive.get("after", 0):
            if "die" in directive:
                os._exit(directive["die"])
            if "error" in directive:
                del self.running[rid]
                self.out(rid, finish=wire.Finish(kind="error", **directive["error"]))
                return
            if directive.get("hang"):
                return
        cached = directive.get("cached", 0)
        if self.prefill and run.emitted:
            del self.running[rid]
            self.out(rid, finish=wire.Finish(kind="length"), cached_tokens=cached)
            return
        ended = run.emitted >= len(run.tokens) and not sampling.ignore_eos
        tokens = []
        finish = None
        if run.emitted < sampling.max_new_tokens:
            tokens = [EOS if ended else run.tokens[run.emitted % max(1, len(run.tokens))]]
            run.emitted += 1
        if tokens and tokens[0] in (*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])):
            finish = wire.Finish(kind="stop", matched=tokens[0])
        elif run.emitted >= sampling.max_new_tokens and not self.prefill:
            finish = wire.Finish(kind="length")
        logprobs = None
        if sampling.logprobs is not None:
            less = sampling.seed % 1009 / 1009 if directive.get("unlike") else 0.0
            logprobs = [self.logprob(token, run.emitted + less, sampling.logprobs) for token in tokens]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and run.emitted <= 1:
            prompt_logprobs = [None] + [
                self.logprob(token, position, sampling.prompt_logprobs)
                for position, token in enumerate(run.message.prompt_ids[1:], 1)
            ]
        if finish is not None:
            del self.running[rid]
        else:
            self.later(rid, directive.get("transfer" if self.prefill else "delay", 0.0))
        self.out(
            rid,
            token_ids=tokens,
            logprobs=logprobs,
            finish=finish,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached,
        )

    def logprob(self, token: int, position: float, top: int) -> wire.TokenLogprob:
        value = -0.25 * position
        return wire.TokenLogprob(token, value, [(token, value), (token + 1, value - 1)][:top])


if __name__ == "__main__":
    Scripted().run()
