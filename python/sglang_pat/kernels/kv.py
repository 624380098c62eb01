"""Moving the heads of live KV slots between a pool layer and a flat staging buffer.

One call serves K and V of one layer and all peers. Arguments of every function here:

``k``, ``v``
    Views ``[num_slots, heads, dim_k]`` and ``[num_slots, heads, dim_v]`` of one layer of the pool, any dtype
    (the same for both), contiguous in the last two dimensions.
``slots``
    int64 ``[n]``, rows of the pool, grouped by part; on the pool's device. In an unpack no (slot, head) may
    occur twice with different contents.
``part_offsets``
    ``P + 1`` integers from 0 to n, not decreasing: part p is ``slots[part_offsets[p]:part_offsets[p+1]]``. A
    list or a CPU tensor; a CUDA tensor works and costs a synchronisation. Parts may be empty.
``head_begin``, ``head_count``
    Part p covers heads ``[head_begin[p], head_begin[p] + head_count)``; ``head_begin`` has P integers.
``out``, ``staged``
    1-D, the pool's dtype, exactly ``staged_numel(...)`` elements: for each part in order its K block
    ``[n_p, head_count, dim_k]`` and then its V block ``[n_p, head_count, dim_v]``.

Errors: ValueError, with what was given and what is allowed. Slot values are checked on CPU; on CUDA that
would cost a synchronisation, so a slot outside the pool is the caller's bug there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch

from sglang_pat.kernels.transfer import upload

Ints = Sequence[int] | torch.Tensor


def staged_numel(n: int, head_count: int, dim_k: int, dim_v: int) -> int:
    """Elements of the staging buffer for n slots."""
    return n * head_count * (dim_k + dim_v)


class Parts:
    """Which slots and heads to copy: made once, used for every layer.

    Everything is checked against the first layer; one of the same shapes is not checked again.

    Args:
        slots, part_offsets, head_begin, head_count: see the module.
    """

    def __init__(self, slots: torch.Tensor, part_offsets: Ints, head_begin: Ints, head_count: int) -> None:
        self._slots, self._head_count = slots, head_count
        self._offsets, self._begins = _ints(part_offsets), _ints(head_begin)
        device = slots.device
        self._tensors = upload(self._offsets, torch.int64, device), upload(self._begins, torch.int64, device)
        self._checked: tuple | None = None

    def pack(self, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pool rows into ``out``: C++ on CPU, Triton on CUDA, torch elsewhere."""
        self._run("pack", k, v, out, "out")

    def unpack(self, k: torch.Tensor, v: torch.Tensor, staged: torch.Tensor) -> None:
        """Copies ``staged`` into pool rows, the inverse of :meth:`pack`."""
        self._run("unpack", k, v, staged, "staged")

    def _run(self, which: str, k, v, flat, flat_name: str) -> None:
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (k, v, flat))
        if shapes != self._checked:
            _check(k, v, self._slots, self._offsets, self._begins, self._head_count, flat, flat_name)
            self._checked = shapes
        if self._slots.numel() == 0 or self._head_count == 0:
            return
        if k.device.type == "cpu" and (extension := _extension()) is not None:
            function = extension.kv_pack if which == "pack" else extension.kv_unpack
            function(k, v, self._slots, *self._tensors, self._head_count, flat)
            return
        if k.device.type == "cuda":
            from sglang_pat.kernels import kv_triton

            function = kv_triton.kv_pack if which == "pack" else kv_triton.kv_unpack
            function(k, v, self._slots, *self._tensors, self._head_count, flat)
        else:
            low, high = int(self._slots.min()), int(self._slots.max())
            if low < 0 or high >= k.shape[0]:
                raise ValueError(f"slots span {low} to {high}, outside the pool's [0, {k.shape[0]})")
            function = kv_pack_reference if which == "pack" else kv_unpack_reference
            function(k, v, self._slots, self._offsets, self._begins, self._head_count, flat)


