"""Pairing on its own: who is a candidate."""

from __future__ import annotations

import pytest

from diptych.common_config import Program, Role, parse_command_line, publish
from diptych.router.call import Call
from diptych.router.errors import RouterError
from diptych.router.pairing import Pairing
from diptych.router.policies.simple import RoundRobin
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole

CALL = Call(path="/generate", fields={}, headers={}, request_id="r")


@pytest.fixture(autouse=True)
def settings():
    publish(parse_command_line(Program.ROUTER, ["--breaker-failures", "2"]), role=Role.ROUTER)


def workers(role, count):
    made = [Worker(role, f"http://host-{role}-{i}:80", 8998) for i in range(count)]
    for worker in made:
        worker.mark_up()
    return made


async def pairing(prefills, decodes):
    registry = WorkerRegistry([*prefills, *decodes])
    return Pairing(registry, RoundRobin(), RoundRobin())


async def test_unhealthy_workers_are_not_paired():
    prefills, decodes = workers(WorkerRole.PREFILL, 2), workers(WorkerRole.DECODE, 2)
    subject = await pairing(prefills, decodes)
    decodes[0].mark_down("gone")
    assert {subject.pick(CALL).decode for _ in range(4)} == {decodes[1]}
    decodes[0].mark_up()
    assert {subject.pick(CALL).decode for _ in range(4)} == set(decodes)


async def test_workers_with_an_open_breaker_are_paired_only_when_there_is_no_other():
    prefills, decodes = workers(WorkerRole.PREFILL, 1), workers(WorkerRole.DECODE, 2)
    subject = await pairing(prefills, decodes)
    for _ in range(2):
        decodes[0].breaker.failed()
    assert {subject.pick(CALL).decode for _ in range(4)} == {decodes[1]}
    for _ in range(2):
        decodes[1].breaker.failed()
    assert {subject.pick(CALL).decode for _ in range(4)} == set(decodes)


async def test_avoided_workers_are_taken_only_when_there_is_no_other():
    prefills, decodes = workers(WorkerRole.PREFILL, 1), workers(WorkerRole.DECODE, 3)
    subject = await pairing(prefills, decodes)
    for _ in range(5):
        pair = subject.pick(CALL, [prefills[0], decodes[0], decodes[1]])
        assert (pair.prefill, pair.decode) == (prefills[0], decodes[2])


async def test_a_side_without_a_healthy_worker_is_a_503_that_names_it():
    prefills, decodes = workers(WorkerRole.PREFILL, 1), workers(WorkerRole.DECODE, 1)
    subject = await pairing(prefills, decodes)
    prefills[0].mark_down("no power")
    with pytest.raises(RouterError, match=r"prefill.*no power") as raised:
        subject.pick(CALL)
    assert raised.value.status == 503
    assert "decode" not in raised.value.message


def test_a_worker_url_without_a_host_is_refused():
    with pytest.raises(ValueError, match="host"):
        Worker(WorkerRole.DECODE, "/only/a/path")
