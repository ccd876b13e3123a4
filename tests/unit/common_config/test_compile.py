"""Bags inside `torch.compile`."""

from __future__ import annotations

import pytest

from diptych.common_config import (
    get_context,
    get_device,
    get_disagg,
    get_exec,
    get_memory,
    get_model,
    get_observability,
    get_parallel,
    get_router,
    get_schedule,
    get_serving,
    get_spec,
    override_config,
)

torch = pytest.importorskip("torch")


def reads_every_namespace(x: torch.Tensor) -> torch.Tensor:
    x = x * get_schedule().page_size + get_memory().mem_fraction_static + get_parallel().world_size
    if get_model().dtype == "auto" and get_device().device == "auto":
        x = x + 1
    if get_exec().kernel.attention_backends.prefill is None and get_exec().kernel.linear_backend == "auto":
        x = x + 1
    if get_exec().graph.enable_torch_compile or get_exec().overlap.disable_overlap_transfer:
        x = x + 2
    if get_exec().features.disable_batch_invariance:
        x = x + 4
    if get_spec().speculative_algorithm == "none" and get_observability().log_level == "info":
        x = x + 1
    return x + get_disagg().handshake_timeout + get_serving().max_n + get_router().max_retries


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_reading_every_namespace_breaks_no_graph_and_an_override_is_seen(backend: str) -> None:
    torch.compiler.reset()
    with override_config():
        compiled = torch.compile(reads_every_namespace, fullgraph=True, backend=backend)
        x = torch.ones(2)
        torch.testing.assert_close(compiled(x), reads_every_namespace(x))
        get_context().override("test", page_size=64, log_level="debug")
        assert get_schedule().page_size == 64
        torch.testing.assert_close(compiled(x), reads_every_namespace(x))
        with get_memory().override(mem_fraction_static=0.9):
            torch.testing.assert_close(compiled(x), reads_every_namespace(x))
        torch.testing.assert_close(compiled(x), reads_every_namespace(x))
        with get_exec().features.override(disable_batch_invariance=True):
            torch.testing.assert_close(compiled(x), reads_every_namespace(x))
    with override_config(page_size=5, attention_backend="cpu"):
        torch.testing.assert_close(compiled(x), reads_every_namespace(x))
