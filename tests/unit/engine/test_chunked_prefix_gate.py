"""A prefill backend that can't attend to cached prefixes: the gate at load time, and all who must see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from unit.engine.tiny_llama import LLAMA

from diptych.common_config import Role, as_dict, get_schedule, override_config, readback
from diptych.engine.prompt_queue import PromptQueue
from diptych.engine.request import Request
from diptych.engine.runner import Chunk, ModelRunner
from diptych.kernels.torch_native import TorchNativeAttention
from diptych.launch import assemble

CHUNK = 16


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def config(**more: object) -> dict[str, object]:
    return {
        "role": Role.PREFILL_SCHEDULER,
        "load_format": "dummy",
        "device": "cpu",
        "max_total_tokens": 512,
        "page_size": 4,
        "chunked_prefill_size": CHUNK,
        "cpu_threads": torch.get_num_threads(),
        **more,
    }


def steps(queue: PromptQueue, request: Request) -> list[Chunk]:
    """The chunks of a prompt, one step after the other."""
    queue.add(request)
    chunks: list[Chunk] = []
    while len(queue):
        for chunk in (plan := queue.plan(max_admit=9)).chunks:
            chunk.request.num_computed += chunk.length
            chunks.append(chunk)
        queue.completed(plan.chunks)
    return chunks


def remember(runner: ModelRunner, request: Request) -> None:
    """Cache a computed prompt, as schedulers do."""
    request.match = runner.pool.cache(request.prompt_ids, request.pages.tolist(), request.match)


def test_scheduler_pool_and_transfer_all_see_the_gate(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, make_request: Callable[..., Request]
) -> None:
    monkeypatch.setattr(TorchNativeAttention, "supports_chunked_prefix", False)
    # Only the halves are named: the base is empty, and decides nothing.
    halves = {"prefill_attention_backend": "torch_native", "decode_attention_backend": "torch_native"}
    with override_config(**config(**halves)) as record:  # type: ignore[arg-type]
        runner = assemble.build_runner(model_dir, lambda line: None)
        assert get_schedule().chunked_prefill_enabled is False
        # The scheduler: prompts go whole. The pool: nothing of an earlier prompt is reused.
        queue = assemble.build_prompt_queue(runner, keep_free=lambda: 0)
        for _ in range(2):
            request = make_request(50)
            assert [chunk.length for chunk in steps(queue, request)] == [50]
            assert request.cached_tokens == 0
            remember(runner, request)
        # The transfer: what decode workers are told is what is in effect.
        published = as_dict(get_schedule())
        assert (published["disable_chunked_prefix_cache"], published["chunked_prefill_size"]) == (True, -1)
        assert published["prefill_token_budget"] == 256
        # The record says what was asked; the readback says who changed it.
        assert (record.chunked_prefill_size, record.disable_chunked_prefix_cache) == (CHUNK, False)
        assert {entry["source"] for entry in readback()["overrides"]} == {
            "attention backend torch_native can't attend to a cached prefix"
        }


def test_a_backend_that_can_leaves_everything_as_asked(
    model_dir: Path, make_request: Callable[..., Request]
) -> None:
    with override_config(**config(attention_backend="torch_native")):  # type: ignore[arg-type]
        runner = assemble.build_runner(model_dir, lambda line: None)
        queue = assemble.build_prompt_queue(runner, keep_free=lambda: 0)
        request = make_request(50)
        assert [chunk.length for chunk in steps(queue, request)] == [16, 16, 16, 2]
        remember(runner, request)
        again = make_request(50)
        steps(queue, again)
        assert again.cached_tokens == 48
        assert readback()["overrides"] == []
