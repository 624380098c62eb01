"""The KV of live requests from the old pool view to the new one, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.comm.exchange import AllToAll, Direct
from sglang_pat.host.handover import Offer
from sglang_pat.host.kv_gather import KvGather
from sglang_pat.kernels import kv as kernels
from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan
from sglang_pat.switch.gather import build_gather

if TYPE_CHECKING:
    from sglang_pat.host.scheduler import AdaptiveScheduler


GROWTH = 16
"""Tokens that a request may still get between PREPARE and the pause: memory for them costs less than taking it then."""


def reserve(scheduler: AdaptiveScheduler) -> None:
    """Take memory, before the pause, for about what a switch would move now; what grows until then is taken in it.

    Raises:
        OSError: there is not enough memory.
    """
    windows, pool = scheduler.layouts.windows, scheduler.layouts.current.kv_pool
    if windows is None:
        return
    tokens = sum(req.kv_committed_len + GROWTH for req in scheduler.running_batch.reqs)
    windows.resize(min(tokens * (pool.k_buffer[0][0].nbytes + pool.v_buffer[0][0].nbytes), windows.capacity))


def prepare(
    scheduler: AdaptiveScheduler,
    new: ParallelLayout,
    plans: dict[int, plan.GroupPlan],
    offers: dict[int, Offer],
    decoding: list[Req],
) -> KvExchange | KvGather | None:
    """This rank's part, or None if no KV moves in its exchange group.

    Raises:
        OSError: there is no memory to put KV through.
    """
    layouts = scheduler.layouts
    old, groups = layouts.current.layout, layouts.runner.groups
    gathering = scheduler.adaptive.kv_exchange == "allgather"
    if gathering:
        groups.larger(old, new)  # by all ranks, also those that have nothing to move
    if not any(group_plan.total for group_plan in plans.values()):
        return None
    larger = max(old, new)
    move = plan.Move(
        old=old,
        new=new,
        kv_heads=layouts.kv_heads,
        members=larger.group(larger.group_of(scheduler.rank)) if gathering else groups.exchange(old, new)[1],
        rank=scheduler.rank,
        plans=plans,
        rows=[scheduler.kv_row(req).cpu().numpy() for req in decoding],
        requests=offers[old.group_of(scheduler.rank)].decoding,
    )
    if gathering:
        return KvGather(scheduler, new, build_gather(move))
    return KvExchange(scheduler, new, plan.build_exchange(move))


class KvExchange:
    """One rank's part of moving the KV of a switch: everything is ready, :meth:`run` moves it."""

    def __init__(self, scheduler: AdaptiveScheduler, new: ParallelLayout, exchange: plan.Exchange) -> None:
        layouts = scheduler.layouts
        self._plan = exchange
        self._source, self._target = layouts.current.kv_pool, layouts[new].kv_pool
        sample = self._source.k_buffer[0]
        group, members = layouts.runner.groups.exchange(layouts.current.layout, new)
        dim = self._source.head_dim + self._source.v_head_dim
        elements = exchange.elements(dim)
        if layouts.windows is not None:
            self._carrier = Direct(group, layouts.windows, members, elements, sample.dtype)
        else:
            self._carrier = AllToAll(group, elements, sample.dtype, sample.device)
        self._send_slots = torch.from_numpy(exchange.send_slots).to(sample.device)
        self._recv_slots = torch.from_numpy(exchange.recv_slots).to(sample.device)
        sent = exchange.elements_sent(dim, members.index(scheduler.rank))
        self.bytes_sent = sent * sample.dtype.itemsize * self._source.layer_num
        """To other ranks, all layers."""

    def run(self, error: Exception | None = None) -> Exception | None:
        """Move all layers; returns the first error.

        A layer is packed while the one before travels.  With an ``error``, given or met, this rank only keeps taking
        part in the collectives, so that nobody waits for it.
        """
        layers = self._source.layer_num

        def attempt(step: Callable[[int], None], layer: int) -> None:
            nonlocal error
            try:
                if error is None:
                    step(layer)
            except Exception as exc:
                error = exc

        attempt(self._pack, 0)
        for layer in range(layers):
            # The new view lies over the old one: no part of a layer is unpacked before all ranks have packed it whole.
            self._carrier.start(layer)
            if layer + 1 < layers:
                attempt(self._pack, layer + 1)
            attempt(self._unpack, layer)
        return error

    def _pack(self, layer: int) -> None:
        kernels.kv_pack(
            self._source.k_buffer[layer],
            self._source.v_buffer[layer],
            self._send_slots,
            self._plan.send_offsets.tolist(),
            self._plan.send_heads.tolist(),
            self._plan.heads,
            self._carrier.outgoing(layer),
        )

    def _unpack(self, layer: int) -> None:
        for piece in self._carrier.incoming(layer):
            offsets = self._plan.recv_offsets[piece.first : piece.last + 1]
            kernels.kv_unpack(
                self._target.k_buffer[layer],
                self._target.v_buffer[layer],
                self._recv_slots[offsets[0] : offsets[-1]],
                (offsets - offsets[0]).tolist(),
                self._plan.recv_heads[piece.first : piece.last].tolist(),
                self._plan.heads,
                piece.data,
            )
