"""Which KV heads a rank holds in a layout, and which it needs from whom when the layout changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pat.layout import ParallelLayout


@dataclass(frozen=True)
class HeadSlice:
    """KV heads that ``src`` sends to ``dst``; offsets are local to each rank's shard."""

    src: int
    dst: int
    src_head: int
    dst_head: int
    count: int


def kv_head_range(kv_heads: int, layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """``(first head, number of heads)`` of ``rank``; with more ranks than heads, ranks share one."""
    parts = min(layout.tp, kv_heads)
    count = kv_heads // parts
    return layout.tp_rank(rank) * parts // layout.tp * count, count


def head_slices(
    old: ParallelLayout, new: ParallelLayout, kv_heads: int, members: Sequence[int], dst: int
) -> list[HeadSlice]:
    """Slices that ``dst`` needs from the members of its exchange group, each head of each old group once.

    Where several members hold the same head (more ranks than KV heads), ``dst`` takes its own
    copy if it has one, else the holders are used in turn.
    """
    first, count = kv_head_range(kv_heads, new, dst)
    result: list[HeadSlice] = []
    for group in sorted({old.group_of(m) for m in members}):
        holders = [m for m in members if old.group_of(m) == group]
        chosen: dict[int, list[int]] = {}
        for head in range(first, first + count):
            having = [m for m in holders if _holds(kv_heads, old, m, head)]
            source = dst if dst in having else having[members.index(dst) % len(having)]
            chosen.setdefault(source, []).append(head)
        for src, heads in sorted(chosen.items()):
            assert heads == list(range(heads[0], heads[0] + len(heads))), "heads of a source are contiguous"
            src_first, _ = kv_head_range(kv_heads, old, src)
            result.append(HeadSlice(src, dst, heads[0] - src_first, heads[0] - first, len(heads)))
    return result


def _holds(kv_heads: int, layout: ParallelLayout, rank: int, head: int) -> bool:
    first, count = kv_head_range(kv_heads, layout, rank)
    return first <= head < first + count
