"""Shard arithmetic against tensors that are cut the slow way, unit by unit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.shards import Block, Copy, ShardSpec, list_copies
from tests.unit.for_each import for_each

from .drawn import examples

pytestmark = pytest.mark.unit

UNIT = 3
"""Rows of one head; odd, so that an offset in elements is not one in heads."""
OTHER = 2
"""Length of the dimension that is not sharded."""


def naive_units(units: int, tp: int, tp_rank: int) -> list[int]:
    """Heads of a rank, dealt like SGLang does: evenly, or one head to tp/units neighbours."""
    if tp >= units:
        return [tp_rank // (tp // units)]
    per_rank = units // tp
    return [tp_rank * per_rank + i for i in range(per_rank)]


def cut(full: np.ndarray, dim: int, blocks: list[tuple[int, int]], tp: int, tp_rank: int) -> np.ndarray:
    """The shard of ``full``, whose blocks are ``(units, rows per unit)`` along ``dim``."""
    rows, origin = [], 0
    for units, size in blocks:
        for unit in naive_units(units, tp, tp_rank):
            rows += [origin + unit * size + i for i in range(size)]
        origin += units * size
    return np.take(full, rows, axis=dim)


def apply(pieces: list[Copy], source: np.ndarray, target: np.ndarray, dim: int) -> None:
    source, target = (source.T, target.T) if dim else (source, target)
    for piece in pieces:
        target[piece.dst : piece.dst + piece.length] = source[piece.src : piece.src + piece.length]


def qkv(heads: int, kv_heads: int, v_size: int = UNIT) -> tuple[ShardSpec, list[tuple[int, int]]]:
    blocks = [(heads, UNIT), (kv_heads, UNIT), (kv_heads, v_size)]
    return ShardSpec(0, tuple(Block(units * size, units) for units, size in blocks)), blocks


def plain(sizes: tuple[int, ...], ranks: int, dim: int) -> tuple[ShardSpec, list[tuple[int, int]]]:
    """Blocks without heads: any even cut, so the finest unit is one of ``ranks`` parts."""
    return ShardSpec(dim, tuple(Block(size) for size in sizes)), [(ranks, size // ranks) for size in sizes]


def full_tensor(dim: int, blocks: list[tuple[int, int]]) -> np.ndarray:
    length = sum(units * size for units, size in blocks)
    full = np.arange(length * OTHER).reshape(length, OTHER) + 1
    return full if dim == 0 else np.ascontiguousarray(full.T)


def degrees(ranks: int) -> list[int]:
    return [t for t in range(1, ranks + 1) if ranks % t == 0]


def kv_choices(ranks: int) -> list[int]:
    """KV head counts that every degree allows: one of the two divides the other."""
    return [k for k in range(1, 2 * ranks + 1) if all(max(k, t) % min(k, t) == 0 for t in degrees(ranks))]


SPECS = [
    (ranks, *qkv(ranks * group, kv, v_size))
    for ranks in (1, 2, 4, 6, 8, 12, 16)
    for kv in kv_choices(ranks)
    for group in (1, 2)
    for v_size in (UNIT, UNIT + 2)
] + [
    (ranks, *plain(tuple(ranks * f for f in factors), ranks, dim))
    for ranks in (1, 2, 4, 6, 8, 12)
    for factors in ((5,), (3, 3), (2, 7, 1))
    for dim in (0, 1)
]


@for_each(SPECS)
def test_every_shard_and_every_move(ranks, spec, blocks):
    full = full_tensor(spec.dim, blocks)
    layouts = [ParallelLayout(t, ranks // t) for t in degrees(ranks)]
    shards = {}
    for layout in layouts:
        for tp_rank in range(layout.tp):
            shard = shards[layout.tp, tp_rank] = cut(full, spec.dim, blocks, layout.tp, tp_rank)
            intervals = spec.list_intervals(layout.tp, tp_rank)
            rows = np.concatenate([np.arange(start, start + length) for start, length in intervals])
            assert (np.take(full, rows, axis=spec.dim) == shard).all()

    for old in layouts:
        for new in layouts:
            up = new.tp % old.tp == 0
            # Raising the degree needs nothing but the rank's own shard; else its old group has it all.
            for own, mine in {(old.tp_rank(rank) if up else None, new.tp_rank(rank)) for rank in range(ranks)}:
                wanted = spec.list_intervals(new.tp, mine)
                expected = shards[new.tp, mine]
                target = np.zeros_like(expected)
                for source in range(old.tp) if own is None else [own]:
                    held = spec.list_intervals(old.tp, source)
                    pieces = list_copies(held, wanted)
                    apply(pieces, shards[old.tp, source], target, spec.dim)
                    covered = sum(piece.length for piece in pieces)
                    assert covered == expected.shape[spec.dim] if up else covered <= expected.shape[spec.dim]
                assert (target == expected).all(), (old, new, mine)


@pytest.mark.parametrize(
    ("block", "tp"),
    [
        (Block(10), 4),
        (Block(24, 6), 4),  # 24 elements divide by 4, but a rank would get one and a half heads
        (Block(12, 3), 2),
        (Block(12, 3), 4),  # 3 KV heads on 4 ranks
        (Block(24, 2), 3),
    ],
)
def test_indivisible(block, tp):
    with pytest.raises(ValueError, match=f"a block of {block.size} .*does not divide over tp={tp}"):
        block.get_shard(tp, 0)


@st.composite
def disjoint_intervals(draw):
    """Disjoint pieces of range(40), in any order."""
    marks = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=12)))
    pieces = [(a, b - a) for a, b in zip(marks, marks[1:], strict=False) if draw(st.booleans())]
    return draw(st.permutations(pieces))


@examples(300)
@given(held=disjoint_intervals(), wanted=disjoint_intervals())
def test_copies_of_any_intervals(held, wanted):
    """Exactly what source and target have in common arrives, in its place, and adjacent copies are merged."""
    source = [row for start, length in held for row in range(start, start + length)]
    target = [row for start, length in wanted for row in range(start, start + length)]
    pieces = list_copies(held, wanted)
    result: list[int | None] = [None] * len(target)
    for piece in pieces:
        for i in range(piece.length):
            assert result[piece.dst + i] is None, "written once"
            result[piece.dst + i] = source[piece.src + i]
    assert result == [row if row in source else None for row in target]
    assert sum(piece.length for piece in pieces) == sum(row in source for row in target)
    for a, b in zip(pieces, pieces[1:], strict=False):
        assert (a.src + a.length, a.dst + a.length) != (b.src, b.dst), "merged"
