"""KV pack and unpack: C++ and Triton (interpreted) against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.switch import kv

from . import kv_reference as one
from .drawn import examples
from .interpreted import run_interpreted

pytestmark = [pytest.mark.unit, pytest.mark.slow]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn]


def make_pool(num_slots: int, heads: int, dim: int, dtype: torch.dtype, seed: int, gap: int = 0) -> torch.Tensor:
    """Random bits; with ``gap`` the slots lie apart, as in a pool that interleaves layers."""
    size = num_slots * (heads * dim + gap)
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 100, (size * dtype.itemsize,), dtype=torch.uint8, generator=g)
    flat = bits.view(dtype)
    return flat.as_strided((num_slots, heads, dim), (heads * dim + gap, dim, 1))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


@st.composite
def cases(draw):
    heads = draw(st.integers(1, 8))
    head_count = draw(st.integers(1, heads))
    sizes = draw(st.lists(st.integers(0, 20), min_size=0, max_size=5))
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return {
        "heads": heads,
        "head_count": head_count,
        "offsets": offsets,
        # Any begins: parts may overlap in heads, as peers do when KV heads are replicated.
        "begins": [draw(st.integers(0, heads - head_count)) for _ in sizes],
        "num_slots": max(1, offsets[-1]) + draw(st.integers(0, 30)),
        "dims": (draw(st.integers(1, 33)), draw(st.integers(1, 33))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "gap": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 1 << 30)),
    }


def tensors(case):
    k, v = (
        make_pool(case["num_slots"], case["heads"], d, case["dtype"], case["seed"] + i, case["gap"])
        for i, d in enumerate(case["dims"])
    )
    g = torch.Generator().manual_seed(case["seed"])
    slots = torch.randperm(case["num_slots"], generator=g)[: case["offsets"][-1]]
    size = kv.count_staged_elements(slots.numel(), case["head_count"], *case["dims"])
    return k, v, slots, torch.zeros(size, dtype=case["dtype"])


@examples(150)
@given(cases())
def test_against_reference(case):
    k, v, slots, out = tensors(case)
    expected = torch.zeros_like(out)
    where = (slots, case["offsets"], case["begins"], case["head_count"])
    one.kv_pack(k, v, *where, out)
    one.kv_pack_reference(k, v, *where, expected)
    assert torch.equal(bits(out), bits(expected))

    # Into pools of other content: only the addressed heads change, and packing again gives the same buffer.
    pools = [
        make_pool(case["num_slots"], case["heads"], d, case["dtype"], case["seed"] + 7, case["gap"])
        for d in case["dims"] * 2
    ]
    one.kv_unpack(*pools[:2], *where, out)
    one.kv_unpack_reference(*pools[2:], *where, out)
    for ours, theirs in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(bits(ours), bits(theirs))
    again = torch.zeros_like(out)
    one.kv_pack(*pools[:2], *where, again)
    assert torch.equal(bits(again), bits(out))


@pytest.mark.parametrize(("dim", "gap"), [(64, 0), (64, 1), (63, 0), (8, 4)])
def test_layers_larger_than_the_caches(dim: int, gap: int):
    """Writes go past the caches, where rows are aligned and long enough; every slot of the target must be there."""
    slots, heads, taken = 6_000, 4, 2
    k, v = (make_pool(slots, heads, dim, torch.float32, seed, gap) for seed in (1, 2))
    order = torch.randperm(slots)[: 3 * slots // 4]
    where = (order, [0, 1000, len(order)], [0, 2], taken)
    out, expected = (torch.zeros(kv.count_staged_elements(len(order), taken, dim, dim)) for _ in range(2))
    one.kv_pack(k, v, *where, out)
    one.kv_pack_reference(k, v, *where, expected)
    assert torch.equal(bits(out), bits(expected))
    into = [make_pool(slots, heads, dim, torch.float32, 3, gap) for _ in range(2)]
    wanted = [pool.clone() for pool in into]
    one.kv_unpack(*into, *where, out)
    one.kv_unpack_reference(*wanted, *where, expected)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(into, wanted, strict=True))


def good():
    k = make_pool(10, 4, 8, torch.float32, 1)
    v = make_pool(10, 4, 6, torch.float32, 2)
    return {
        "k": k,
        "v": v,
        "slots": torch.arange(5),
        "part_offsets": [0, 2, 5],
        "head_begin": [0, 2],
        "head_count": 2,
        "staged": torch.empty(5 * 2 * 14),
    }


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("k", torch.zeros(10, 32), "num_slots, heads, dim"),
        ("k", torch.zeros(10, 8, 4).transpose(1, 2), "contiguous in its last two"),
        ("v", torch.zeros(10, 3, 6), "agree"),
        ("v", torch.zeros(10, 4, 6, dtype=torch.float64), "agree"),
        ("slots", torch.arange(5, dtype=torch.int32), "int64"),
        ("slots", torch.tensor([0, 1, 2, 3, 10]), "10 is outside"),
        ("slots", torch.tensor([0, 1, -1, 3, 4]), "-1 is outside"),
        ("part_offsets", [0, 5], "must have 3 entries"),
        ("part_offsets", [0, 2, 4], "entries from 0 to 5"),
        ("part_offsets", [0, 6, 5], "must not decrease"),
        ("head_begin", [0, 3], "outside"),
        ("head_begin", [-1, 2], "outside"),
        ("head_count", 5, "140|350|outside"),
        ("staged", torch.empty(5 * 2 * 14 + 1), "of 140 Float"),
        ("staged", torch.empty(5 * 2 * 14, dtype=torch.float64), "of 140 Float"),
        ("staged", torch.empty(280)[::2], "contiguous"),
    ],
)
def test_refuses(name, value, says):
    with pytest.raises(ValueError, match=says):
        one.kv_pack(**{**good(), name: value})


TRITON_CASES = [
    # heads, head_count, offsets, begins, dims, dtype, gap
    (4, 1, [0, 3, 3, 20], [0, 1, 3], (64, 64), torch.bfloat16, 0),
    (3, 2, [0, 17], [1], (5, 7), torch.uint8, 1),  # one byte wide
    (8, 4, [0, 40, 41], [4, 0], (128, 96), torch.float32, 0),  # more words a row than one tile column block
    (2, 2, [0, 9, 12], [0, 0], (3, 5), torch.float16, 2),  # replicated heads, two bytes wide
    (1, 1, [0], [], (8, 8), torch.float32, 0),
    (1, 1, [0, 6], [0], (1, 4), torch.float64, 0),
]


def check_triton() -> None:
    """Body of the child process."""
    from sglang_pat.switch import kv_triton

    names = ("heads", "head_count", "offsets", "begins", "dims", "dtype", "gap")
    for heads, head_count, offsets, begins, dims, dtype, gap in TRITON_CASES:
        case = dict(zip(names, (heads, head_count, offsets, begins, dims, dtype, gap), strict=True))
        case |= {"num_slots": 50, "seed": 3}
        k, v, slots, out = tensors(case)
        expected = torch.zeros_like(out)
        one.kv_pack_reference(k, v, slots, offsets, begins, head_count, expected)
        tables = torch.tensor(offsets), torch.tensor(begins, dtype=torch.int64)
        kv_triton.kv_pack(k, v, slots, *tables, head_count, out)
        assert torch.equal(bits(out), bits(expected)), case
        pools = [make_pool(50, heads, d, case["dtype"], 11, gap) for d in dims * 2]
        kv_triton.kv_unpack(*pools[:2], slots, *tables, head_count, out)
        one.kv_unpack_reference(*pools[2:], slots, offsets, begins, head_count, out)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(pools[:2], pools[2:], strict=True)), case
    print(len(TRITON_CASES))


@pytest.mark.long
def test_triton_interpreted():
    assert run_interpreted(__name__) == str(len(TRITON_CASES))


if __name__ == "__main__":
    check_triton()
