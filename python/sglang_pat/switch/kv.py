"""The KV of live requests from the old pool view to the new one, layer by layer.

A layer is packed (:class:`Parts`), carried to the other ranks (:class:`DirectTransfer`, :class:`AllToAll`, or PAT's way
:class:`AllGather`) and unpacked there, while the next one is packed.  Which slots and heads go where is in
``switch/plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
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
    from sglang_pat.host.kv import KvBuffers
    from sglang_pat.rank.layouts import Layouts


# -- one layer: between the pool and a flat buffer -----------------------------------------------------


def count_staged_elements(n: int, head_count: int, dim_k: int, dim_v: int) -> int:
    """Number of elements of the staging buffer for ``n`` slots."""
    return n * head_count * (dim_k + dim_v)


class Parts:
    """Slots and heads to copy: made once, used for every layer.

    One call serves K and V of one layer and all peers.  Arguments, here and of the kernels:

    ``k``, ``v``
        Views ``[num_slots, heads, dim_k]`` and ``[num_slots, heads, dim_v]`` of one layer of the pool, any dtype
        (the same for both), contiguous in the last two dimensions.
    ``slots``
        int64 ``[n]``, rows of the pool, grouped by part; on the pool's device. In an unpack no (slot, head) may
        occur twice with different contents.
    ``part_offsets``
        ``P + 1`` integers from 0 to n, not decreasing: part p is ``slots[part_offsets[p]:part_offsets[p+1]]``; in host
        memory. Parts may be empty.
    ``head_begin``, ``head_count``
        Part p covers heads ``[head_begin[p], head_begin[p] + head_count)``; ``head_begin`` has P integers.
    ``staged``
        1-D, the pool's dtype, exactly ``count_staged_elements(...)`` elements: for each part in order its K block
        ``[n_p, head_count, dim_k]`` and then its V block ``[n_p, head_count, dim_v]``.

    Errors: ValueError from the C++ for whatever does not fit together. On CUDA only sizes are checked: to look at
    slots and heads would cost a synchronisation.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        part_offsets: Sequence[int] | np.ndarray,
        head_begin: Sequence[int] | np.ndarray,
        head_count: int,
    ) -> None:
        self._slots, self._head_count = slots, head_count
        self._tables = [upload(np.asarray(t), torch.int64, slots.device) for t in (part_offsets, head_begin)]

    def pack(self, k: torch.Tensor, v: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy pool rows into ``staged``: C++ on CPU, Triton on CUDA."""
        self._run("kv_pack", k, v, staged)

    def unpack(self, k: torch.Tensor, v: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy ``staged`` into pool rows, the inverse of :meth:`pack`."""
        self._run("kv_unpack", k, v, staged)

    def _run(self, kernel: str, k: torch.Tensor, v: torch.Tensor, staged: torch.Tensor) -> None:
        if self._slots.numel() and self._head_count:
            run = getattr(_choose_kernels(k.device.type), kernel)
            run(k, v, self._slots, *self._tables, self._head_count, staged)


@cache
def _choose_kernels(device: str) -> ModuleType:
    """The module with ``kv_pack`` and ``kv_unpack`` for a type of device."""
    return import_module("sglang_pat.switch.kv_triton" if device == "cuda" else "sglang_pat._C")


# -- carriers: layers from rank to rank -----------------------------------------------------------------


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
        """Reserve at least ``out`` bytes in each buffer that goes out, and ``into`` in the one that comes in.

        Raises:
            RuntimeError: the device has no memory left (``torch.OutOfMemoryError``).
        """
        if max(out, into) > self._largest:
            self._largest = max(out, into)
            self.release()
            if torch.device(self._device).type == "cuda":
                # PyTorch's cache of this stream has the buffers of smaller switches, and nobody else's can.
                torch.cuda.empty_cache()
        for index, size in enumerate([out] * COUNT + [into]):
            if self._buffers[index].numel() < size:
                self._buffers[index] = torch.empty(0, dtype=torch.uint8, device=self._device)  # first give back
                self._buffers[index] = torch.empty(size, dtype=torch.uint8, device=self._device)

    def release(self) -> None:
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]

    def get_buffers(self, out: int, into: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The buffers as ``out`` and ``into`` elements of ``dtype``, 1-D; those that go out first."""
        sizes = [size * dtype.itemsize for size in [out] * COUNT + [into]]
        self.reserve(sizes[0], sizes[-1])
        return [buffer[:size].view(dtype) for buffer, size in zip(self._buffers, sizes, strict=True)]


def _wait(work: dist.Work | None) -> None:
    """Wait until the layer that was started last is here."""
    assert work is not None, "incoming comes after start"
    work.wait()


class AllToAll:
    """A carrier through :class:`Staging` and the group's ``all_to_all_single``: any backend, any device.

    Used by all ranks of a group together, as are the other carriers::

        carrier.outgoing(0)                      # a flat buffer: pack layer 0: peers in order, what stays here last
        for layer in ...:
            carrier.start(layer)
            carrier.outgoing(layer + 1)          # pack the next one meanwhile
            carrier.incoming(layer)              # waits; pieces to unpack

    Layer ``i`` is unpacked before ``start(i + 1)``, and the buffer of layer ``i`` is packed again only after it: so two
    buffers for what goes out are enough, and one for what comes in.  On CUDA the transfer runs on the backend's own
    stream beside the caller's.

    Args:
        elements: number of elements that each rank sends to each, int ``[ranks, ranks]``, zero on the diagonal.
        staying: number of elements that go through the buffer without leaving this rank.

    Attributes:
        sent: number of elements of a layer that leave this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, staging: Staging, elements: np.ndarray, staying: int, dtype: torch.dtype
    ) -> None:
        me = dist.get_rank(group)
        self._group = group
        self._out_splits, self._in_splits = elements[me].tolist(), elements[:, me].tolist()
        self._leaving = self.sent = sum(self._out_splits)
        *self._out, self._in = staging.get_buffers(self._leaving + staying, sum(self._in_splits), dtype)
        self._work: dist.Work | None = None

    def get_outgoing(self, layer: int) -> torch.Tensor:
        return self._out[layer % COUNT]

    def start(self, layer: int) -> None:
        leaving = self.get_outgoing(layer)[: self._leaving]
        self._work = dist.all_to_all_single(
            self._in, leaving, self._in_splits, self._out_splits, group=self._group, async_op=True
        )

    def get_incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        peers = len(self._in_splits)
        return [Piece(0, peers, self._in), Piece(peers, peers + 1, self.get_outgoing(layer)[self._leaving :])]


