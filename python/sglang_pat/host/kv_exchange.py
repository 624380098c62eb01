"""The KV of live requests from the old pool view to the new one, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.host.handover import Offer
from sglang_pat.host.layouts import Layouts
from sglang_pat.kernels import kv as kernels
from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan

if TYPE_CHECKING:
    from sglang_pat.host.scheduler import AdaptiveScheduler


def plan_exchange(
    scheduler: AdaptiveScheduler,
    new: ParallelLayout,
    plans: dict[int, plan.GroupPlan],
    offers: dict[int, Offer],
    decoding: list[Req],
) -> plan.Exchange | None:
    """This rank's part, or None if no KV moves in its exchange group."""
    if not any(group_plan.total for group_plan in plans.values()):
        return None
    layouts = scheduler.layouts
    old = layouts.current.layout
    _, members = layouts.runner.groups.exchange(old, new)
    rows = [scheduler.kv_row(req).cpu().numpy() for req in decoding]
    live = offers[old.group_of(scheduler.rank)].decoding
    return plan.build_exchange(old, new, layouts.kv_heads, members, scheduler.rank, plans, rows, live)


def move(
    layouts: Layouts, new: ParallelLayout, exchange: plan.Exchange, error: Exception | None
) -> tuple[int, Exception | None]:
    """Pack, all-to-all and unpack each layer; returns the bytes sent to other ranks, and the first error.

    With an ``error``, given or met, this rank only keeps taking part in the collectives, so that nobody
    waits for it.
    """
    old = layouts.current.layout
    source, target = layouts[old].kv_pool, layouts[new].kv_pool
    group, members = layouts.runner.groups.exchange(old, new)
    device, dtype = source.k_buffer[0].device, source.k_buffer[0].dtype
    dim = source.head_dim + source.v_head_dim
    send_splits = exchange.split(dim, exchange.send_offsets)
    recv_splits = exchange.split(dim, exchange.recv_offsets)
    staged_out = torch.empty(sum(send_splits), dtype=dtype, device=device)
    staged_in = torch.empty(sum(recv_splits), dtype=dtype, device=device)
    send_slots = torch.from_numpy(exchange.send_slots).to(device)
    recv_slots = torch.from_numpy(exchange.recv_slots).to(device)
    out_plan = (torch.from_numpy(exchange.send_offsets), torch.from_numpy(exchange.send_heads), exchange.heads)
    in_plan = (torch.from_numpy(exchange.recv_offsets), torch.from_numpy(exchange.recv_heads), exchange.heads)
    for layer in range(source.layer_num):
        old_kv = source.k_buffer[layer], source.v_buffer[layer]
        new_kv = target.k_buffer[layer], target.v_buffer[layer]
        # The new view lies over the old one: a layer is packed whole before anything of it is unpacked.
        try:
            if error is None:
                kernels.kv_pack(*old_kv, send_slots, *out_plan, staged_out)
        except Exception as exc:
            error = exc
        dist.all_to_all_single(staged_in, staged_out, recv_splits, send_splits, group=group)
        try:
            if error is None:
                kernels.kv_unpack(*new_kv, recv_slots, *in_plan, staged_in)
        except Exception as exc:
            error = exc
    sent = exchange.elements_sent(dim, members.index(layouts.rank)) * dtype.itemsize * source.layer_num
    return sent, error
