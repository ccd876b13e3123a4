"""What UCX is told: on a plain CPU machine what fits, elsewhere nothing unless somebody asked."""

from __future__ import annotations

import os

import pytest

from diptych.kvtransfer.backends import nixl_agent
from diptych.kvtransfer.backends.nixl_agent import CPU_UCX_TLS, configure_ucx

LOGGING = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_FILE": "stderr"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Without a trace of UCX, on a machine without RDMA; put back afterwards."""
    fake = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    monkeypatch.setattr(os, "environ", fake)
    monkeypatch.setattr(nixl_agent, "_has_rdma", lambda: False)
    return fake


def told(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("UCX_", "NIXL_"))}


def test_cpu_machine_gets_cross_memory_attach_and_tcp(environment: dict[str, str]) -> None:
    words = configure_ucx(on_cpu=True, ucx_tls=None, loopback=False, verbose=False)
    assert words == CPU_UCX_TLS == "cma,tcp,self"
    assert told(environment) == {"UCX_TLS": CPU_UCX_TLS, **LOGGING}


def test_worker_that_only_its_host_reaches_listens_on_loopback_only(environment: dict[str, str]) -> None:
    configure_ucx(on_cpu=True, ucx_tls=None, loopback=True, verbose=False)
    assert environment["UCX_NET_DEVICES"] == "lo"


@pytest.mark.parametrize(("on_cpu", "rdma"), [(False, False), (False, True), (True, True)])
def test_gpu_and_rdma_are_left_to_ucx(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, on_cpu: bool, rdma: bool
) -> None:
    monkeypatch.setattr(nixl_agent, "_has_rdma", lambda: rdma)
    words = configure_ucx(on_cpu=on_cpu, ucx_tls=None, loopback=True, verbose=False)
    assert words == "chosen by UCX"
    assert told(environment) == LOGGING


def test_flag_wins_over_the_environment_which_wins_over_our_choice(environment: dict[str, str]) -> None:
    environment["UCX_TLS"] = "tcp"
    assert configure_ucx(on_cpu=True, ucx_tls=None, loopback=True, verbose=False) == "tcp"
    assert "UCX_NET_DEVICES" not in environment
    assert configure_ucx(on_cpu=False, ucx_tls="rc,self", loopback=True, verbose=False) == "rc,self"
    assert environment["UCX_TLS"] == "rc,self"


def test_ucx_names_its_transports_when_the_worker_logs_such_things(environment: dict[str, str]) -> None:
    configure_ucx(on_cpu=False, ucx_tls=None, loopback=False, verbose=True)
    assert told(environment) == {"UCX_LOG_LEVEL": "info", **LOGGING}
    environment["UCX_LOG_LEVEL"] = "error"
    configure_ucx(on_cpu=False, ucx_tls=None, loopback=False, verbose=True)
    assert environment["UCX_LOG_LEVEL"] == "error"
