"""The KV of live requests from the old pool view to the new one, layer by layer.

:func:`prepare` makes a rank's part of it before anything is moved; its ``run`` moves all layers.  A layer is packed
(:class:`Parts`), carried to the other ranks (:class:`Direct` or :class:`AllToAll`) and unpacked there, while the next
one is packed.  Which slots and heads go where is in ``switch/plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.cpu import shm
from sglang_pat.cpu.windows import COUNT, Windows
from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan
from sglang_pat.switch.transfer import synchronize, upload

if TYPE_CHECKING:
    from sglang_pat.rank.layouts import Layouts


# -- one layer: between the pool and a flat buffer -----------------------------------------------------

Ints = Sequence[int] | torch.Tensor


def staged_numel(n: int, head_count: int, dim_k: int, dim_v: int) -> int:
    """Elements of the staging buffer for n slots."""
    return n * head_count * (dim_k + dim_v)


class Parts:
    """Which slots and heads to copy: made once, used for every layer.

    Everything is checked against the first layer; one of the same shapes is not checked again.

    One call serves K and V of one layer and all peers.  Arguments, here and of the functions below:

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
            from sglang_pat.switch import kv_triton

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


# -- carriers: one layer after another, the next one is packed while one travels ----------------------
#
# Both are used in the same way, by all ranks of a group together::
#
#     transport.outgoing(0)                      # a flat buffer: pack layer 0: peers in order, what stays here last
#     for layer in ...:
#         transport.start(layer)
#         transport.outgoing(layer + 1)          # pack the next one meanwhile
#         transport.incoming(layer)              # waits; pieces to unpack
#
# Layer ``i`` is unpacked before ``start(i + 1)``, and the buffer of layer ``i`` is packed again only after it: so two
# buffers for what goes out are enough, and one for what comes in.


@dataclass(frozen=True)
class Piece:
    """Elements of parts ``first`` to ``last - 1``, in order, in one flat buffer.

    Part ``i`` is from peer ``i``; the one behind the last peer's is what stays on this rank.
    """

    first: int
    last: int
    data: torch.Tensor


class Staging:
    """Device memory through which :class:`AllToAll` moves layers: two buffers that go out, one that comes in.

    Taken before a pause by :meth:`reserve`, given back after it by :meth:`release`; where a layer needs more than was
    reserved, it is taken then.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._largest = 0
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(COUNT + 1)]

    def reserve(self, out: int, into: int) -> None:
        """Have at least so many bytes in each buffer that goes out, and in the one that comes in.

        Raises:
            RuntimeError: the device has no memory left (``torch.OutOfMemoryError``).
        """
        if max(out, into) > self._largest:
            self._largest = max(out, into)
            self._empty_cache()
        for index, size in enumerate([out] * COUNT + [into]):
            if self._buffers[index].numel() < size:
                self._buffers[index] = torch.empty(0, dtype=torch.uint8, device=self._device)  # first give back
                self._buffers[index] = torch.empty(size, dtype=torch.uint8, device=self._device)

    def _empty_cache(self) -> None:
        """Give back the buffers of smaller switches: PyTorch's cache of this stream has them, and nobody else's can."""
        self.release()
        if torch.device(self._device).type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]

    def take(self, out: int, into: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The buffers as so many elements of ``dtype``, 1-D; those that go out first."""
        sizes = [size * dtype.itemsize for size in [out] * COUNT + [into]]
        self.reserve(sizes[0], sizes[-1])
        return [buffer[:size].view(dtype) for buffer, size in zip(self._buffers, sizes, strict=True)]


def _wait(work: dist.Work | None) -> None:
    """Until the layer that was started last is here."""
    assert work is not None, "incoming comes after start"
    work.wait()


