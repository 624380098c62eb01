"""Requests from the old groups to the new ones: what each group offers, who takes what, and the rebuilding."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import NO_KV, Grammar
from sglang_pat.switch import agreement, compiled, parcels, plan, requests

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


@dataclass
class Offer:
    """What one old group puts on the table, from its leader.

    Attributes:
        live: the plan's view of the requests that have KV: those that decode in batch order, then those that wait for a
            decode slot or for the rest of a prefill.
        waiting: destination group of each request that waits for a prefill.
        capsules: destination group -> bytes of its requests' capsules, pickled together, live ones first; only of
            groups with ranks that do not hold these requests already, which get them from this leader.
        sent: outputs this leader has sent so far (``sglang_pat.switch.order``).
        fence: what its next output would have carried as a fence.
        weight_version: number of weight updates this rank has applied.
        entered: when each request came into the queue, by the leader's clock; live ones first.
        taken: what ranks of a new group hold from their leader (``agreement.TAKEN``).
    """

    live: list[plan.LiveRequest] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    capsules: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    fence: dict[int, int] | None = None
    weight_version: int = 0
    entered: list[float] = field(default_factory=list)
    taken: dict[str, Any] = field(default_factory=dict)


@dataclass
class IncomingRequests:
    """Requests of this rank's new group, rebuilt.

    Attributes:
        decoding: request, its slots in the plan (int64 ``[tokens]``), and how many of them it shares with an earlier
            one.
        waiting: requests that start with a prefill.
        parked: those of them whose KV came along, as in ``decoding``.
        place: slot of the new pool view for each slot of the plan, int64 ``[num_slots + 1]``.
        entered: rid -> when it came into the queue, of those that this rank held: their leader's clock counts, since
            priority scheduling sorts by it.
    """

    decoding: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    waiting: list[Req] = field(default_factory=list)
    parked: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    place: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    entered: dict[str, float] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """KV slots in use."""
        return len(self.place) - 1

    @property
    def recomputed(self) -> list[Req]:
        """Requests that decoded and lost their KV."""
        parked = {req.rid for req, _, _ in self.parked}
        return [req for req in self.waiting if req.output_ids and req.rid not in parked]


def least_moved(scheduler: SwitchingScheduler, recompute_below: int) -> int:
    """KV tokens that a request must have to be moved with them, by ``--pat-kv`` and by a command's
    ``recompute_below``."""
    return (
        NO_KV if recompute_below == NO_KV else {"migrate": 0, "auto": recompute_below}.get(scheduler.adaptive.kv, NO_KV)
    )


def seal(scheduler: SwitchingScheduler, new: ParallelLayout) -> list[Grammar]:
    """Before the pause: pickle what of this group's requests never changes, if it is going to travel.

    Returns:
        Grammars that the ranks of other groups will need.
    """
    if not scheduler.is_leader or new.tp <= scheduler.layouts.current.layout.tp:
        return []
    reqs = scheduler.running_batch.reqs + scheduler.waiting_queue
    for req in reqs:
        requests.seal(req)
    return compiled.needed(reqs)


def make_offer(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    live: list[Req],
    waiting: list[Req],
    rows: list[np.ndarray],
    recompute_below: int,
) -> tuple[Offer, dict[int, bytes]]:
    """This group's offer, and the leader's capsules; else every rank of a group computes the same.

    Args:
        rows: KV slots of the live requests, int64 ``[tokens]`` each.
        recompute_below: of the command; but of requests in the middle of a prefill: where switches come often, each
            piece would be lost before the next one.
    """
    layouts = scheduler.layouts
    old = layouts.current.layout
    complete = [bool(req.output_ids) and len(row) == req.seqlen - 1 for req, row in zip(live, rows, strict=True)]
    lengths = [len(row) if done else req.seqlen for req, row, done in zip(live, rows, complete, strict=True)]
    lengths += [req.seqlen for req in waiting]
    least = least_moved(scheduler, recompute_below)
    of_pieces = least if least == NO_KV else 0
    rows = [
        row if len(row) >= (least if done else of_pieces) else row[:0] for row, done in zip(rows, complete, strict=True)
    ]
    dests = plan.destinations(old, new, old.group_of(scheduler.rank), lengths)
    live_dest = dests[: len(live)]
    shared = plan.shared_prefixes(rows, live_dest, layouts.current.kv_pool.size + 1)
    planned = [
        plan.LiveRequest(len(row), *pair, dest, done)
        for row, pair, dest, done in zip(rows, shared, live_dest, complete, strict=True)
    ]
    capsules: dict[int, bytes] = {}
    if scheduler.is_leader and new.tp > old.tp:
        bound: dict[int, list[requests.Capsule]] = {}
        for req, dest in zip(live + waiting, dests, strict=True):
            bound.setdefault(dest, []).append(requests.capture(req))
        capsules = {dest: pickle.dumps(found, pickle.HIGHEST_PROTOCOL) for dest, found in bound.items()}
    output = scheduler.output
    offer = Offer(
        planned,
        dests[len(live) :],
        {dest: len(data) for dest, data in capsules.items()},
        output.sent,
        output.fence,
        layouts.weight_version,
        [req.time_stats.wait_queue_entry_time for req in live + waiting],
        agreement.taken(scheduler),
    )
    return offer, capsules


def send_capsules(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, Offer], mine: dict[int, bytes]
) -> dict[int, bytes]:
    """Capsules from the leaders to the ranks that need them, and to no other; all ranks take part.

    Args:
        mine: what this rank sends, by destination group; empty unless it leads.

    Returns:
        What comes to this rank, by source group.
    """
    old, rank = scheduler.layouts.current.layout, scheduler.rank
    sends = parcels.outgoing(old, new, rank, mine)
    comes = parcels.incoming(old, new, rank, {source: offer.capsules for source, offer in offers.items()})
    outgoing = torch.from_numpy(np.frombuffer(bytearray().join(sends), dtype=np.uint8))
    received = torch.empty(sum(comes), dtype=torch.uint8)
    world = scheduler.layouts.runner.groups.world
    dist.all_to_all_single(received, outgoing, comes, [len(data) for data in sends], group=world)
    parts = torch.split(received, comes)
    return {source: parts[old.leaders[source]].numpy().tobytes() for source in offers if comes[old.leaders[source]]}


def plan_groups(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, Offer]
) -> dict[int, plan.GroupPlan]:
    """The plan of every new group that a member of this rank's exchange group will belong to."""
    layouts = scheduler.layouts
    _, members = layouts.runner.groups.exchange_group(layouts.current.layout, new)
    max_requests = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    sources = {group: offer.live for group, offer in offers.items()}
    tree, capacity = scheduler.tree_cache, layouts[new].allocator.size
    keep = not (tree.is_chunk_cache() or tree.disable)
    return {g: plan.plan_group(g, sources, max_requests, capacity, keep) for g in {new.group_of(m) for m in members}}


