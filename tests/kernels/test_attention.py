"""Every backend of this machine against attention written out densely."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.kernels import torch_native
from diptych.kernels.interface import AttentionBackend
from diptych.kernels.registry import (
    UnknownBackendError,
    available_attention_backends,
    make_attention_backend,
    resolve_attention_backend,
)

STEPS = {
    "decode one": ([1], [1]),
    "decode uniform": ([1] * 4, [65] * 4),
    "decode page edges": ([1] * 6, [15, 16, 17, 63, 64, 65]),
    "decode very mixed": ([1] * 5, [1, 300, 2, 128, 33]),
    "prefill one token": ([1, 3], [1, 3]),
    "prefill fresh": ([37, 1, 64], [37, 1, 64]),
    "prefill after a prefix": ([20], [84]),
    "prefill mixed": ([16, 5, 1, 70], [16, 21, 129, 75]),
}
HEADS = {"9:3": (9, 3), "4:4": (4, 4), "8:1": (8, 1)}


@pytest.fixture(params=available_attention_backends("cpu"))
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(case, name: str) -> AttentionBackend:
    return make_attention_backend(name, case.slab, num_q_heads=case.q_heads, scale=case.scale)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_attention_equals_the_dense_reference(
    case, backend_name: str, lengths: tuple[list[int], list[int]], page_size: int, heads: tuple[int, int]
) -> None:
    made = case(
        query_lens=lengths[0],
        seq_lens=lengths[1],
        page_size=page_size,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=64,
        dtype=torch.float32,
    )
    made.check(build(made, backend_name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_narrow_dtypes_and_other_head_sizes(
    case, backend_name: str, lengths: tuple[list[int], list[int]], head_dim: int, dtype: torch.dtype
) -> None:
    made = case(
        query_lens=lengths[0],
        seq_lens=lengths[1],
        page_size=16,
        q_heads=6,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
    )
    made.check(build(made, backend_name))


def test_kv_may_be_stored_narrower_than_the_model_computes(case, backend_name: str) -> None:
    for query_lens, seq_lens in STEPS.values():
        made = case(
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_size=16,
            q_heads=6,
            kv_heads=2,
            head_dim=32,
            dtype=torch.bfloat16,
        )
        backend = build(made, backend_name)
        backend.begin_step(made.step)
        k, v = made.new_kv(0)
        got = backend.attend(0, made.q[0].float(), k.float(), v.float())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), made.expected(0), atol=2e-5, rtol=0)


def test_long_prefills_attend_in_blocks(case, backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "MAX_MASK_ELEMENTS", 1000)
    made = case(
        query_lens=[100, 40],
        seq_lens=[150, 40],
        page_size=16,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
    )
    made.check(build(made, backend_name))


def test_one_backend_serves_step_after_step(case, backend_name: str) -> None:
    """A prefill step must leave nothing behind that a decode step over the same slab could see."""
    prefill = case(
        query_lens=[10, 7],
        seq_lens=[10, 30],
        page_size=4,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
    )
    backend = build(prefill, backend_name)
    prefill.check(backend)
    decode = case(
        query_lens=[1, 1],
        seq_lens=[9, 26],
        page_size=4,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
    )
    backend.slab[: decode.slab.shape[0]].copy_(decode.slab[: backend.slab.shape[0]])
    backend.begin_step(decode.step)
    got = backend.attend(0, decode.q[0], *decode.new_kv(0))
    torch.testing.assert_close(got.double(), decode.expected(0), atol=2e-5, rtol=0)


def test_an_unknown_backend_lists_what_there_is() -> None:
    with pytest.raises(UnknownBackendError, match=r"'flash9'.*torch_native"):
        resolve_attention_backend("flash9", "cpu")


def test_auto_names_a_concrete_backend() -> None:
    assert resolve_attention_backend(None, "cpu") in available_attention_backends("cpu")
    assert resolve_attention_backend("auto", "cpu") == resolve_attention_backend(None, "cpu")
    assert resolve_attention_backend("torch_native", "cpu") == "torch_native"


BUILD = """
import logging, sys
logging.basicConfig(format="%(message)s")
from diptych.kernels.registry import available_attention_backends, resolve_attention_backend
print(available_attention_backends("cpu"), resolve_attention_backend("auto", "cpu"))
"""


def run_build(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD], env=os.environ | env, capture_output=True, text=True, check=True
    )


def test_no_compiler_leaves_torch_native_and_says_why(tmp_path: Path) -> None:
    done = run_build(CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "['torch_native'] torch_native"
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no-such-compiler" in done.stderr


def test_a_compiler_that_fails_leaves_torch_native_and_no_debris(tmp_path: Path) -> None:
    done = run_build(CXX="false", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "['torch_native'] torch_native"
    assert "failed" in done.stderr
    assert [p.name for p in (tmp_path / "diptych" / "kernels").iterdir()] == [".lock"]


def test_an_unwritable_cache_leaves_torch_native(tmp_path: Path) -> None:
    (tmp_path / "diptych").write_text("a file in the way")
    done = run_build(XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "['torch_native'] torch_native"
