"""The C++ forms against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from diptych.kernels.cpu_build import cpu_kernels_available
from diptych.kernels.pointwise import CpuPointwise, TorchPointwise, make_pointwise

pytestmark = pytest.mark.skipif(not cpu_kernels_available(), reason="no C++ compiler here")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16 to one unit in the last place: the C++ forms round once, PyTorch's after each operation."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [7, 16, 64, 576])
@pytest.mark.parametrize("rows", [0, 1, 5, 700])
def test_rms_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, columns).to(dtype), torch.randn(columns)
    wide = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-5)
    close(CpuPointwise().rms_norm(x, weight, 1e-5), wide)
    close(TorchPointwise().rms_norm(x, weight, 1e-5), wide)


@pytest.mark.parametrize("ops", [CpuPointwise, TorchPointwise])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 576), (3, 7), (200, 576)])
def test_add_rms_norm_keeps_the_sum_in_float32(
    ops: type[CpuPointwise], rows: int, columns: int, dtype: torch.dtype
) -> None:
    residual, weight = torch.randn(rows, columns), torch.randn(columns)
    delta = torch.randn(rows, columns).to(dtype)
    total = residual.double() + delta.double()
    got = ops().add_rms_norm(residual, delta, weight, 1e-5)
    close(got, torch.nn.functional.rms_norm(total, (columns,), weight.double(), 1e-5))
    assert got.dtype == dtype
    close(residual, total)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [7, 80, 1536])
@pytest.mark.parametrize("rows", [1, 300])
def test_silu_and_multiply(rows: int, columns: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * columns) * 4).to(dtype)
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 120.0, -120.0, 1e4, -1e4])
    close(CpuPointwise().silu_and_multiply(gate_up), TorchPointwise().silu_and_multiply(gate_up.double()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rotate_a_slice_of_wider_rows(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(130, 9, dim).to(dtype)[:, 1:6]
    cos, sin = torch.randn(2, 130, 1, dim)
    expected = TorchPointwise().rotate(x.double(), cos.double(), sin.double())
    close(CpuPointwise().rotate(x, cos, sin), expected)


def test_half_precision_stays_with_torch() -> None:
    assert isinstance(make_pointwise(torch.device("cpu"), torch.float16), TorchPointwise)
    assert isinstance(make_pointwise(torch.device("cpu"), torch.bfloat16), CpuPointwise)