def rebuild(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    group_plan: plan.GroupPlan,
    offers: dict[int, Offer],
    capsules: dict[int, bytes],
    held: list[Req],
    place: np.ndarray,
) -> IncomingRequests:
    """The requests that come to this rank's new group, decoding ones in plan order.

    Those that decode before and after, and that this rank ``held`` (live ones first, as in its own group's offer), go
    on as they are: all ranks of a group keep the same account of a request.  The others are rebuilt.  Nothing of what
    is held is changed here, so that an aborted switch goes on with it.
    """
    mine = new.group_of(scheduler.rank)
    own = scheduler.layouts.current.layout.group_of(scheduler.rank)
    incoming = IncomingRequests(place=place)
    recompute: list[Req] = []
    queued: list[Req] = []
    for group, offer in offers.items():
        if group == own:
            dests = [live.dest for live in offer.live] + offer.waiting
            coming = iter([req for req, dest in zip(held, dests, strict=True) if dest == mine])
            incoming.entered = {req.rid: at for req, at in zip(held, offer.entered, strict=True)}
        else:
            coming = iter(pickle.loads(capsules[group]) if group in capsules else ())
        planned = zip(offer.live, group_plan.rows[group], group_plan.decodes[group], strict=True)
        for live, row, decodes in planned:
            if live.dest != mine:
                continue
            req = next(coming)
            goes_on = decodes and isinstance(req, Req) and req.req_pool_idx is not None
            if not goes_on:
                req = _rebuild_one(scheduler, req)
            if not decodes:
                recompute.append(req)
            if row is not None:
                where = incoming.decoding if decodes else incoming.parked
                where.append((req, row, live.shared))
        queued += [_rebuild_one(scheduler, one) for one in coming]
    # Those that were already running go first, as SGLang does with retracted ones.
    incoming.waiting = recompute + queued
    return incoming


def _rebuild_one(scheduler: SwitchingScheduler, one: requests.Capsule | Req) -> Req:
    if not isinstance(one, Req):
        req = requests.rebuild(scheduler, one)
        if req.grammar is not None and not one.compiling:
            compiled.replay(req.grammar, req.output_ids)
        return req
    return requests.rebuild(scheduler, requests.capture(one), held_grammar=one.grammar)