def kv_pack(k, v, slots, part_offsets, head_begin, head_count, out) -> None:
    """:meth:`Parts.pack` of one layer."""
    Parts(slots, part_offsets, head_begin, head_count).pack(k, v, out)


def kv_unpack(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    """:meth:`Parts.unpack` of one layer."""
    Parts(slots, part_offsets, head_begin, head_count).unpack(k, v, staged)


def kv_pack_reference(k, v, slots, part_offsets, head_begin, head_count, out) -> None:
    """:func:`kv_pack` in plain torch, unchecked; the oracle of the tests."""
    for pool, rows, heads, block in _blocks(k, v, slots, part_offsets, head_begin, head_count, out):
        block.copy_(pool[rows, heads])


def kv_unpack_reference(k, v, slots, part_offsets, head_begin, head_count, staged) -> None:
    """:func:`kv_unpack` in plain torch, unchecked; the oracle of the tests."""
    for pool, rows, heads, block in _blocks(k, v, slots, part_offsets, head_begin, head_count, staged):
        pool[rows, heads] = block


def _blocks(k, v, slots, part_offsets, head_begin, head_count, flat):
    """Yields (pool, rows, heads, view of ``flat``) of each block of the staging buffer, in order."""
    offsets, begins = _ints(part_offsets), _ints(head_begin)
    at = 0
    for begin, low, high in zip(begins, offsets, offsets[1:], strict=False):
        for pool in (k, v):
            shape = (high - low, head_count, pool.shape[2])
            size = shape[0] * shape[1] * shape[2]
            yield pool, slots[low:high], slice(begin, begin + head_count), flat[at : at + size].view(shape)
            at += size


@cache
def _extension():
    try:
        return import_module("sglang_pat._C")
    except ModuleNotFoundError:  # not built; a broken build raises another ImportError and must be seen
        return None


def _ints(values: Ints) -> tuple[int, ...]:
    return tuple(values.tolist()) if isinstance(values, torch.Tensor) else tuple(values)


def _check(k, v, slots, offsets, begins, head_count, flat, flat_name) -> None:
    """Checks all but slot values."""
    for name, pool in (("k", k), ("v", v)):
        if pool.dim() != 3:
            raise ValueError(f"{name} must be [num_slots, heads, dim], got shape {list(pool.shape)}")
        rows = pool[0] if pool.shape[0] else pool.new_empty(0)
        if not rows.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous in its last two dimensions, got shape {list(pool.shape)}, "
                f"strides {list(pool.stride())}"
            )
    if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            "k and v must agree in num_slots, heads, dtype and device, got "
            f"{list(k.shape)} {k.dtype} {k.device} and {list(v.shape)} {v.dtype} {v.device}"
        )
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != k.device or not slots.is_contiguous():
        raise ValueError(
            f"slots must be a contiguous 1-D int64 tensor on {k.device}, got {list(slots.shape)} "
            f"{slots.dtype} on {slots.device}"
        )
    n, heads = slots.numel(), k.shape[1]
    if len(offsets) != len(begins) + 1:
        raise ValueError(f"{len(begins)} parts need {len(begins) + 1} part_offsets, got {len(offsets)}")
    if offsets[0] != 0 or offsets[-1] != n or any(a > b for a, b in zip(offsets, offsets[1:], strict=False)):
        raise ValueError(f"part_offsets must rise from 0 to {n} (the slots), got {list(offsets)}")
    if head_count < 0 or any(begin < 0 or begin + head_count > heads for begin in begins):
        raise ValueError(
            f"the pool has heads [0, {heads}); head_count {head_count} with head_begin {list(begins)} is outside"
        )
    wanted = staged_numel(n, head_count, k.shape[2], v.shape[2])
    if flat.shape != (wanted,) or flat.dtype != k.dtype or flat.device != k.device or not flat.is_contiguous():
        raise ValueError(
            f"{flat_name} must be a contiguous 1-D {k.dtype} tensor of {wanted} elements on {k.device}, got "
            f"{list(flat.shape)} {flat.dtype} on {flat.device}"
        )
