"""Two clusters that don't agree say so, on both legs, and go on serving peers that match."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.client import Client
from support.cluster import MODEL, Worker
from support.processes import Launched

COMMON = ("--model-path", MODEL, "--port", "0", "--max-total-tokens", "4096")
BODY = {"prompt": "The sea", "max_tokens": 4, "temperature": 0}

MISMATCHES = {
    "page size": (("--page-size", "32"), ["page_size", "16", "32"]),
    "dtype": (("--dtype", "float32"), ["dtype", "bfloat16", "float32"]),
    "weights": (("--load-format", "dummy"), ["model"]),
}


@pytest.fixture(scope="module")
def prefill() -> Iterator[Worker]:
    launched = Launched("launch-prefill", *COMMON, "--disaggregation-bootstrap-port", "0")
    try:
        worker = Worker(launched.ready())
        yield worker
        worker.wait_until_idle()
        launched.stop()
    finally:
        launched.kill()


def router(prefill: Worker, decode: Worker) -> Launched:
    pair = (
        *("--prefill", prefill.launched.url, prefill.launched.bootstrap_port),
        *("--decode", decode.launched.url),
    )
    return Launched("launch-router", *pair, "--port", "0").ready()


def ask(prefill: Worker, decode: Worker) -> tuple[int, Any]:
    launched = router(prefill, decode)
    try:
        return Client(launched.url).post("/v1/completions", BODY)
    finally:
        launched.stop()


@pytest.mark.parametrize("difference", MISMATCHES)
def test_names_each_field_with_both_values_on_both_legs(prefill: Worker, difference: str) -> None:
    flags, expected = MISMATCHES[difference]
    launched = Launched("launch-decode", *COMMON, *flags)
    try:
        decode = Worker(launched.ready())
        pair = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": int(prefill.launched.bootstrap_port),
            "bootstrap_room": 99,
        }
        started = time.monotonic()
        for worker in (decode, prefill):
            status, answer = worker.client.post("/v1/completions", {**BODY, **pair})
            assert status >= 500
            assert all(word in answer["error"]["message"] for word in expected), answer
        # Not by waiting for a deadline, all of which are longer.
        assert time.monotonic() - started < 1
        status, answer = ask(prefill, decode)
        assert status >= 500
        assert all(word in answer["error"]["message"] for word in expected), answer
        decode.wait_until_idle()
        launched.stop()
    finally:
        launched.kill()


def test_a_matching_peer_is_served_after_that(prefill: Worker) -> None:
    # Chunk and pool sizes are each cluster's own business.
    own = ("--chunked-prefill-size", "64", "--max-total-tokens", "2048")
    launched = Launched("launch-decode", *COMMON, *own)
    try:
        decode = Worker(launched.ready())
        status, answer = ask(prefill, decode)
        assert status == 200, answer
        decode.wait_until_idle()
        launched.stop()
    finally:
        launched.kill()


def test_a_router_with_mixed_up_urls_says_so(prefill: Worker) -> None:
    nobody = "http://127.0.0.1:9"
    launched = Launched("launch-router", "--prefill", nobody, "--decode", prefill.launched.url, "--port", "0")
    try:
        launched.wait_for_line(r"decode worker \S+ gets no requests: it is a prefill worker", 20)
    finally:
        launched.kill()