class AllToAll:
    """Through :class:`Staging` and the group's ``all_to_all_single``: any backend, any device.

    On CUDA the transfer runs on the backend's own stream beside the caller's.

    Args:
        elements: what each rank of the group sends to each, int ``[ranks, ranks]``, zero on the diagonal.
        staying: elements that go through the buffer without leaving this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, staging: Staging, elements: np.ndarray, staying: int, dtype: torch.dtype
    ) -> None:
        me = dist.get_rank(group)
        self._group = group
        self._out_splits, self._in_splits = elements[me].tolist(), elements[:, me].tolist()
        self._leaving = sum(self._out_splits)
        *self._out, self._in = staging.take(self._leaving + staying, sum(self._in_splits), dtype)
        self._work: dist.Work | None = None

    def outgoing(self, layer: int) -> torch.Tensor:
        return self._out[layer % COUNT]

    def start(self, layer: int) -> None:
        leaving = self.outgoing(layer)[: self._leaving]
        self._work = dist.all_to_all_single(
            self._in, leaving, self._in_splits, self._out_splits, group=self._group, async_op=True
        )

    def incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        peers = len(self._in_splits)
        return [Piece(0, peers, self._in), Piece(peers, peers + 1, self.outgoing(layer)[self._leaving :])]


class Direct:
    """Through :class:`Windows`: peers unpack from where this rank packed.

    Before another transport begins all ranks must have met: a peer may still read the last layer.

    Args:
        members: rank in the windows' group of each rank of ``group``.
        elements, staying: as of :class:`AllToAll`.

    Raises:
        OSError, ValueError: this rank has no memory for the windows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        windows: Windows,
        members: list[int],
        elements: np.ndarray,
        staying: int,
        dtype: torch.dtype,
    ) -> None:
        self._me = dist.get_rank(group)
        self._meet = shm.backend_of(group).meet
        self._windows, self._members = windows, members
        self._elements, self._dtype = elements, dtype
        self._ends = np.cumsum(elements, axis=1)
        self._leaving, self._staying = int(self._ends[self._me, -1]), staying
        self._size = self._leaving + staying
        self._busiest = int(max(elements.sum(axis=0).max(), elements.sum(axis=1).max())) * dtype.itemsize
        self._work: dist.Work | None = None
        windows.reserve(self._size * dtype.itemsize)

    def outgoing(self, layer: int) -> torch.Tensor:
        return self._windows.view(self._members[self._me], layer % COUNT, 0, self._size, self._dtype)

    def start(self, layer: int) -> None:
        # All have packed this layer when all are here, and all have unpacked the one before.
        self._work = self._meet(self._busiest)

    def incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        pieces = []
        for peer, end in enumerate(self._ends[:, self._me].tolist()):
            count = int(self._elements[peer, self._me])
            if count:
                data = self._windows.view(self._members[peer], layer % COUNT, end - count, count, self._dtype)
                pieces.append(Piece(peer, peer + 1, data))
        if self._staying:
            peers = len(self._members)
            pieces.append(Piece(peers, peers + 1, self.outgoing(layer)[self._leaving :]))
        return pieces


# -- the whole switch of a rank --------------------------------------------------------------------------


def reserve(layouts: Layouts, staging: Staging, new: ParallelLayout, tokens: int) -> None:
    """Take memory, before the pause, to move the KV of so many tokens; what grows until then is taken in the pause.

    Raises:
        OSError, RuntimeError: there is not enough memory.
    """
    old, pool = layouts.current.layout, layouts.current.kv_pool
    held = tokens * (pool.k_buffer[0][0].nbytes + pool.v_buffer[0][0].nbytes)
    # When tp is raised what a rank keeps stays where it is; else some of it goes through the window as well.
    through = held - held * old.tp // new.tp if new.tp > old.tp else held
    if layouts.windows is not None:
        layouts.windows.resize(min(through, layouts.windows.capacity))
    elif layouts.config.kv_exchange != "allgather":
        staging.reserve(through, through)


