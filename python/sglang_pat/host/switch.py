"""The switch of one rank, step by step (states: ``sglang_pat.switch.state``).

``Prepare`` and ``Switch`` arrive like any request, broadcast inside each TP group by the host, so
every rank of a group handles them at the same iteration boundary.  From there on all N ranks act
together: whatever goes wrong on one rank before COMMIT is put to a vote that all of them hear, and
all go back.
"""

from __future__ import annotations

import logging
import pickle
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.host import requests
from sglang_pat.kernels import kv as kv_kernels
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Cancel, Prepare, Prepared, RankSwitched, Switch
from sglang_pat.switch import faults, plan
from sglang_pat.switch.order import fence_after_switch
from sglang_pat.switch.state import SwitchState, advance

if TYPE_CHECKING:
    from sglang_pat.host.scheduler import AdaptiveScheduler

logger = logging.getLogger(__name__)


class SwitchAborted(RuntimeError):
    """A rank failed before COMMIT; the message says which and why."""


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
    """Requests of this rank's new group, rebuilt."""

    decoding: list[tuple[Req, torch.Tensor, int]] = field(default_factory=list)
    waiting: list[Req] = field(default_factory=list)
    num_slots: int = 0


class SwitchExecutor:
    """Carries out the switches of one rank; owned and called by its scheduler."""

    def __init__(self, scheduler: AdaptiveScheduler) -> None:
        self.scheduler = scheduler
        self.layouts = scheduler.layouts
        self.config = scheduler.adaptive
        self.rank = scheduler.rank
        self.world = scheduler.layouts.runner.groups.world
        self.state = SwitchState.IDLE
        self._epoch = 0
        self._phases: dict[str, float] = {}
        self._clock = 0.0

    # -- handlers of the coordinator's commands -----------------------------------------------------

    def prepare(self, command: Prepare) -> None:
        """PREPARE: what can be done before the pause.  Decoding goes on after this call."""
        started = time.perf_counter()
        error = ""
        try:
            self._enter(SwitchState.PREPARE, command.epoch)
            self.layouts.prepare(self.config.layout(command.tp))
        except Exception as exc:
            logger.exception("preparing switch %d failed", command.epoch)
            error = f"rank {self.rank}: {exc}"
        seconds = time.perf_counter() - started
        self.scheduler.channel.send(Prepared(rank=self.rank, epoch=command.epoch, seconds=seconds, error=error))

    def cancel(self, command: Cancel) -> None:
        """Another rank could not prepare: stay where we are."""
        if self.state is SwitchState.PREPARE:
            self.state = advance(advance(self.state, SwitchState.ABORT), SwitchState.IDLE)

    def switch(self, command: Switch) -> None:
        """QUIESCE to RESUME, or back to the old layout.  No step runs meanwhile: this is the pause."""
        self._phases, self._clock = {}, time.perf_counter()
        old, new = self.layouts.current.layout, self.config.layout(command.tp)
        report = dict(rank=self.rank, epoch=command.epoch, tp=command.tp)
        try:
            offers, arrivals, exchange = self._quiesce(old, new, command.epoch)
            moved = self._exchange(old, new, exchange, command.epoch)
        except SwitchAborted as aborted:
            self._abort()
            self.scheduler.channel.send(RankSwitched(**report, phases=self._phases, error=str(aborted)))
            return
        self._commit(new, offers, arrivals, command.epoch)
        self._resume(report, offers, arrivals, moved)

    # -- the states, in order ---------------------------------------------------------------------

    def _quiesce(self, old: ParallelLayout, new: ParallelLayout, epoch: int):
        """Stop at the step boundary, tell everyone what is alive, lay out the new groups.

        Nothing is changed that an aborted switch would miss.
        """
        error, offer, reqs = None, Offer(), ([], [])
        try:
            self._enter(SwitchState.QUIESCE, epoch)
            self.scheduler.drain()
            reqs = self.scheduler.live_requests()
            offer = self._offer(old, new, *reqs)
        except Exception as exc:
            error = exc
        self._vote(error)
        self._mark("drain")
        # Only a leader's offer counts; its followers hold the same requests.
        gathered: list[Offer | None] = [None] * self.config.num_ranks
        dist.all_gather_object(gathered, offer if self.scheduler.is_leader else None, group=self.world)
        offers = {group: gathered[group] for group in old.leaders}
        self._mark("capsules")
        arrivals, exchange = Arrivals(), None
        try:
            plans = self._plans(old, new, offers)
            exchange = self._plan_exchange(old, new, plans, offers, reqs[0])
            arrivals = self._rebuild(new, plans[new.group_of(self.rank)], offers)
        except Exception as exc:
            error = exc
        self._vote(error)
        self._mark("plan")
        return offers, arrivals, exchange

    def _exchange(self, old: ParallelLayout, new: ParallelLayout, exchange: plan.Exchange | None, epoch: int) -> int:
        """Move the live KV, layer by layer; returns the bytes this rank sent to others.

        A rank that fails goes on taking part in the collectives, so that nobody waits for it, and
        says so in the vote.
        """
        error = None
        try:
            self._enter(SwitchState.EXCHANGE, epoch)
        except Exception as exc:
            error = exc
            self.state = SwitchState.EXCHANGE
        moved = 0
        if exchange is not None:
            moved, failed = self._move_kv(old, new, exchange, error)
            error = error or failed
        self._mark("kv")
        if self.layouts.resharding:
            # Has its own collectives and cannot be half done: a failure here ends the engine.
            self.layouts.reshard(old, new)
            self._mark("weights")
        try:
            self._vote(error)
        except SwitchAborted:
            if self.layouts.resharding:
                self.layouts.reshard(new, old)
            raise
        return moved

    def _commit(self, new: ParallelLayout, offers: dict[int, Offer], arrivals: Arrivals, epoch: int) -> None:
        """Become part of the new layout.  There is no way back from here: an error ends the engine."""
        self._enter(SwitchState.COMMIT, epoch)
        sent = {leader: offer.sent for leader, offer in offers.items()}
        fence = fence_after_switch(self.rank, sent, [offer.fence for offer in offers.values()])
        self.scheduler.point_at(self.layouts[new], epoch, fence)
        self.scheduler.adopt(arrivals.decoding, arrivals.waiting, arrivals.num_slots)
        self._mark("install")

    def _resume(self, report: dict, offers: dict[int, Offer], arrivals: Arrivals, moved: int) -> None:
        """Check that nothing was lost, say so, and let the host's loop go on."""
        self._enter(SwitchState.RESUME, report["epoch"])
        self.scheduler.check_conservation()
        versions = {offer.weight_version for offer in offers.values()} | {self.layouts.weight_version}
        if len(versions) > 1:
            raise RuntimeError(f"ranks hold different weight versions after the switch: {sorted(versions)}")
        mine = offers.get(self.rank)
        leads = self.scheduler.is_leader
        self._mark("check")
        self.scheduler.channel.send(
            RankSwitched(
                **report,
                phases=self._phases,
                moved_bytes=moved,
                requests_in=len(mine.capsules) if mine else 0,
                requests_out=len(arrivals.decoding) + len(arrivals.waiting) if leads else 0,
                migrated=len(arrivals.decoding) if leads else 0,
                recomputed=sum(1 for req in arrivals.waiting if req.output_ids) if leads else 0,
                tokens=arrivals.num_slots if leads else 0,
            )
        )
        self.state = advance(self.state, SwitchState.IDLE)

    def _abort(self) -> None:
        """Go on in the old layout.  If KV may have been overwritten, recompute it from the tokens."""
        overwritten = self.state is SwitchState.EXCHANGE
        self.state = advance(self.state, SwitchState.ABORT)
        if overwritten:
            self.scheduler.recompute_all()
        self.state = advance(self.state, SwitchState.IDLE)
        self._mark("abort")

    # -- parts ---------------------------------------------------------------------------------------

    def _offer(self, old: ParallelLayout, new: ParallelLayout, decoding: list[Req], waiting: list[Req]) -> Offer:
        group = old.group_of(self.rank)
        migrate = self.config.kv != "recompute"
        rows = [self.scheduler.kv_row(req).cpu().numpy() if migrate else np.empty(0, np.int64) for req in decoding]
        lengths = [req.kv_committed_len for req in decoding] + [req.seqlen for req in waiting]
        dests = plan.destinations(old, new, group, lengths)
        decoding_dest, waiting_dest = dests[: len(decoding)], dests[len(decoding) :]
        shared = plan.shared_prefixes(rows, decoding_dest, self.layouts.current.kv_pool.size + 1)
        live = [
            plan.LiveRequest(len(row), *pair, dest)
            for row, pair, dest in zip(rows, shared, decoding_dest, strict=True)
        ]
        capsules = []
        if self.scheduler.is_leader:
            capsules = [pickle.dumps(requests.capture(req)) for req in decoding + waiting]
        output = self.scheduler._output
        return Offer(live, waiting_dest, capsules, output.sent, output.fence, self.layouts.weight_version)

    def _plans(self, old: ParallelLayout, new: ParallelLayout, offers: dict[int, Offer]) -> dict[int, plan.GroupPlan]:
        _, members = self.layouts.runner.groups.exchange(old, new)
        groups = {new.group_of(member) for member in members}
        runtime = self.layouts[new]
        max_requests = min(self.scheduler.req_to_token_pool.size, self.scheduler.max_running_requests)
        sources = {group: offer.decoding for group, offer in offers.items()}
        return {g: plan.plan_group(g, sources, max_requests, runtime.allocator.size) for g in groups}

    def _plan_exchange(self, old, new, plans, offers, decoding: list[Req]) -> plan.Exchange | None:
        if not any(p.total for p in plans.values()):
            return None
        _, members = self.layouts.runner.groups.exchange(old, new)
        rows = [self.scheduler.kv_row(req).cpu().numpy() for req in decoding]
        live = offers[old.group_of(self.rank)].decoding
        return plan.build_exchange(old, new, self.layouts.kv_heads, members, self.rank, plans, rows, live)

    def _rebuild(self, new: ParallelLayout, group_plan: plan.GroupPlan, offers: dict[int, Offer]) -> Arrivals:
        """Rebuild the requests that come to this rank's group, decoding ones in plan order."""
        mine, device = new.group_of(self.rank), self.scheduler.device
        arrivals = Arrivals(num_slots=group_plan.total)
        recompute: list[Req] = []
        queued: list[Req] = []
        for group, offer in offers.items():
            decoding, waiting = offer.capsules[: len(offer.decoding)], offer.capsules[len(offer.decoding) :]
            for live, row, capsule in zip(offer.decoding, group_plan.rows[group], decoding, strict=True):
                if live.dest != mine:
                    continue
                req = self._rebuild_one(capsule)
                if row is None:
                    recompute.append(req)
                else:
                    arrivals.decoding.append((req, torch.from_numpy(row).to(device), live.shared))
            for dest, capsule in zip(offer.waiting_dest, waiting, strict=True):
                if dest == mine:
                    queued.append(self._rebuild_one(capsule))
        # Those that were already running go first, as the host does with retracted ones.
        arrivals.waiting = recompute + queued
        return arrivals

    def _rebuild_one(self, capsule: bytes) -> Req:
        req = self.scheduler.rebuild(pickle.loads(capsule))
        req.pat_grammar = requests.finish_grammar(req)
        return req

    def _move_kv(
        self, old: ParallelLayout, new: ParallelLayout, exchange: plan.Exchange, error: Exception | None
    ) -> tuple[int, Exception | None]:
        source, target = self.layouts[old].kv_pool, self.layouts[new].kv_pool
        group, members = self.layouts.runner.groups.exchange(old, new)
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
            try:
                if error is None:
                    kv_kernels.kv_pack(*old_kv, send_slots, *out_plan, staged_out)
            except Exception as exc:
                error = exc
            dist.all_to_all_single(staged_in, staged_out, recv_splits, send_splits, group=group)
            try:
                if error is None:
                    kv_kernels.kv_unpack(*new_kv, recv_slots, *in_plan, staged_in)
            except Exception as exc:
                error = exc
        sent = exchange.elements_sent(dim, members.index(self.rank)) * dtype.itemsize * source.layer_num
        return sent, error

    # -- agreement and book-keeping ---------------------------------------------------------------------

    def _enter(self, state: SwitchState, epoch: int) -> None:
        self.state = advance(self.state, state)
        faults.check(state, self.rank, epoch)

    def _vote(self, error: Exception | None) -> None:
        """All ranks say whether they can go on; raises :class:`SwitchAborted` everywhere if one cannot."""
        fine = torch.tensor([0 if error else 1])
        dist.all_reduce(fine, dist.ReduceOp.MIN, group=self.world)
        if fine.item():
            return
        if error:
            logger.error("switch fails on rank %d", self.rank, exc_info=error)
        reasons: list[str | None] = [None] * self.config.num_ranks
        dist.all_gather_object(reasons, f"rank {self.rank}: {error}" if error else None, group=self.world)
        raise SwitchAborted("; ".join(reason for reason in reasons if reason))

    def _mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._clock
        self._clock = now
