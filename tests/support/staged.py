"""One request in every state that a fault can hold, all at the same moment: what a failure then hits.

    with Clients() as clients:
        stage = Stage(cluster, clients)   # each state is seen in /metrics or /faults
        …                                 # the failure
        stage["finishing"].decode.result(5)

Each request is posted to both workers by the stage itself, so that what either of them answers is seen; three
more go through the router. What each is called, and how it is held (P, D: on prefill, decode):

| name | on prefill | on decode | held by |
|---|---|---|---|
| `running` | done | RUNNING | D `gate("compute")` |
| `receiving` | TRANSFERRING / CONFIRMING | RECEIVING | P `hold("complete")` |
| `finishing` | TRANSFERRING / FINISHING | RECEIVING | P `stall()` |
| `confirming` | TRANSFERRING / CONFIRMING | RUNNING | D `hold("verified")` |
| `draining` | ended / DRAINING | ended / DRAINING | P `stall()`, and an abort |
| `ahead` | TRANSFERRING / AWAITING_DESTINATION | RECEIVING | D `hold("reserve")` |
| `sending` | FORWARDING / SENDING | RECEIVING | P `gate("compute", skip=1)` |
| `waiting` | WAITING / READY | RECEIVING | behind `sending` |
| `bootstrapping` | BOOTSTRAPPING / AWAITING_DESTINATION | RECEIVING | D `hold("reserve")`, behind `sending` |
| `preallocating` | BOOTSTRAPPING / AWAITING_DESTINATION | PREALLOCATING / AGREED | D `gate("preallocate")` |
| `handshaking` | BOOTSTRAPPING / AWAITING_DESTINATION | HANDSHAKING / HANDSHAKING | D `lookup()` |

`running`, `waiting` and `preallocating` are there once more as `… through the router`. Not here: RETRACTED,
which takes a full pool; HANDSHAKING at first contact, which takes a worker that is new; READY of decode,
VERIFYING, FAILED and the ends, which last one turn of a loop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model
from support.answers import Answer, Clients, wait_until
from support.cluster import MODEL, Cluster, Worker
from support.oracle import greedy_oracle

PROMPT_TOKENS = 150
"""Three chunks of `CHUNK`, ten pages of 16."""
CHUNK = 64
PAGES = 10
OUTPUT_TOKENS = 6
HEARTBEAT_S = 1.0
LOST_S = 2 * HEARTBEAT_S
"""A peer that is silent for longer is lost."""
BOOTSTRAP_S = 10.0
"""Longer than it takes to build a stage on a busy machine."""
SLACK_S = 4.0
"""For a machine whose cores are all busy."""

_rooms = itertools.count(random.getrandbits(40))


def new_room() -> int:
    return next(_rooms)


def stage_cluster(backend: str, *flags: str) -> Cluster:
    """What a `Stage` needs. All other deadlines are far away: what ends sooner wasn't ended by one."""
    return Cluster(
        *("--disaggregation-transfer-backend", backend, "--dtype", "float32"),
        *("--page-size", "16", "--max-total-tokens", "4096", "--max-receiving-fraction", "1"),
        *("--heartbeat-interval", str(HEARTBEAT_S), "--bootstrap-timeout", str(BOOTSTRAP_S)),
        *("--handshake-timeout", "60", "--receive-timeout", "60", "--transfer-timeout", "60"),
        "--enable-fault-injection",
        *flags,
        prefill_flags=("--chunked-prefill-size", str(CHUNK)),
        decode_flags=("--enable-kv-checksum",),
        router_flags=("--health-interval", "0.5"),
    )


def prompt(name: str) -> list[int]:
    """Always the same for a name; no two begin alike, so none is in another's cached prefix."""
    rng = random.Random(name)
    return [rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]