def prepare(
    layouts: Layouts,
    staging: Staging,
    new: ParallelLayout,
    plans: dict[int, plan.GroupPlan],
    requests: Sequence[plan.LiveRequest],
    rows: list[np.ndarray],
) -> KvExchange | KvGather | None:
    """This rank's part, or None if no KV moves in its exchange group.

    Args:
        plans: the plan of every new group that a member of the exchange group will belong to.
        requests: what this rank's group offers; ``rows``: their KV slots, int64 ``[tokens]`` each.

    Raises:
        OSError, RuntimeError: there is no memory to put KV through.
    """
    old, groups, rank = layouts.current.layout, layouts.runner.groups, layouts.rank
    gathering = layouts.config.kv_exchange == "allgather"
    if gathering:
        groups.larger(old, new)  # by all ranks, also those that have nothing to move
    if not any(group_plan.total for group_plan in plans.values()):
        return None
    larger = max(old, new)
    move = plan.Move(
        old=old,
        new=new,
        kv_heads=layouts.kv_heads,
        members=larger.group(larger.group_of(rank)) if gathering else groups.exchange_group(old, new)[1],
        rank=rank,
        plans=plans,
        rows=rows,
        requests=requests,
    )
    if gathering:
        return KvGather(layouts, new, plan.plan_gather(move))
    return KvExchange(layouts, staging, new, plan.plan_exchange(move))


class KvExchange:
    """One rank's part of moving the KV of a switch: everything is ready, :meth:`run` moves it."""

    def __init__(self, layouts: Layouts, staging: Staging, new: ParallelLayout, exchange: plan.ExchangePlan) -> None:
        self._plan = exchange
        self._source, self._target = layouts.current.kv_pool, layouts[new].kv_pool
        sample = self._source.k_buffer[0]
        group, members = layouts.runner.groups.exchange_group(layouts.current.layout, new)
        dim = self._source.head_dim + self._source.v_head_dim
        elements, staying = exchange.elements(dim), exchange.moving * exchange.heads * dim
        if layouts.windows is not None:
            self._carrier = Direct(group, layouts.windows, members, elements, staying, sample.dtype)
        else:
            self._carrier = AllToAll(group, staging, elements, staying, sample.dtype)
        self._recv_slots = upload(exchange.recv_slots, torch.int64, sample.device)
        send_slots = upload(exchange.send_slots, torch.int64, sample.device)
        self._sends = Parts(send_slots, *_lists(exchange.send_offsets, exchange.send_heads), exchange.heads)
        self._receives: dict[tuple[int, int], Parts] = {}
        sent = int(elements[members.index(layouts.rank)].sum())
        self.bytes_sent = sent * sample.dtype.itemsize * self._source.layer_num
        """To other ranks, all layers."""
        self.place = exchange.place
        """Slot of the new pool view for each slot of the plan, int64 ``[total + 1]``."""

    def run(self, error: Exception | None = None) -> Exception | None:
        """Move all layers; returns the first error, also one that only the device knows of.

        A layer is packed while the one before travels.  With an ``error``, given or met, this rank only keeps taking
        part in the collectives, so that nobody waits for it.
        """
        layers = self._source.layer_num

        def attempt(step: Callable[..., None], *args: Any, always: bool = False) -> None:
            nonlocal error
            if error is not None and not always:
                return
            try:
                step(*args)
            except Exception as exc:
                error = error or exc

        attempt(self._pack, 0)
        for layer in range(layers):
            # The new view lies over the old one: no part of a layer is unpacked before this rank has packed it whole.
            attempt(self._carrier.start, layer, always=True)
            if layer + 1 < layers:
                attempt(self._pack, layer + 1)
            attempt(self._unpack, layer)
        attempt(synchronize, self._recv_slots.device)
        return error

    def _pack(self, layer: int) -> None:
        pools = self._source.k_buffer[layer], self._source.v_buffer[layer]
        self._sends.pack(*pools, self._carrier.outgoing(layer))

    def _unpack(self, layer: int) -> None:
        pools = self._target.k_buffer[layer], self._target.v_buffer[layer]
        for piece in self._carrier.incoming(layer):
            key = piece.first, piece.last
            if key not in self._receives:  # every layer comes in the same pieces
                self._receives[key] = self._parts_received(piece.first, piece.last)
            self._receives[key].unpack(*pools, piece.data)

    def _parts_received(self, first: int, last: int) -> Parts:
        offsets, heads = self._plan.recv_offsets[first : last + 1], self._plan.recv_heads[first:last]
        slots = self._recv_slots[offsets[0] : offsets[-1]]
        return Parts(slots, *_lists(offsets - offsets[0], heads), self._plan.heads)


