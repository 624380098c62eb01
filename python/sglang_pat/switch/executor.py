"""The switch of one rank, step by step, in these states.

::

    IDLE -> PREPARE -> QUIESCE -> EXCHANGE -> COMMIT -> RESUME -> IDLE
               |          |          |
               +----------+----------+--> ABORT -> IDLE

PREPARE (memory, capsules) leaves decoding alone.  From QUIESCE on no step
runs until RESUME: these are the states a request feels as the pause.  Until COMMIT any
rank's failure aborts the switch on all ranks, which go on in the old layout.  From COMMIT
on there is no way back; a failure then ends the engine.

``Prepare`` and ``Switch`` arrive like any request, broadcast inside each TP group by SGLang, so every rank of a group
handles them at the same iteration boundary.  From there on all N ranks act together: whatever goes wrong on one rank
before COMMIT is put to a vote that all of them hear, and all go back.
"""

from __future__ import annotations

import logging
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.checks import census, faults
from sglang_pat.checks.agreement import check as check_agreement
from sglang_pat.checks.steady import forbid_new_resources
from sglang_pat.host import kv as host_kv
from sglang_pat.host import loop
from sglang_pat.host.requests import count_tokens, get_entry_time, get_name, set_entry_time
from sglang_pat.layout import ParallelLayout, needs_capsules
from sglang_pat.messages import Cancel, Compile, MemoryReleased, Prepare, Prepared, RankSwitched, Switch
from sglang_pat.rank.lent_memory import LentMemory
from sglang_pat.switch import install, kv, plan, requests
from sglang_pat.switch.order import make_fence
from sglang_pat.switch.requests import GroupOffer, IncomingRequests

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32
"""Number of tokens of each made-up request that is moved at start."""


class SwitchState(IntEnum):
    IDLE = 0
    PREPARE = 1
    QUIESCE = 2
    EXCHANGE = 3
    COMMIT = 4
    RESUME = 5
    ABORT = 6


_NEXT: dict[SwitchState, frozenset[SwitchState]] = {
    SwitchState.IDLE: frozenset({SwitchState.PREPARE}),
    SwitchState.PREPARE: frozenset({SwitchState.QUIESCE, SwitchState.ABORT}),
    SwitchState.QUIESCE: frozenset({SwitchState.EXCHANGE, SwitchState.ABORT}),
    SwitchState.EXCHANGE: frozenset({SwitchState.COMMIT, SwitchState.ABORT}),
    SwitchState.COMMIT: frozenset({SwitchState.RESUME}),
    SwitchState.RESUME: frozenset({SwitchState.IDLE}),
    SwitchState.ABORT: frozenset({SwitchState.IDLE}),
}


def advance(current: SwitchState, to: SwitchState) -> SwitchState:
    """The state ``to``, if ``current`` may be followed by it.

    Raises:
        RuntimeError: the transition is not in the life cycle above.
    """
    if to not in _NEXT[current]:
        raise RuntimeError(f"switch cannot go from {current.name} to {to.name}")
    return to


class SwitchAborted(RuntimeError):
    """A switch that a rank failed before COMMIT; the message says which and why."""


