"""KV pack and unpack on a GPU against the torch reference; skipped where there is none.

The same kernel is checked on a CPU by Triton's interpreter (tests/unit/test_kv_kernels.py).
"""

from __future__ import annotations

import pytest
import torch

from sglang_pat.switch import kv

from ..unit import kv_reference as one

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize(("heads", "dim_k", "dim_v"), [(1, 1, 1), (2, 33, 17), (8, 128, 128), (4, 64, 192)])
@pytest.mark.parametrize("sizes", [[0], [1], [3, 0, 500], [4097, 5]])
def test_pack_and_unpack(dtype, heads, dim_k, dim_v, sizes):
    generator = torch.Generator().manual_seed(1)
    total, pool = sum(sizes), sum(sizes) + 7

    def bits(*shape: int) -> torch.Tensor:
        count = dtype.itemsize
        raw = torch.randint(0, 100, (*shape[:-1], shape[-1] * count), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).cuda()

    k, v = bits(pool, heads, dim_k), bits(pool, heads, dim_v)
    slots = torch.randperm(pool, generator=generator)[:total].cuda()
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    count = max(1, heads // 2)
    begins = [i % (heads - count + 1) for i in range(len(sizes))]
    size = kv.count_staged_elements(total, count, dim_k, dim_v)
    got, wanted = (torch.empty(size, dtype=dtype, device="cuda") for _ in range(2))
    one.kv_pack(k, v, slots, offsets, begins, count, got)
    one.kv_pack_reference(k, v, slots, offsets, begins, count, wanted)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    pools = [t.clone().view(torch.uint8).zero_().view(dtype).view(t.shape) for t in (k, v, k, v)]
    one.kv_unpack(*pools[:2], slots, offsets, begins, count, got)
    one.kv_unpack_reference(*pools[2:], slots, offsets, begins, count, wanted)
    for ours, theirs in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
