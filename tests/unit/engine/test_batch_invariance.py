"""`--disable-batch-invariance`: whether a lone row is computed as two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.common_config import Role, override_config
from diptych.engine.models import linear
from diptych.engine.request import Request
from diptych.engine.runner import Chunk, ModelRunner
from diptych.launch.assemble import build_runner

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}
LINEARS = 2 * 4 + 1
"""Products with weights in a step: four a layer, and the head."""


class Alone:
    """A request alone on a worker that was launched with these flags, and the rows of each product."""

    def __init__(self, folder: Path, make_request: Callable[..., Request], rows: list[int], **flags: object):
        (folder / "config.json").write_text(json.dumps(LLAMA))
        fields = {"load_format": "dummy", "device": "cpu", "max_total_tokens": 256, "linear_backend": "plain"}
        threads = torch.get_num_threads()
        with override_config(role=Role.COLOCATED_SCHEDULER, cpu_threads=threads, **fields, **flags):
            self.runner: ModelRunner = build_runner(folder, lambda line: None)
        self._rows = rows
        self._request = make_request([7, 5, 3, 9, 2])
        self._request.add_pages(self.runner.pool.allocate(1))

    def step(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        self._rows.clear()
        return compute(), list(self._rows)

    def prefill(self) -> tuple[torch.Tensor, list[int]]:
        return self.step(lambda: self.runner.prefill([Chunk(self._request, 5)]))

    def decode(self) -> tuple[torch.Tensor, list[int]]:
        self._request.accept(11)
        return self.step(lambda: self.runner.decode([self._request]))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with a weight, as they happen."""
    seen: list[int] = []
    call = linear.PlainLinear.__call__

    def watched(self: linear.PlainLinear, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return call(self, x)

    monkeypatch.setattr(linear.PlainLinear, "__call__", watched)
    return seen


def test_a_lone_row_is_computed_as_two_unless_told_not_to(
    tmp_path: Path, make_request: Callable[..., Request], rows: list[int]
) -> None:
    usual = Alone(tmp_path, make_request, rows)
    other = Alone(tmp_path, make_request, rows, disable_batch_invariance=True)
    assert (usual.runner.facts.batch_invariant, other.runner.facts.batch_invariant) == (True, False)
    # From the last attention on only the prompt's last token is left: for three more products and the head.
    expected, products = usual.prefill()
    assert products == [5, 5, 5, 5, 5, 2, 2, 2, 2]
    logits, products = other.prefill()
    assert products == [5, 5, 5, 5, 5, 1, 1, 1, 1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    expected, products = usual.decode()
    assert products == [2] * LINEARS
    logits, products = other.decode()
    assert products == [1] * LINEARS
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert logits.shape == (1, 300)
