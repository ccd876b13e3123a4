from collections.abc import Callable

import pytest
import torch

from diptych.engine.kv_layout import KVLayout
from diptych.engine.kv_pool import KVPool
from diptych.engine.request import Request
from diptych.engine.sampling import SamplingState
from diptych.engine.wire import Generate, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def make_pool() -> Callable[..., KVPool]:
    def make(num_pages: int = 16, page_size: int = 4, cache: bool = True) -> KVPool:
        layout = KVLayout(num_layers=2, kv_heads=2, head_dim=4, page_size=page_size, dtype="float32")
        return KVPool(layout, num_pages, device=CPU, cache=cache)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    count = 0

    def make(prompt: list[int] | int, *, max_new_tokens: int = 8, **sampling: object) -> Request:
        nonlocal count
        count += 1
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(max_new_tokens=max_new_tokens, seed=0, **sampling)  # type: ignore[arg-type]
        state = SamplingState(params, ids, eos_token_ids=[], vocab_size=1000, device=CPU)
        request = Request(Generate(rid=f"r{count}", prompt_ids=ids, sampling=params), state)
        request.arrived_at = count
        return request

    return make
