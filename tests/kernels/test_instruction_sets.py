"""The C++ prefill attention as compiled for each instruction set that this machine can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.kernels import cpu, cpu_build
from diptych.kernels.cpu import CpuAttention

pytestmark = pytest.mark.skipif(not cpu_build.cpu_kernels_available(), reason="no C++ compiler here")

STEPS = {
    "odd": ([257], [257]),
    "after a prefix": ([129], [600]),
    "rows on both sides of a tile of keys": ([70, 33], [290, 530]),
    "mixed": ([16, 5, 1, 70, 300, 2], [16, 21, 529, 75, 300, 513]),
}
HEADS = {"9:3": (9, 3), "4:4": (4, 4), "8:1": (8, 1)}


@pytest.fixture(params=cpu_build.supported_instruction_sets())
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Makes the backend of a case, with kernels compiled for one instruction set."""
    library = cpu_build.load_cpu_kernels_for(request.param)
    monkeypatch.setattr(cpu, "load_cpu_kernels", lambda: library)
    return lambda made: CpuAttention(made.slab, num_q_heads=made.q_heads, scale=made.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_prefill_over_pages_of_each_size(
    case, build, lengths: tuple[list[int], list[int]], page_size: int, dtype: torch.dtype
) -> None:
    made = case(
        query_lens=lengths[0],
        seq_lens=lengths[1],
        page_size=page_size,
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        dtype=dtype,
    )
    made.check(build(made))


@pytest.mark.parametrize("head_dim", [2, 7, 48, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_prefill_with_other_heads(case, build, heads: tuple[int, int], head_dim: int) -> None:
    made = case(
        query_lens=[67, 5],
        seq_lens=[67, 300],
        page_size=16,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    made.check(build(made))


def test_more_keys_than_are_packed_at_once(case, build) -> None:
    made = case(
        query_lens=[3, 40, 7],
        seq_lens=[5000, 4000, 300],
        page_size=64,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
    )
    made.check(build(made))


def test_bfloat16_costs_little_more_than_rounding_the_result(case, build) -> None:
    made = case(
        query_lens=[300],
        seq_lens=[700],
        page_size=16,
        q_heads=6,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        layers=1,
    )
    backend, expected = build(made), made.expected(0)
    backend.begin_step(made.step)
    got = backend.attend(0, made.q[0], *made.new_kv(0))

    def rms(x: torch.Tensor) -> float:
        return float((x.double() - expected).pow(2).mean().sqrt())

    assert rms(got) < 2 * rms(expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_in_chunks_gives_the_same_bits_as_in_one_step(case, build, dtype: torch.dtype) -> None:
    def result(query_len: int, seq_len: int, whole=None) -> tuple[torch.Tensor, object]:
        made = case(
            query_lens=[query_len],
            seq_lens=[seq_len],
            page_size=16,
            q_heads=6,
            kv_heads=2,
            head_dim=64,
            dtype=dtype,
            layers=1,
        )
        if whole is not None:
            for index in range(seq_len):  # the same prompt, of which the case has made another
                made.kv[0][0][:, index] = whole.kv[0][0][:, index]
            made.q[0] = whole.q[0][seq_len - query_len : seq_len]
            pages = made.step.page_table[0]
            for index in range(seq_len - query_len):
                made.slab[pages[index // 16], 0, :, :, index % 16] = made.kv[0][0][:, index]
        backend = build(made)
        backend.begin_step(made.step)
        return backend.attend(0, made.q[0], *made.new_kv(0)), made

    whole, made = result(700, 700)
    chunks = [result(n, end, made)[0] for n, end in ((255, 255), (46, 301), (399, 700))]
    assert torch.equal(torch.cat(chunks), whole)


def test_a_compiler_without_avx512_bf16_builds_what_it_can(tmp_path: Path) -> None:
    if "AVX512_BF16" not in cpu_build.supported_instruction_sets():
        pytest.skip("this machine has no AVX512-BF16")
    compiler = tmp_path / "old-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -mavx512bf16 "*) echo "unrecognized option" >&2; exit 1;; esac\n'
        'exec c++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    code = "from diptych.kernels.registry import resolve_attention_backend as f; print(f('auto', 'cpu'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "cpu"
    assert len(list((tmp_path / "diptych" / "kernels").glob("cpu-*.so"))) == 1