class SwitchExecutor:
    """The switches of one rank, which its scheduler owns and calls."""

    def __init__(self, scheduler: SwitchingScheduler) -> None:
        self.scheduler = scheduler
        self.layouts = scheduler.layouts
        self.config = scheduler.adaptive
        self.rank = scheduler.rank
        self.world = scheduler.layouts.groups.world
        self.experts = scheduler.layouts.routed_experts
        self.memory = LentMemory(scheduler)
        self.state = SwitchState.IDLE
        self.staging = kv.Staging(self.layouts.device)
        """Buffers that KV goes through where there are no windows."""
        self._compiling: tuple[int, float] | None = None
        """Epoch of the switch that grammars are compiled for, and when that began, in seconds."""
        self._computing: tuple[Prepared, Any] | None = None
        """Answer to send when this prompt is computed, whose pieces a switch would throw away."""
        self._phases: dict[str, float] = {}
        self._clock = 0.0

    def warm_up(self) -> None:
        """Use once what a switch uses, in each direction; all ranks at start, with empty pools.

        Else communicators, kernels and buffers would be made in the first pauses.
        """
        self.layouts.groups.warm_up(self.layouts.dtype)
        for old in self.config.layouts:
            self.layouts.install(old)
            for new in self.config.layouts:
                if new != old:
                    self._vote(self._exchange_nothing_of_value(old, new))
        self.layouts.install(self.config.base)
        self.staging.release()

    def _exchange_nothing_of_value(self, old: ParallelLayout, new: ParallelLayout) -> Exception | None:
        """Move made-up requests, one from each group to each that it can go to; returns what went wrong."""
        try:
            count = max(1, new.dp // old.dp)
            tokens = min(WARM_UP_TOKENS, self.scheduler.base_capacity // (2 * self.config.num_ranks))
            rows = [np.arange(1 + i * tokens, 1 + (i + 1) * tokens) for i in range(count)]
            offers = {}
            for group in old.leaders:
                dests = plan.choose_destinations(old, new, group, [tokens] * count)
                offers[group] = GroupOffer([plan.LiveRequest(tokens, 0, -1, dest) for dest in dests])
            plans = requests.plan_groups(self.scheduler, new, offers)
            live = offers[old.group_of(self.rank)].live
            exchange = kv.prepare(self.layouts, self.staging, new, plans, live, rows)
        except Exception as error:
            return error
        return exchange.run() if exchange is not None else None

    # -- handlers of the coordinator's commands -----------------------------------------------------

    def prepare(self, command: Prepare) -> None:
        """PREPARE: do what can be done before the pause.  Decoding goes on after this call."""
        started = time.perf_counter()
        error, grammars = "", []
        try:
            self._enter(SwitchState.PREPARE, command.epoch)
            with forbid_new_resources():
                new = self.config.layout(command.tp, command.stride)
                if self.rank not in new.lent:
                    self.memory.resume()
                self.layouts.prepare(new)
                tokens = requests.count_tokens_to_move(self.scheduler, command.recompute_below)
                kv.reserve(self.layouts, self.staging, new, tokens)
                grammars = requests.seal_requests(self.scheduler, new)
        except Exception as exc:
            logger.exception("preparing switch %d failed", command.epoch)
            error = f"rank {self.rank}: {exc}"
        prompt = None if error or requests.can_keep_pieces(self.scheduler) else loop.get_chunked(self.scheduler)
        self._computing = self._make_prepared_reply(command.epoch, started, error=error, grammars=grammars), prompt
        self.poll_command()

    def compile(self, command: Compile) -> None:
        """PREPARE, second part: compile grammars of requests that other groups will hand over, in threads of SGLang."""
        self._compiling = command.epoch, time.perf_counter()
        self.scheduler.grammars.compile(command.grammars)
        if loop.is_idle(self.scheduler):
            self.scheduler.grammars.wait()  # its loop sleeps

    def poll_command(self) -> None:
        """Look, in every iteration, whether what a command has begun is done."""
        scheduler = self.scheduler
        if self._compiling is not None and not scheduler.grammars.busy:
            (epoch, started), self._compiling = self._compiling, None
            scheduler.channel.send(self._make_prepared_reply(epoch, started))
        message, prompt = self._computing or (None, None)
        if message and (prompt is None or prompt is not loop.get_chunked(scheduler) or loop.is_paused(scheduler)):
            self._computing = None
            scheduler.channel.send(message)

    def _make_prepared_reply(self, epoch: int, started: float, **more: Any) -> Prepared:
        return Prepared(rank=self.rank, epoch=epoch, seconds=time.perf_counter() - started, **more)

    def cancel(self, command: Cancel) -> None:
        """Stay in the old layout, as another rank could not prepare."""
        self._computing = None
        self.scheduler.grammars.clear()
        self.staging.release()
        self._stay_lent()
        if self.state is SwitchState.PREPARE:
            self.state = advance(advance(self.state, SwitchState.ABORT), SwitchState.IDLE)

    def switch(self, command: Switch) -> None:
        """Run QUIESCE to RESUME, or go back to the old layout.  No step runs meanwhile: this is the pause."""
        self._phases, self._clock = {}, time.perf_counter()
        old, new = self.layouts.layout, self.config.layout(command.tp, command.stride)
        report = dict(rank=self.rank, epoch=command.epoch)
        with forbid_new_resources():
            try:
                offers, incoming, exchange = self._quiesce(old, new, command)
                self._exchange(old, new, exchange, command.epoch)
            except SwitchAborted as aborted:
                self._abort()
                self.scheduler.channel.send(RankSwitched(**report, phases=self._phases, error=str(aborted)))
                return
            self._commit(new, offers, incoming, command.epoch)
        self._resume(report, offers, incoming, exchange.bytes_sent if exchange else 0)
        self.staging.release()
        if self.rank in new.lent and self.rank not in old.lent:
            self._give_memory_away(command.epoch)

    # -- the states, in order ---------------------------------------------------------------------

    def _quiesce(self, old: ParallelLayout, new: ParallelLayout, command: Switch):
        """Stop at the step boundary, tell everyone what is alive, lay out the new groups.

        Nothing is changed that an aborted switch would miss.
        """
        error, offer, held, rows, capsules = None, GroupOffer(), [], [], {}
        try:
            self._enter(SwitchState.QUIESCE, command.epoch)
            loop.drain(self.scheduler)
            self._mark("drain")
            has_kv, waiting, rows = requests.split_by_kv(self.scheduler)
            held = has_kv + waiting
            offer, capsules = requests.make_offer(self.scheduler, new, has_kv, waiting, rows, command.recompute_below)
            offer.taken, offer.acceptance = loop.read_counters(self.scheduler), self.scheduler.speculation.acceptance
            if self.experts is not None and self.scheduler.is_leader:
                self.experts.publish(offer.live, rows)
            self._mark("capsules")
        except Exception as exc:
            error = exc
        self._vote(error)
        self._mark("drain")  # of the others: their last step, and their offers where they come later
        # Only a leader's offer counts; its followers hold the same requests.
        gathered: list[Any] = [None] * self.config.num_ranks
        dist.all_gather_object(gathered, offer if self.scheduler.is_leader else None, group=self.world)
        offers: dict[int, GroupOffer] = {group: gathered[group] for group in old.leaders}
        if needs_capsules(old, new):
            capsules = requests.send_capsules(self.scheduler, new, offers, capsules)
        self._mark("capsules")
        incoming, exchange = IncomingRequests(), None
        try:
            plans = requests.plan_groups(self.scheduler, new, offers)
            live = offers[old.group_of(self.rank)].live
            exchange = kv.prepare(self.layouts, self.staging, new, plans, live, rows)
            place = exchange.place if exchange else np.zeros(1, dtype=np.int64)
            incoming = requests.rebuild_requests(
                self.scheduler, new, plans[new.group_of(self.rank)], offers, capsules, held, place
            )
            if self.experts is not None and self.rank in new.leaders:
                self.experts.plan_copy({group: offer.live for group, offer in offers.items()}, plans[self.rank], place)
        except Exception as exc:
            error = exc
        self._vote(error)
        self._mark("plan")
        return offers, incoming, exchange

    def _exchange(self, old: ParallelLayout, new: ParallelLayout, exchange: kv.KvExchange | None, epoch: int) -> None:
        """Move the live KV, layer by layer.

        A rank that fails takes part in the collectives all the same, so that nobody waits for it, and votes so.
        """
        error = None
        try:
            self._enter(SwitchState.EXCHANGE, epoch)
        except Exception as exc:
            error = exc
            self.state = SwitchState.EXCHANGE
        if exchange is not None:
            error = exchange.run(error)
        self._mark("kv")
        resharding = self.layouts.resharding and old.tp != new.tp
        if resharding:
            # Has its own collectives and cannot be half done: a failure here ends the engine.
            self.layouts.reshard(old, new)
            self._mark("weights")
        try:
            self._vote(error)
        except SwitchAborted:
            if resharding:
                self.layouts.reshard(new, old)
            raise
        self._mark("weights" if resharding else "kv")  # of the others, where they are done later

    def _commit(
        self, new: ParallelLayout, offers: dict[int, GroupOffer], incoming: IncomingRequests, epoch: int
    ) -> None:
        """Become part of the new layout.  There is no way back from here: an error ends the engine."""
        self._enter(SwitchState.COMMIT, epoch)
        sent = {leader: offer.sent for leader, offer in offers.items()}
        fence = make_fence(self.rank, sent, [offer.fence for offer in offers.values()])
        leader = self.layouts.layout.group_of(new.group_of(self.rank))  # of the group that the new one's comes from
        self.scheduler.enter_layout(new, epoch, fence)
        loop.write_counters(self.scheduler, offers[leader].taken)
        decoding = [req for req, _, _ in incoming.decoding]
        acceptance = offers[leader].acceptance
        assert acceptance is not None, "a leader's offer has it"
        self.scheduler.speculation.enter_group(decoding, incoming.learnt, acceptance)
        if self.experts is not None:
            self.experts.turn(leads=self.rank in new.leaders)
        for req in decoding + incoming.waiting:
            set_entry_time(req, incoming.entered.get(get_name(req), get_entry_time(req)))
        install.install_requests(self.scheduler, incoming)
        self._mark("install")

    def _resume(self, report: dict, offers: dict[int, GroupOffer], incoming: IncomingRequests, moved: int) -> None:
        """Check that nothing was lost, say so, and let SGLang's loop go on."""
        self._enter(SwitchState.RESUME, report["epoch"])
        host_kv.check_sums(self.scheduler)
        check_agreement(self.scheduler)
        census.record(self.scheduler, self.rank, report["epoch"])
        versions = {offer.weight_version for offer in offers.values()} | {self.layouts.weight_version}
        if len(versions) > 1:
            raise RuntimeError(f"ranks hold different weight versions after the switch: {sorted(versions)}")
        own_offer = offers.get(self.rank)
        leads, recomputed = self.scheduler.is_leader, incoming.recomputed
        self._mark("check")
        self.scheduler.channel.send(
            RankSwitched(
                **report,
                phases=self._phases,
                moved_bytes=moved,
                requests_in=len(own_offer.live) + len(own_offer.waiting) if own_offer else 0,
                requests_out=len(incoming.decoding) + len(incoming.waiting) if leads else 0,
                migrated=len(incoming.decoding) if leads else 0,
                parked=len(incoming.parked) if leads else 0,
                recomputed=len(recomputed) if leads else 0,
                recomputed_tokens=sum(map(count_tokens, recomputed)) if leads else 0,
                tokens=incoming.num_slots if leads else 0,
            )
        )
        self.state = advance(self.state, SwitchState.IDLE)

    def _give_memory_away(self, epoch: int) -> None:
        """Give this lent rank's memory away, while the others decode."""
        released_bytes, error = 0, ""
        try:
            released_bytes = self.memory.release()
        except Exception as exc:
            logger.exception("rank %d keeps its memory", self.rank)
            error = f"rank {self.rank} keeps its memory: {exc}"
        self.scheduler.channel.send(MemoryReleased(rank=self.rank, epoch=epoch, bytes=released_bytes, error=error))

    def _stay_lent(self) -> None:
        """Release the memory again if this rank stays lent, as the switch that took it back does not happen."""
        if self.rank in self.layouts.layout.lent:
            self.memory.release()

    def _abort(self) -> None:
        """Go on in the old layout.  If KV may have been overwritten, recompute it from the tokens."""
        self.scheduler.grammars.clear()
        self.staging.release()
        self._stay_lent()
        overwritten = self.state is SwitchState.EXCHANGE
        self.state = advance(self.state, SwitchState.ABORT)
        # A client's pause: nobody goes on with a prompt in parts, and a second pause ("retract") would drop it.
        in_parts = loop.is_paused(self.scheduler) and loop.get_chunked(self.scheduler) is not None
        if overwritten or in_parts:
            requests.recompute_all(self.scheduler)
        self.state = advance(self.state, SwitchState.IDLE)
        self._mark("abort")

    # -- agreement and book-keeping ---------------------------------------------------------------------

    def _enter(self, state: SwitchState, epoch: int) -> None:
        self.state = advance(self.state, state)
        faults.check(state.name, self.rank, epoch)

    def _vote(self, error: Exception | None) -> None:
        """Have all ranks say whether they can go on; raises :class:`SwitchAborted` everywhere if one cannot."""
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
