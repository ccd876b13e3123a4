"""Orders to running workers: pause, continue, other weights, profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cluster import Cluster, Colocated
from support.tiny_model import save_tiny_model

PROMPT = [(5 + i * 13) % 40000 for i in range(70)]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "2048", "--chunked-prefill-size", "32")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The same model with weights of its own."""
    directory = save_tiny_model(tmp_path_factory.mktemp("other"))
    weights = load_file(tiny / "model.safetensors")
    weights["lm_head.weight"] = torch.roll(weights["lm_head.weight"], 1, dims=0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def cluster(tiny: Path, traces: Path) -> Iterator[Cluster]:
    cluster = Cluster(*FLAGS, "--profile-dir", str(traces), model=str(tiny))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def colocated(other: Path) -> Iterator[Colocated]:
    """Started with the other weights: what an update must lead to."""
    colocated = Colocated(*FLAGS, model=str(other))
    yield colocated
    colocated.close()


def answer(client: Any, tokens: int = 6) -> list[int]:
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    ids: list[int] = client.ok("/generate", {"input_ids": PROMPT, "sampling_params": parameters})[
        "output_ids"
    ]
    return ids


def test_a_pause_in_place_holds_requests_and_continuing_finishes_them(cluster: Cluster) -> None:
    expected = answer(cluster.client)
    assert cluster.decode.client.ok("/pause_generation", {"mode": "in_place"}) == {
        "paused": True,
        "aborted": 0,
    }
    assert cluster.decode.client.get("/server_info")[1]["status"] == "paused"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(answer, cluster.client)
        while not cluster.decode.load()["pages_held"]:
            assert not waiting.done()
        assert not waiting.done()
        assert cluster.decode.client.ok("/continue_generation", {}) == {"paused": False}
        assert waiting.result(timeout=30) == expected
    cluster.wait_until_idle()


def test_a_pause_aborts_running_requests_unless_told_otherwise(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        assert cluster.decode.client.ok("/pause_generation", {"mode": "in_place"})["paused"]
        running = pool.submit(
            cluster.client.ok,
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}},
        )
        while not cluster.decode.load()["num_running_reqs"]:
            assert not running.done()
        assert cluster.decode.client.ok("/pause_generation", {}) == {"paused": True, "aborted": 1}
        assert running.result(timeout=30)["meta_info"]["finish_reason"]["type"] == "abort"
    cluster.decode.client.ok("/continue_generation", {})
    cluster.wait_until_idle()


def test_a_profile_holds_the_steps_that_were_asked_for(cluster: Cluster, traces: Path) -> None:
    path = cluster.decode.client.ok("/start_profile", {"profile_prefix": "mine"})["path"]
    status, error = cluster.decode.client.post("/start_profile", {})
    assert (status, error["error"]["message"]) == (409, "a profile is being recorded already")
    answer(cluster.client)
    assert cluster.decode.client.ok("/stop_profile", {})["path"] == path
    assert Path(path).parent == traces.resolve()
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)
    assert cluster.decode.client.post("/stop_profile", {})[0] == 409
    for outside in ({"output_dir": "/tmp"}, {"profile_prefix": "../x"}, {"num_steps": 0}):
        status, error = cluster.decode.client.post("/start_profile", outside)
        assert (status, error["error"]["param"]) == (400, next(iter(outside)))


def test_profiles_need_a_folder_that_the_operator_named(colocated: Colocated) -> None:
    status, error = colocated.client.post("/start_profile", {})
    assert status == 400
    assert "--profile-dir" in error["error"]["message"]


def test_other_weights_serve_once_both_sides_have_them(
    cluster: Cluster, colocated: Colocated, tiny: Path, other: Path
) -> None:
    before, after = answer(cluster.client), answer(colocated.client)
    assert before != after
    for wrong, param in (
        ({"model_path": str(other / "none")}, "model_path"),
        ({"model_path": "smollm2-135m-instruct"}, "model_path"),
        ({"model_path": str(other), "load_format": "onnx"}, "load_format"),
        ({"model_path": str(other), "flush_cache": False}, "flush_cache"),
    ):
        status, error = cluster.prefill.client.post("/update_weights_from_disk", wrong)
        assert (status, error["error"]["param"]) == (400, param), error
    assert answer(cluster.client) == before

    done = cluster.prefill.client.ok("/update_weights_from_disk", {"model_path": str(other)})
    assert done["success"] is True
    status, error = cluster.client.post("/generate", {"input_ids": PROMPT})
    assert status == 502, error
    assert "do not match: model" in error["error"]["message"]
    assert done["weight_version"] in error["error"]["message"]

    asked = {"model_path": str(other), "weight_version": "step-7", "abort_all_requests": True}
    assert cluster.decode.client.ok("/update_weights_from_disk", asked)["weight_version"] == "step-7"
    assert answer(cluster.client) == after
    info = cluster.decode.client.get("/model_info")[1]
    assert (info["model_path"], info["weight_version"]) == (str(other), "step-7")
    record = cluster.decode.client.get("/server_info")[1]["record"]
    assert record["model_path"] == str(tiny)
    cluster.wait_until_idle()