def body(name: str, *, num_tokens: int = OUTPUT_TOKENS, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": prompt(name), "sampling_params": sampling, **more}


@dataclass
class Staged:
    """One request that is held in a state."""

    name: str
    rid: str
    room: int
    began: float = field(default_factory=time.monotonic)
    legs: dict[str, Answer] = field(default_factory=dict)
    """`prefill` and `decode`, or `router`."""

    @property
    def prefill(self) -> Answer:
        return self.legs["prefill"]

    @property
    def decode(self) -> Answer:
        return self.legs["decode"]

    @property
    def router(self) -> Answer:
        return self.legs["router"]


def send_pair(cluster: Cluster, clients: Clients, name: str, *, room: int | None = None) -> Staged:
    """To both workers, as a router would, with the prompt of that name."""
    room = new_room() if room is None else room
    staged = Staged(name, f"{name} {room}", room)
    request = body(
        name,
        rid=staged.rid,
        bootstrap_host="127.0.0.1",
        bootstrap_port=int(cluster.prefill.launched.bootstrap_port),
        bootstrap_room=room,
    )
    for role, worker in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        staged.legs[role] = clients.post(worker.client, "/generate", request)
    return staged


@contextlib.contextmanager
def stopped(worker: Worker) -> Iterator[float]:
    """Both processes stop, and go on in the end; yields since when."""
    pids = (worker.launched.scheduler_pid(), worker.launched.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def assert_right(name: str, answer: tuple[int, Any], num_tokens: int = OUTPUT_TOKENS) -> None:
    """Tokens are those that `transformers` gives for the prompt of that name."""
    status, content = answer
    assert status == 200, f"{name}: {content}"
    assert len(content["output_ids"]) == num_tokens
    oracle = greedy_oracle(prepare_model(MODEL, cache_dir=default_cache_dir(), report=print))
    assert oracle.near_ties(prompt(name), content["output_ids"]) == 0


def assert_recovered(cluster: Cluster) -> None:
    """Both pools at their baseline, and the next request is right."""
    cluster.flush()
    assert all(worker.load()["pages_free"] == worker.load()["pages_total"] for worker in cluster.workers)
    assert_right("next", cluster.client.post("/generate", body("next")))
    cluster.flush()


def rooms_in(worker: Worker, state: str) -> int:
    """Sessions of a worker in that state of the transfer."""
    ending = f',state="{state}"}}'
    samples = worker.client.metrics().items()
    return int(sum(v for k, v in samples if k.startswith("diptych_transfer_rooms{") and k.endswith(ending)))


class Stage:
    """Built by creation, on a `stage_cluster` where nothing is cached or runs."""

    def __init__(self, cluster: Cluster, clients: Clients) -> None:
        self._cluster = cluster
        self._clients = clients
        self._requests: dict[str, Staged] = {}
        named = ("running", "receiving", "finishing", "confirming", "draining", "ahead", "bootstrapping")
        self._rooms = {name: new_room() for name in named}
        self._hold_what_has_a_room()
        self._reach_the_end_of_prefill()
        self._fill_the_queues()

    def __getitem__(self, name: str) -> Staged:
        return self._requests[name]

    def __iter__(self) -> Iterator[Staged]:
        return iter(self._requests.values())

    def release(self) -> None:
        """Nothing is held any more."""
        for worker in self._cluster.workers:
            worker.faults.release()

    def _hold_what_has_a_room(self) -> None:
        prefill, decode, room = self._cluster.prefill.faults, self._cluster.decode.faults, self._rooms
        prefill.hold("complete", room=room["receiving"])
        prefill.stall(room=room["finishing"])
        prefill.stall(room=room["draining"])
        for name in ("ahead", "bootstrapping"):
            decode.hold("reserve", room=room[name])
        decode.hold("verified", room=room["confirming"])
        decode.gate("compute")

    def _reach_the_end_of_prefill(self) -> None:
        prefill, decode = self._cluster.prefill, self._cluster.decode
        self._send_through_router("running")
        for name in ("running", "receiving", "finishing", "confirming", "draining"):
            self._send(name)
        self._wait(decode, "receiving", 3)
        self._wait(prefill, "finishing", 2)
        self._wait(prefill, "confirming", 2)
        wait_until(lambda: decode.load()["num_running_reqs"] == 3, "three requests are decoding")
        assert prefill.client.ok("/abort_request", {"rid": self["draining"].rid}) == {"aborted": 1}
        self._wait(prefill, "draining", 1)
        self._wait(decode, "draining", 1)
        before = prefill.client.metrics()["diptych_prefill_tokens_total"]
        self._send("ahead")
        decode.faults.wait_held(room=self._rooms["ahead"])
        wait_until(
            lambda: prefill.client.metrics()["diptych_prefill_tokens_total"] == before + PROMPT_TOKENS,
            "a prompt without a destination is computed",
        )

    def _fill_the_queues(self) -> None:
        prefill, decode = self._cluster.prefill, self._cluster.decode
        prefill.faults.gate("compute", skip=1)
        self._send("sending")
        prefill.faults.wait_held(where="compute")
        self._wait(prefill, "sending", 1)
        self._send("waiting")
        self._send_through_router("waiting")
        self._wait(prefill, "ready", 2)
        self._send("bootstrapping")
        decode.faults.wait_held(room=self._rooms["bootstrapping"])
        decode.faults.gate("preallocate")
        self._send("preallocating")
        self._send_through_router("preallocating")
        self._wait(decode, "agreed", 2)
        decode.faults.lookup()
        self._send("handshaking")
        self._wait(decode, "handshaking", 1)
        self._wait(prefill, "awaiting destination", 5)

    def _send(self, name: str) -> None:
        self._requests[name] = send_pair(self._cluster, self._clients, name, room=self._rooms.get(name))

    def _send_through_router(self, name: str) -> None:
        staged = Staged(f"{name} through the router", f"{name} through the router {new_room()}", -1)
        request = body(name, rid=staged.rid)
        staged.legs["router"] = self._clients.post(self._cluster.client, "/generate", request)
        self._requests[staged.name] = staged

    @staticmethod
    def _wait(worker: Worker, state: str, number: int) -> None:
        what = f"{number} rooms of {worker.launched.command} are {state}"
        wait_until(lambda: rooms_in(worker, state) == number, what)
