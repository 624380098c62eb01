"""The KV of live requests from the old pool view to the new one, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_pat.kernels import kv as kernels
from sglang_pat.kernels.transfer import synchronize, upload
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import NO_KV
from sglang_pat.switch import live, plan
from sglang_pat.switch.gather import build_gather
from sglang_pat.switch.handover import Offer, least_moved
from sglang_pat.switch.kv_gather import KvGather
from sglang_pat.switch.transport import AllToAll, Direct

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


GROWTH = 16
"""Tokens that a request may still get between PREPARE and the pause: memory for them costs less than taking it then."""


def reserve(scheduler: SwitchingScheduler, new: ParallelLayout, recompute_below: int = 0) -> None:
    """Take memory, before the pause, for about what a switch would move now; what grows until then is taken in it.

    Args:
        recompute_below: of the command.

    Raises:
        OSError, RuntimeError: there is not enough memory.
    """
    layouts, pool = scheduler.layouts, scheduler.layouts.current.kv_pool
    lengths = [req.kv_committed_len + GROWTH for req in scheduler.running_batch.reqs]
    lengths += [req.seqlen for req in live.have_decoded(scheduler)]
    least = least_moved(scheduler, recompute_below)
    tokens = sum(length for length in lengths if length >= least)
    if (prompt := scheduler.chunked_req) is not None and least != NO_KV and live.keeps_pieces(scheduler):
        tokens += min(prompt.kv_committed_len + (scheduler.chunked_prefill_size or 0), prompt.seqlen)
    held = tokens * (pool.k_buffer[0][0].nbytes + pool.v_buffer[0][0].nbytes)
    old = layouts.current.layout
    # When tp is raised what a rank keeps stays where it is; else some of it goes through the window as well.
    through = held - held * old.tp // new.tp if new.tp > old.tp else held
    if layouts.windows is not None:
        layouts.windows.resize(min(through, layouts.windows.capacity))
    elif scheduler.adaptive.kv_exchange != "allgather":
        layouts.staging.reserve(through, through)


def prepare(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    plans: dict[int, plan.GroupPlan],
    offers: dict[int, Offer],
    rows: list[np.ndarray],
) -> KvExchange | KvGather | None:
    """This rank's part, or None if no KV moves in its exchange group.

    Args:
        rows: KV slots of this rank's live requests, int64 ``[tokens]`` each.

    Raises:
        OSError, RuntimeError: there is no memory to put KV through.
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
        members=larger.group(larger.group_of(scheduler.rank)) if gathering else groups.exchange_group(old, new)[1],
        rank=scheduler.rank,
        plans=plans,
        rows=rows,
        requests=offers[old.group_of(scheduler.rank)].live,
    )
    if gathering:
        return KvGather(scheduler, new, build_gather(move))
    return KvExchange(scheduler, new, plan.plan_exchange(move))


class KvExchange:
    """One rank's part of moving the KV of a switch: everything is ready, :meth:`run` moves it."""

    def __init__(self, scheduler: SwitchingScheduler, new: ParallelLayout, exchange: plan.ExchangePlan) -> None:
        layouts = scheduler.layouts
        self._plan = exchange
        self._source, self._target = layouts.current.kv_pool, layouts[new].kv_pool
        sample = self._source.k_buffer[0]
        group, members = layouts.runner.groups.exchange_group(layouts.current.layout, new)
        dim = self._source.head_dim + self._source.v_head_dim
        elements, staying = exchange.elements(dim), exchange.moving * exchange.heads * dim
        if layouts.windows is not None:
            self._carrier = Direct(group, layouts.windows, members, elements, staying, sample.dtype)
        else:
            self._carrier = AllToAll(group, layouts.staging, elements, staying, sample.dtype)
        self._recv_slots = upload(exchange.recv_slots, torch.int64, sample.device)
        send_slots = upload(exchange.send_slots, torch.int64, sample.device)
        self._sends = kernels.Parts(send_slots, *_lists(exchange.send_offsets, exchange.send_heads), exchange.heads)
        self._receives: dict[tuple[int, int], kernels.Parts] = {}
        sent = int(elements[members.index(scheduler.rank)].sum())
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

    def _parts_received(self, first: int, last: int) -> kernels.Parts:
        offsets, heads = self._plan.recv_offsets[first : last + 1], self._plan.recv_heads[first:last]
        slots = self._recv_slots[offsets[0] : offsets[-1]]
        return kernels.Parts(slots, *_lists(offsets - offsets[0], heads), self._plan.heads)


def _lists(offsets: np.ndarray, heads: np.ndarray) -> tuple[list[int], list[int]]:
    return offsets.tolist(), heads.tolist()