def _lists(offsets: np.ndarray, heads: np.ndarray) -> tuple[list[int], list[int]]:
    return offsets.tolist(), heads.tolist()


class KvGather:
    """One rank's part where KV moves PAT's way (section 4.3), ``--pat-kv-exchange allgather``: to compare with.

    All ranks of the larger TP group get everything and cut their part out.  Used as :class:`KvExchange`.
    """

    def __init__(self, layouts: Layouts, new: ParallelLayout, gather: plan.GatherPlan) -> None:
        self._plan = gather
        self._source, self._target = layouts.current.kv_pool, layouts[new].kv_pool
        sample = self._source.k_buffer[0]
        self._group = layouts.runner.groups.larger(layouts.current.layout, new)
        self._dims = self._source.head_dim, self._source.v_head_dim
        # Members may hold different numbers of slots, an all-gather wants one size.
        size = max(gather.counts) * gather.heads * sum(self._dims)
        self._out = torch.empty(size, dtype=sample.dtype, device=sample.device)
        self._all = [torch.empty_like(self._out) for _ in gather.counts]
        self._send_slots = upload(gather.send_slots, torch.int64, sample.device)
        self._takes = [
            (take, torch.arange(take.first, take.first + len(take.slots), device=sample.device),
             upload(take.slots, torch.int64, sample.device))
            for take in gather.takes
        ]  # fmt: skip
        self.bytes_sent = self._out.nbytes * (len(gather.counts) - 1) * self._source.layer_num
        """To other ranks, all layers."""
        self.place = np.arange(gather.total + 1, dtype=np.int64)
        """Slot of the new pool view for each slot of the plan: the same."""

    def run(self, error: Exception | None = None) -> Exception | None:
        """Move all layers; returns the first error, as ``KvExchange.run``."""
        for layer in range(self._source.layer_num):
            try:
                if error is None:
                    self._pack(layer)
            except Exception as exc:
                error = exc
            dist.all_gather(self._all, self._out, group=self._group)
            try:
                if error is None:
                    self._cut(layer)
            except Exception as exc:
                error = exc
        try:
            synchronize(self._out.device)
        except Exception as exc:
            error = error or exc
        return error

    def _pack(self, layer: int) -> None:
        slots, heads = self._send_slots, self._plan.heads
        pools = self._source.k_buffer[layer], self._source.v_buffer[layer]
        out = self._out[: len(slots) * heads * sum(self._dims)]
        kv_pack(*pools, slots, [0, len(slots)], [0], heads, out)

    def _cut(self, layer: int) -> None:
        pools = self._target.k_buffer[layer], self._target.v_buffer[layer]
        for take, rows, slots in self._takes:
            count, heads = self._plan.counts[take.member], self._plan.heads
            middle, end = (count * heads * sum(self._dims[:n]) for n in (1, 2))
            gathered = self._all[take.member]
            keys = gathered[:middle].view(count, heads, self._dims[0])
            values = gathered[middle:end].view(count, heads, self._dims[1])
            part = gathered.new_empty(len(slots) * take.count * sum(self._dims))
            kv_pack(keys, values, rows, [0, len(rows)], [take.src_head], take.count, part)
            kv_unpack(*pools, slots, [0, len(slots)], [take.dst_head], take.count, part)
