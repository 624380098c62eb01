"""The Triton kernel behind ``kv.py``: one launch for K, V, all slots and all parts of a layer.

Bytes are moved as the widest integer that sizes, strides and addresses allow, so one compiled kernel serves
all dtypes. Runs on CPU tensors too when ``TRITON_INTERPRET=1`` was set before Triton was imported (for
checking). Arguments are those of ``kv.Parts``; ``part_offsets`` and ``head_begin`` lie on the
pool's device.
"""

# Triton takes plain values for its constexpr arguments.
# pyright: reportArgumentType=false

from __future__ import annotations

from contextlib import nullcontext
from math import gcd

import torch
import triton
import triton.language as tl

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
TILE_WORDS = 2048
"""Number of words that one program has in flight; at most ``MAX_COLUMNS`` of them in one row."""
MAX_COLUMNS = 256


@triton.jit
def _move(
    pool,
    staged,
    slots,
    offsets,
    begins,
    n,
    parts,
    slot_stride,  # words from one slot of this pool to the next
    head_words,
    row_words,  # words of head_count heads in this pool
    other_words,  # the same in the other pool
    IS_V: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    begin = tl.zeros([ROWS], tl.int64)
    size = tl.zeros([ROWS], tl.int64)
    head = tl.zeros([ROWS], tl.int64)
    for part in range(parts):  # few: one for each peer
        low = tl.load(offsets + part)
        high = tl.load(offsets + part + 1)
        part_mask = (rows >= low) & (rows < high)
        begin = tl.where(part_mask, low, begin)
        size = tl.where(part_mask, high - low, size)
        head = tl.where(part_mask, tl.load(begins + part), head)
    at = begin * (row_words + other_words) + (rows - begin) * row_words
    if IS_V:
        at += size * other_words
    source = tl.load(slots + rows, mask=live, other=0) * slot_stride + head * head_words
    for column in range(0, row_words, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = live[:, None] & (columns < row_words)[None, :]
        in_pool = pool + source[:, None] + columns[None, :]
        in_stage = staged + at[:, None] + columns[None, :]
        if PACK:
            tl.store(in_stage, tl.load(in_pool, mask=mask), mask=mask)
        else:
            tl.store(in_pool, tl.load(in_stage, mask=mask), mask=mask)


# The number of slots differs in every switch: a kernel made for one (a multiple of 16, or 1) would compile in a pause.
# So would one for slots that begin in the middle of a tensor, after an odd number of others.
@triton.jit(do_not_specialize=["n", "parts"], do_not_specialize_on_alignment=["slots"])
def _move_kv(
    k,
    v,
    staged,
    slots,
    offsets,
    begins,
    n,
    parts,
    k_stride,
    v_stride,
    k_head,
    v_head,
    k_row,
    v_row,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _move(k, staged, slots, offsets, begins, n, parts, k_stride, k_head, k_row, v_row, False, PACK, ROWS, COLUMNS)
    else:
        _move(v, staged, slots, offsets, begins, n, parts, v_stride, v_head, v_row, k_row, True, PACK, ROWS, COLUMNS)


def kv_pack(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    _launch(True, k, v, slots, part_offsets, head_begin, head_count, staged)


def kv_unpack(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    _launch(False, k, v, slots, part_offsets, head_begin, head_count, staged)


def _launch(pack: bool, k, v, slots, part_offsets, head_begin, head_count: int, flat) -> None:
    n = slots.numel()
    if n == 0:
        return
    item = k.element_size()
    dim_k, dim_v = k.shape[2], v.shape[2]
    whole = all(pool.dtype == flat.dtype and pool.stride()[1:] == (pool.shape[2], 1) for pool in (k, v))
    if not whole or flat.numel() != n * head_count * (dim_k + dim_v):
        shapes = ", ".join(f"{list(t.shape)} {t.dtype} in strides {t.stride()}" for t in (k, v, flat))
        raise ValueError(f"{n} slots of {head_count} heads do not fit {shapes}")
    width = gcd(8, *(x * item for x in (dim_k, dim_v, k.stride(0), v.stride(0))))
    width = gcd(width, k.data_ptr(), v.data_ptr(), flat.data_ptr())
    words_k, words_v, words_flat = (_view_as_words(t, width) for t in (k, v, flat))
    k_head, v_head = dim_k * item // width, dim_v * item // width
    columns = min(MAX_COLUMNS, triton.next_power_of_2(max(k_head, v_head) * head_count))
    rows = TILE_WORDS // columns
    with torch.cuda.device(k.device) if k.is_cuda else nullcontext():
        _move_kv[(triton.cdiv(n, rows), 2)](
            words_k,
            words_v,
            words_flat,
            slots,
            part_offsets,
            head_begin,
            n,
            head_begin.numel(),
            k.stride(0) * item // width,
            v.stride(0) * item // width,
            k_head,
            v_head,
            k_head * head_count,
            v_head * head_count,
            PACK=pack,
            ROWS=rows,
            COLUMNS=columns,
        )


def _view_as_words(t: torch.Tensor, width: int) -> torch.Tensor:
    """The memory of ``t`` seen as integers of ``width`` bytes; only its address matters to the kernel."""
    if t.dim() == 3:  # rows that may lie apart; a stride-0 or one-head dimension must not get in the way of the view
        t = t.as_strided((t.shape[0], t.shape[1] * t.shape[2]), (t.stride(0), 1))
    return t.view(WORDS[width])
