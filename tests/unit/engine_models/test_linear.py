"""A row's result must not depend on how many other rows there are: seeds rest on it. The model never passes
a single row, for which it doesn't hold."""

import pytest
import torch

from diptych.engine.models.linear import make_linear, resolve_linear_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (576, 3072), (1536, 576)])
def test_a_row_is_the_same_in_any_batch_of_two_or_more(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    backend = resolve_linear_backend("auto", torch.device("cpu"), dtype)
    for _ in range(20):
        linear = make_linear(backend, torch.randn(outputs, inputs, dtype=dtype), None)
        x = torch.randn(96, inputs, dtype=dtype)
        whole = linear(x)
        for rows in (2, 3, 5, 8, 16, 17, 33, 64):
            assert torch.equal(linear(x[:rows]), whole[:rows]), f"{rows} of 96 rows"
