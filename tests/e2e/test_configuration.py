"""What real processes may read, show and tell each other of their configuration."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from support.cluster import MODEL
from support.processes import Launched, children_of, command_line

from diptych.common_config import Role
from diptych.common_config.namespaces.exec import ATTENTION_BACKENDS
from diptych.common_config.role_sets import ROLE_SETS

NARROWED = Path(support.__file__).with_name("narrowed_role.py")
ROUTER_FLAGS = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:19", "--port", "0")
WORKER_FLAGS = ("--model-path", MODEL, "--port", "0", "--max-total-tokens", "4096")
SECRET = "s3cret-of-a-test"

NARROWER = [
    *((Role.ROUTER, namespace) for namespace in sorted(ROLE_SETS[Role.ROUTER] or ())),
    (Role.COLOCATED_FRONTEND, "observability"),
    (Role.COLOCATED_SCHEDULER, "device"),
]


@pytest.mark.parametrize(("role", "namespace"), NARROWER)
def test_one_namespace_less_ends_the_worker_with_what_to_do(role: Role, namespace: str) -> None:
    flags = ROUTER_FLAGS if role is Role.ROUTER else WORKER_FLAGS
    done = subprocess.run(
        [sys.executable, str(NARROWED), role.value, namespace, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "DIPTYCH_ROLE_NAMESPACES": "enforce"},
    )
    assert done.returncode == 1, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if "RoleNamespaceError: " in line]
    assert f"role {role.value} read namespace {namespace} at /" in message
    assert "outside its set (" in message
    assert "DIPTYCH_ROLE_NAMESPACES=record" in message
    assert "common_config/role_sets.py" in message


@pytest.fixture(scope="module")
def local() -> Iterator[Launched]:
    flags = ("--port", "0", "--max-total-tokens", "4096", "--chunked-prefill-size", "64")
    launched = Launched("launch-local", *flags, "--log-level", "debug", "--api-key", SECRET)
    try:
        yield launched.ready()
        launched.stop()
        assert SECRET not in launched.output
    finally:
        launched.kill()


def ask(url: str, body: object = None) -> Any:
    """JSON of a request that carries the key."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {SECRET}"})
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_no_child_shows_a_secret_in_its_arguments_or_its_account_of_itself(local: Launched) -> None:
    children = children_of(local.pid)
    everyone = [*children, *(pid for child in children for pid in children_of(child))]
    assert len(everyone) == 5
    assert not [pid for pid in everyone if SECRET.encode() in command_line(pid)]
    for role in ("prefill", "decode"):
        url = local.wait_for_line(rf"^  {role} +(http\S+)").group(1)
        info = ask(f"{url}/server_info")
        assert info["record"]["api_key"] == "<redacted>"
        assert SECRET not in json.dumps(info)
        # The leaf keeps what was asked (nothing); the runner says what was built.
        assert info["scheduler"]["bags"]["exec"]["kernel"]["attention_backends"] == [None, None]
        assert info["scheduler"]["runner"]["prefill_attention_backend"] in ATTENTION_BACKENDS
        assert info["scheduler"]["runner"]["dtype"] == "bfloat16"
    assert SECRET not in json.dumps(ask(f"{local.url}/server_info"))


def test_decode_is_told_what_prefill_has_published(local: Launched) -> None:
    prefill = ask(local.wait_for_line(r"^  prefill +(http\S+)").group(1) + "/server_info")
    route = ask(f"http://127.0.0.1:{prefill['disaggregation_bootstrap_port']}/route")
    published = route["published"]
    assert published == {name: prefill["scheduler"]["bags"][name] for name in ("schedule", "disagg")}
    assert published["schedule"]["chunked_prefill_size"] == 64
    assert published["disagg"]["disaggregation_bootstrap_port"] == prefill["disaggregation_bootstrap_port"]
    assert route["ranks"][0]["control_address"].endswith(
        f":{published['disagg']['disaggregation_control_port']}"
    )
    ask(f"{local.url}/v1/completions", {"prompt": "The sea", "max_tokens": 2})
    line = local.wait_for_line(r"\[decode\].* prefill worker .* has published (\{.*\})$", 10)
    assert json.loads(line.group(1)) == published


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_control_port_that_was_left_open_is_read_back_as_the_one_bound(local: Launched, role: str) -> None:
    info = ask(local.wait_for_line(rf"^  {role} +(http\S+)").group(1) + "/server_info")
    port = info["scheduler"]["bags"]["disagg"]["disaggregation_control_port"]
    assert {"source": "control socket", "leaf": "disaggregation_control_port", "old": 0, "new": port} in info[
        "scheduler"
    ]["overrides"]
    assert info["record"]["disaggregation_control_port"] == 0
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_pair_takes_a_new_name_and_log_level_while_it_runs(local: Launched) -> None:
    workers = [local.wait_for_line(rf"^  {role} +(http\S+)").group(1) for role in ("prefill", "decode")]
    asked = {"served_model_name": "renamed", "weight_version": "2", "log_level": "warning"}
    for worker in workers:
        assert ask(f"{worker}/update_config", asked) == asked
    answer = ask(f"{local.url}/v1/completions", {"model": "renamed", "prompt": "The sea", "max_tokens": 2})
    assert answer["model"] == ask(f"{local.url}/v1/models")["data"][0]["id"] == "renamed"
    native = ask(f"{local.url}/generate", {"text": "The sea", "sampling_params": {"max_new_tokens": 2}})
    assert native["meta_info"]["weight_version"] == "2"
    for worker in workers:
        assert ask(f"{worker}/update_config", dict.fromkeys(asked))["log_level"] == "debug"
    for role in ("prefill", "decode"):
        local.wait_for_line(rf"{role}_scheduler INFO .*: log level is now debug$", 10)
    assert "log level is now warning" not in local.output
