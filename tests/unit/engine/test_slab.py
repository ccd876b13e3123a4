import psutil
import torch

from diptych.engine.kv_layout import KVLayout
from diptych.engine.slab import allocate_slab


def test_a_big_pool_is_zero_and_takes_no_memory_until_it_is_used() -> None:
    layout = KVLayout(num_layers=30, kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16")
    before = psutil.Process().memory_info().rss
    slab = allocate_slab(layout, 4000, torch.device("cpu"))
    assert slab.shape == (4000, 30, 2, 3, 16, 64)
    assert slab.nbytes == 4000 * layout.page_bytes > 1 << 30
    assert slab.is_contiguous()
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert not slab[[0, 2000, 3999]].any()
    slab[3999] = 1
    assert slab[3999].all()
    assert not slab[3998].any()
