"""Everything that keeps others out, switched on together: TLS, both keys and the cluster secret, through a
router and both legs. And what a worker with another secret gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
from support.certificates import make_certificate
from support.client import Client
from support.cluster import Cluster
from support.processes import Launched
from support.tiny_model import save_tiny_model

KEY, ADMIN, SECRET = "key-of-the-users", "key-of-the-operator", "secret-of-the-cluster"
KEYS = {"DIPTYCH_API_KEY": KEY, "DIPTYCH_ADMIN_API_KEY": ADMIN}
BODY = {
    "input_ids": [5, 6, 7, 8] * 20,
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}
HANDSHAKE_SECONDS = 10.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def stranger(model: str) -> Iterator[Launched]:
    """A decode worker of another cluster: with another secret."""
    flags = ("--model-path", model, "--port", "0", "--max-total-tokens", "2048", "--handshake-timeout", "10")
    launched = Launched("launch-decode", *flags, environment={"DIPTYCH_CLUSTER_SECRET": "secret-of-another"})
    yield launched
    try:
        launched.stop()
    finally:
        launched.kill()


@pytest.fixture(scope="module")
def cluster(files: dict[str, str], model: str, stranger: Launched) -> Iterator[Cluster]:
    tls = ("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"])
    cluster = Cluster(
        *(*tls, "--max-total-tokens", "2048"),
        router_flags=(*tls, "--worker-ca-file", files["cert"]),
        model=model,
        environment={**KEYS, "DIPTYCH_CLUSTER_SECRET": SECRET},
        connect=partial(Client, key=ADMIN, ca_file=files["cert"]),
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def user(cluster: Cluster, files: dict[str, str]) -> Client:
    return Client(cluster.client.url, key=KEY, ca_file=files["cert"])


def test_requests_pass_through_both_legs(cluster: Cluster, user: Client) -> None:
    assert cluster.client.url.startswith("https://")
    answer = user.ok("/generate", BODY)
    assert len(answer["output_ids"]) == 8
    assert user.ok("/generate", BODY)["output_ids"] == answer["output_ids"]
    streamed = user.events("/v1/completions", {"prompt": BODY["input_ids"], "max_tokens": 8})
    assert len(streamed) > 1
    cluster.wait_until_idle()
    assert cluster.decode.client.metrics()['diptych_transfer_rooms_done_total{backend="nixl"}'] >= 3
    for worker in cluster.workers:
        refused = 'diptych_transfer_connections_refused_total{backend="nixl"}'
        assert worker.client.metrics()[refused] == 0


def test_the_router_asks_for_the_admin_key_and_uses_the_right_one_itself(
    cluster: Cluster, user: Client, files: dict[str, str]
) -> None:
    assert Client(user.url, ca_file=files["cert"]).post("/generate", BODY)[0] == 401
    for path, body in (("/flush_cache", {}), ("/abort_request", {"abort_all": True})):
        status, answer = user.post(path, body)
        assert (status, answer["error"]["code"]) == (403, "insufficient_permissions")
    cluster.wait_until_idle()
    assert cluster.client.post("/flush_cache", {})[0] == 200


def test_no_output_shows_a_secret(cluster: Cluster) -> None:
    outputs = [worker.launched.output for worker in cluster.workers] + [cluster.router.output]
    for secret in (KEY, ADMIN, SECRET):
        assert not any(secret in output for output in outputs)
    assert not any("THIS SERVER IS OPEN" in output for output in outputs)


def test_a_decode_worker_with_another_secret_is_told_so_within_the_handshake(
    cluster: Cluster, stranger: Launched, files: dict[str, str]
) -> None:
    prefill = cluster.prefill.launched
    router = Launched(
        "launch-router",
        *("--prefill", prefill.url, prefill.bootstrap_port, "--decode", stranger.ready().url),
        *("--port", "0", "--worker-ca-file", files["cert"], "--max-retries", "0"),
        environment=KEYS,
    )
    try:
        started = time.monotonic()
        status, answer = Client(router.ready().url, key=KEY).post("/generate", BODY)
        assert status == 502
        assert "another --cluster-secret than this worker" in answer["error"]["message"]
        assert time.monotonic() - started < HANDSHAKE_SECONDS
        assert cluster.prefill.client.metrics()["diptych_bootstrap_refused_total"] >= 1
        assert "a request to the bootstrap service was refused" in prefill.output
        # The prefill leg has gone with it, and the right pair goes on.
        cluster.wait_until_idle()
        router.stop()
    finally:
        router.kill()
    assert len(cluster.client.ok("/generate", BODY)["output_ids"]) == 8
