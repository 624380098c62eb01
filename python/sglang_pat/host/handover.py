"""Requests from the old groups to the new ones: what each group offers, who takes what, and the rebuilding."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.host import requests
from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan

if TYPE_CHECKING:
    from sglang_pat.host.scheduler import AdaptiveScheduler


@dataclass
class Offer:
    """What one old group puts on the table, from its leader.

    Attributes:
        decoding: the plan's view of the decoding requests, in batch order.
        waiting_dest: destination group of each waiting request.
        capsules: pickled capsules, decoding requests first.
        sent: outputs this leader has sent so far (``sglang_pat.switch.order``).
        fence: what its next output would have carried as a fence.
        weight_version: number of weight updates this rank has applied.
    """

    decoding: list[plan.LiveRequest] = field(default_factory=list)
    waiting_dest: list[int] = field(default_factory=list)
    capsules: list[bytes] = field(default_factory=list)
    sent: int = 0
    fence: dict[int, int] | None = None
    weight_version: int = 0


@dataclass
class Arrivals:
    """Requests of this rank's new group, rebuilt.

    Attributes:
        decoding: request, its KV slots in the new pool (int64 ``[tokens]``), and how many of them it
            shares with an earlier one.
        waiting: requests that start with a prefill.
        num_slots: KV slots in use, which are ``1 .. num_slots``.
    """

    decoding: list[tuple[Req, torch.Tensor, int]] = field(default_factory=list)
    waiting: list[Req] = field(default_factory=list)
    num_slots: int = 0


def make_offer(
    scheduler: AdaptiveScheduler, new: ParallelLayout, decoding: list[Req], waiting: list[Req], recompute_below: int
) -> Offer:
    """This group's offer; every rank of a group computes the same, but for the capsules, which the leader adds.

    ``recompute_below``: with ``--pat-kv auto``, requests with fewer KV tokens go over as tokens.
    """
    layouts = scheduler.layouts
    old = layouts.current.layout
    least = {"migrate": 0, "auto": recompute_below, "recompute": sys.maxsize}[scheduler.adaptive.kv]
    rows = [
        scheduler.kv_row(req).cpu().numpy() if req.kv_committed_len >= least else np.empty(0, np.int64)
        for req in decoding
    ]
    lengths = [req.kv_committed_len for req in decoding] + [req.seqlen for req in waiting]
    dests = plan.destinations(old, new, old.group_of(scheduler.rank), lengths)
    decoding_dest, waiting_dest = dests[: len(decoding)], dests[len(decoding) :]
    shared = plan.shared_prefixes(rows, decoding_dest, layouts.current.kv_pool.size + 1)
    live = [
        plan.LiveRequest(len(row), *pair, dest) for row, pair, dest in zip(rows, shared, decoding_dest, strict=True)
    ]
    capsules = []
    if scheduler.is_leader:
        capsules = [pickle.dumps(requests.capture(req)) for req in decoding + waiting]
    output = scheduler.output
    return Offer(live, waiting_dest, capsules, output.sent, output.fence, layouts.weight_version)


def plan_groups(
    scheduler: AdaptiveScheduler, new: ParallelLayout, offers: dict[int, Offer]
) -> dict[int, plan.GroupPlan]:
    """The plan of every new group that a member of this rank's exchange group will belong to."""
    layouts = scheduler.layouts
    _, members = layouts.runner.groups.exchange(layouts.current.layout, new)
    max_requests = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    sources = {group: offer.decoding for group, offer in offers.items()}
    capacity = layouts[new].allocator.size
    return {g: plan.plan_group(g, sources, max_requests, capacity) for g in {new.group_of(m) for m in members}}


def rebuild(
    scheduler: AdaptiveScheduler, new: ParallelLayout, group_plan: plan.GroupPlan, offers: dict[int, Offer]
) -> Arrivals:
    """Rebuild the requests that come to this rank's new group, decoding ones in plan order."""
    mine = new.group_of(scheduler.rank)
    arrivals = Arrivals(num_slots=group_plan.total)
    recompute: list[Req] = []
    queued: list[Req] = []
    for group, offer in offers.items():
        decoding, waiting = offer.capsules[: len(offer.decoding)], offer.capsules[len(offer.decoding) :]
        for live, row, capsule in zip(offer.decoding, group_plan.rows[group], decoding, strict=True):
            if live.dest != mine:
                continue
            req = _rebuild_one(scheduler, capsule)
            if row is None:
                recompute.append(req)
            else:
                arrivals.decoding.append((req, torch.from_numpy(row).to(scheduler.device), live.shared))
        for dest, capsule in zip(offer.waiting_dest, waiting, strict=True):
            if dest == mine:
                queued.append(_rebuild_one(scheduler, capsule))
    # Those that were already running go first, as the host does with retracted ones.
    arrivals.waiting = recompute + queued
    return arrivals


def _rebuild_one(scheduler: AdaptiveScheduler, capsule: bytes) -> Req:
    req = scheduler.rebuild(pickle.loads(capsule))
    req.pat_grammar = requests.finish_grammar(req)
    return req