class DirectTransfer:
    """A carrier through :class:`Windows`: peers unpack from where this rank packed.

    Before another carrier begins all ranks must have met: a peer may still read the last layer.

    Args:
        members: rank in the windows' group of each rank of ``group``.
        elements, staying, sent: as in :class:`AllToAll`.

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
        me = dist.get_rank(group)
        self._meet = shm.get_backend(group).meet
        self._windows, self._dtype, self._own = windows, dtype, members[me]
        self._parts = [
            (members[peer], begin, end - begin) for peer, begin, end in _list_incoming(elements, me, staying)
        ]
        self.sent = int(elements[me].sum())
        self._size = self.sent + staying
        self._busiest = int(max(elements.sum(axis=0).max(), elements.sum(axis=1).max())) * dtype.itemsize
        self._work: dist.Work | None = None
        windows.reserve(self._size * dtype.itemsize)

    def get_outgoing(self, layer: int) -> torch.Tensor:
        return self._windows.get_view(self._own, layer % COUNT, 0, self._size, self._dtype)

    def start(self, layer: int) -> None:
        # All have packed this layer when all are here, and all have unpacked the one before.
        self._work = self._meet(self._busiest)

    def get_incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        return [
            Piece(i, i + 1, self._windows.get_view(member, layer % COUNT, begin, count, self._dtype))
            for i, (member, begin, count) in enumerate(self._parts)
            if count
        ]


class AllGather:
    """A carrier in PAT's way (section 4.3), to compare with: every rank gets everything, and cuts its part out.

    Args:
        elements, staying, sent: as in :class:`AllToAll`.
        most: number of elements that the rank with most of them packs: an all-gather wants one size.
    """

    def __init__(
        self, group: dist.ProcessGroup, elements: np.ndarray, staying: int, most: int, sample: torch.Tensor
    ) -> None:
        self._group = group
        self._parts = _list_incoming(elements, dist.get_rank(group), staying)
        self._out = sample.new_empty(most)
        self._all = [torch.empty_like(self._out) for _ in elements]
        self.sent = most * (len(elements) - 1)

    def get_outgoing(self, layer: int) -> torch.Tensor:
        *_, (_, _, end) = self._parts
        return self._out[:end]

    def start(self, layer: int) -> None:
        dist.all_gather(self._all, self._out, group=self._group)

    def get_incoming(self, layer: int) -> list[Piece]:
        return [Piece(i, i + 1, self._all[peer][begin:end]) for i, (peer, begin, end) in enumerate(self._parts)]


def _list_incoming(elements: np.ndarray, me: int, staying: int) -> list[tuple[int, int, int]]:
    """Peer, and begin and end in what it has packed, of each part that comes to rank ``me``; its own at the end."""
    ends = np.cumsum(elements, axis=1)
    parts = [(peer, int(ends[peer, me] - elements[peer, me]), int(ends[peer, me])) for peer in range(len(elements))]
    return [*parts, (me, int(ends[me, -1]), int(ends[me, -1]) + staying)]


# -- the whole switch of a rank --------------------------------------------------------------------------


def reserve(layouts: Layouts, staging: Staging, new: ParallelLayout, tokens: int) -> None:
    """Take memory, before the pause, to move the KV of ``tokens`` tokens; what grows until then is taken in the pause.

    Raises:
        OSError, RuntimeError: there is not enough memory.
    """
    old = layouts.layout
    held = tokens * layouts.current.kv.slot_bytes
    # When tp is raised what a rank keeps stays where it is; else some of it goes through the window as well.
    out = into = held - held * old.tp // new.tp if new.tp > old.tp else held
    if new.stride > old.stride:  # from lent ranks to those that work
        out, into = (held, 0) if layouts.rank in new.lent else (0, held * (new.stride // old.stride - 1))
    elif new.stride < old.stride:
        out, into = held - held * new.stride // old.stride, 0
    if layouts.windows is not None:
        layouts.windows.resize(min(out, layouts.windows.capacity))
    elif layouts.config.kv_exchange != "allgather":
        staging.reserve(out, into)


def prepare(
    layouts: Layouts,
    staging: Staging,
    new: ParallelLayout,
    plans: dict[int, plan.GroupPlan],
    requests: Sequence[plan.LiveRequest],
    rows: list[np.ndarray],
) -> KvExchange | None:
    """Make this rank's part of the exchange, or None if no KV moves in its exchange group.

    Args:
        plans: the plan of every new group that a member of the exchange group will belong to.
        requests: what this rank's group offers; ``rows``: their KV slots, int64 ``[tokens]`` each.

    Raises:
        OSError, RuntimeError: there is no memory to put KV through.
    """
    old, groups = layouts.layout, layouts.groups
    gather = layouts.config.kv_exchange == "allgather" and old.tp != new.tp  # PAT lends nothing
    # The larger group by all ranks, also those that have nothing to move.
    group, members = groups.get_larger_group(old, new) if gather else groups.exchange_group(old, new)
    if not any(group_plan.total for group_plan in plans.values()):
        return None
    move = plan.KvMove(
        old=old,
        new=new,
        kv_heads=layouts.kv_heads,
        members=members,
        rank=layouts.rank,
        plans=plans,
        rows=rows,
        requests=requests,
    )
    exchange, source = plan.plan_exchange(move, gather), layouts.current.kv
    sample, size = source.k[0], exchange.heads * sum(source.dims)  # elements of a slot, K and V together
    elements, staying = exchange.slots * size, exchange.moving * size
    if gather:
        carrier = AllGather(group, elements, staying, exchange.most * size, sample)
    elif layouts.windows is not None:
        carrier = DirectTransfer(group, layouts.windows, members, elements, staying, sample.dtype)
    else:
        carrier = AllToAll(group, staging, elements, staying, sample.dtype)
    return KvExchange(source, layouts[new].kv, exchange, carrier)


class KvExchange:
    """One rank's part of moving the KV of a switch: everything is ready, :meth:`run` moves it."""

    def __init__(
        self,
        source: KvBuffers,
        target: KvBuffers,
        exchange: plan.ExchangePlan,
        carrier: DirectTransfer | AllToAll | AllGather,
    ) -> None:
        self._plan, self._carrier = exchange, carrier
        self._source, self._target = source, target
        sample = source.k[0]
        self._recv_slots = upload(exchange.recv_slots, torch.int64, sample.device)
        send_slots = upload(exchange.send_slots, torch.int64, sample.device)
        self._sends = Parts(send_slots, exchange.send_offsets, exchange.send_heads, exchange.heads)
        self._receives: dict[tuple[int, int], Parts] = {}
        self.bytes_sent = carrier.sent * sample.dtype.itemsize * source.num_layers
        """Number of bytes that go to other ranks, of all layers."""
        self.place = exchange.place
        """Slot of the new pool view for each slot of the plan, int64 ``[total + 1]``."""

    def run(self, error: Exception | None = None) -> Exception | None:
        """Move all layers; returns the first error, also one that only the device knows of.

        A layer is packed while the one before travels.  With an ``error``, given or met, this rank only keeps taking
        part in the collectives, so that nobody waits for it.
        """
        layers = self._source.num_layers

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
        pools = self._source.k[layer], self._source.v[layer]
        self._sends.pack(*pools, self._carrier.get_outgoing(layer))

    def _unpack(self, layer: int) -> None:
        pools = self._target.k[layer], self._target.v[layer]
        for piece in self._carrier.get_incoming(layer):
            key = piece.first, piece.last
            if key not in self._receives:  # every layer comes in the same pieces
                self._receives[key] = self._make_received_parts(piece.first, piece.last)
            self._receives[key].unpack(*pools, piece.data)

    def _make_received_parts(self, first: int, last: int) -> Parts:
        offsets, heads = self._plan.recv_offsets[first : last + 1], self._plan.recv_heads[first:last]
        slots = self._recv_slots[offsets[0] : offsets[-1]]
        return Parts(slots, offsets - offsets[0], heads, self._plan.heads)
