"""KV pack and unpack of one layer, by the kernels and in plain torch, which is their oracle; no test of its own."""

from __future__ import annotations

from sglang_pat.switch.kv import Parts


def kv_pack(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    Parts(slots, part_offsets, head_begin, head_count).pack(k, v, staged)


def kv_unpack(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    Parts(slots, part_offsets, head_begin, head_count).unpack(k, v, staged)


def kv_pack_reference(*given) -> None:
    for pool, rows, heads, block in _blocks(*given):
        block.copy_(pool[rows, heads])


def kv_unpack_reference(*given) -> None:
    for pool, rows, heads, block in _blocks(*given):
        pool[rows, heads] = block


def _blocks(k, v, slots, offsets, begins, head_count, staged):
    """Yields (pool, rows, heads, view of ``staged``) of each block of the staging buffer, in order."""
    at = 0
    for begin, low, high in zip(begins, offsets, offsets[1:], strict=False):
        for pool in (k, v):
            shape = (high - low, head_count, pool.shape[2])
            size = shape[0] * shape[1] * shape[2]
            yield pool, slots[low:high], slice(begin, begin + head_count), staged[at : at + size].view(shape)
            at += size
