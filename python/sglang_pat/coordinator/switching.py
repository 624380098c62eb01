"""Switches as the coordinator sees them (:class:`Switching`): who wants one, its commands, and how it ended.

A switch is prepared while decoding goes on; then grammars are compiled, if need be; then it is commanded, or cancelled.
What the ranks do meanwhile is in ``switch/executor.py``.  There is at most one at a time, and a switch and a control
request never overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.decisions import CALIBRATION, Decisions, WantedSwitch
from sglang_pat.coordinator.leases import Lease, Leases
from sglang_pat.coordinator.replicas import Leader, Outbox, forecast_switch, is_report_of, sum_load
from sglang_pat.coordinator.schedule import Schedule
from sglang_pat.figures import Account
from sglang_pat.layout import ParallelLayout, list_destinations
from sglang_pat.policies.lending import LendingDecision, Move
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.profile import ProfileError

BASE_ATTEMPTS = 3
"""Attempts to get back to the base layout for a control request before it is answered with the error; after the first
one no KV moves, for which there may be no memory."""

RETRY_SECONDS = 60.0
"""Seconds between two attempts to take ranks back whose lease is over: a trainer may still have their memory.  An
attempt that finds none stops nobody."""


@dataclass(frozen=True)
class Traffic:
    """What the engine has to do beside a switch.

    Attributes:
        in_engine: requests at the leaders of the layout in force; ``held``: those that wait in the coordinator.
        controls: control requests that are not answered yet.
        paused: whether a client has paused generation.
        released: memory that was given away, by SGLang's tags.
    """

    in_engine: int
    held: int
    controls: int
    paused: bool
    released: frozenset[str]


@dataclass
class ActiveSwitch:
    """A switch under way.

    Attributes:
        target: what it leads to; perhaps only on the way to what is wanted.
        commanded: decoding may have stopped already: what arrives waits.
        compiling: the current command is the second part of the preparation.
        prepared: answers to PREPARE, or to its second part, by rank.
        reports: accounts of the ranks that have switched.
        early: load reports of ranks that already work in the new layout while others still switch.
    """

    wanted: WantedSwitch
    source: ParallelLayout
    target: ParallelLayout
    epoch: int
    started: float
    commanded: bool = False
    compiling: bool = False
    prepare_seconds: float = 0.0
    prepared: dict[int, m.Prepared] = field(default_factory=dict)
    reports: dict[int, m.RankSwitched] = field(default_factory=dict)
    early: dict[int, m.LoadReport] = field(default_factory=dict)


class Switching:
    """The layout in force, and the switch to another one.

    Life cycle of a switch: it is :attr:`wanted`; :meth:`advance` begins it, and commands it when all ranks are
    prepared; :meth:`handle_answer` takes the answers of the ranks.

    Args:
        leaders: the coordinator's, by rank.
        account: what ended is added to.
        costs: costs of switches, by the profile.

    Attributes:
        layout: in force.
        wanted: the switch that is to begin as soon as nothing stands in its way; None if there is none.
        under_way: the one that has begun.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        leaders: Mapping[int, Leader],
        outbox: Outbox,
        decisions: Decisions,
        schedule: Schedule,
        account: Account,
        costs: SwitchCosts | None = None,
    ) -> None:
        self.layout = config.base
        self.wanted: WantedSwitch | None = None
        self.under_way: ActiveSwitch | None = None
        self._config, self._leaders, self._outbox = config, leaders, outbox
        self._decisions, self._schedule, self._account = decisions, schedule, account
        self._costs = costs
        self._epoch = self._base_attempts = 0
        self._given: dict[int, m.MemoryReleased] = {}
        """Last message of each rank about its memory."""
        self._lending: tuple[int, m.SwitchRecord, set[int]] | None = None
        """The query that has lent ranks and is answered when they have given their memory away: its number, the record
        of its switch, and these ranks."""
        self._lease: Lease | None = None
        """Lease of the client that was lent ranks last; None: nobody has one, as where a schedule lends."""
        self._last_attempt = float("-inf")
        """Time of the last attempt to take back ranks without a lease."""

    @property
    def at_base(self) -> bool:
        """Whether the base layout is in force, and stays so."""
        return self.under_way is None and self.wanted is None and self.layout == self._config.base

    @property
    def lends(self) -> bool:
        """Whether ranks are lent, and stay so."""
        return self.under_way is None and self.layout.stride > 1

    @property
    def holds_requests(self) -> bool:
        """Whether what comes in has to wait: decoding may have stopped, or the switch is to come ahead of it."""
        switch = self.under_way.wanted if self.under_way else self.wanted
        return self._commanded or (switch is not None and switch.ahead)

    @property
    def _commanded(self) -> bool:
        return self.under_way is not None and self.under_way.commanded

    # -- who wants a switch -------------------------------------------------------------------------

    def want_base(self) -> None:
        """Want the base layout, which a control request needs."""
        if self.under_way is None and (self.wanted is None or self.wanted.query_id is None):
            again = m.NO_KV if self._base_attempts else 0
            self.wanted = WantedSwitch(self._config.base, "control", recompute_below=again)

    def reconfigure(self, query: m.Reconfigure, released: frozenset[str]) -> None:
        """Handle ``POST /pat/reconfigure``: answered when the switch is over, or at once with what it would do."""
        try:
            target = self._config.layout(query.tp, self.layout.stride)
        except ValueError as error:
            return self._reply(query.query_id, 400, str(error))
        if query.dry_run:
            expected = forecast_switch(self._leaders, self.layout, target, self._config.max_running)
            return self._reply(query.query_id, 200, "", expected | self._predict_seconds(target))
        if self.under_way or self.wanted:
            return self._reply(query.query_id, 409, "a switch is under way; try again when it is over")
        if target == self.layout:
            return self._reply(query.query_id, 200, f"already in {target}")
        if released:
            what = ", ".join(sorted(released))
            return self._reply(query.query_id, 409, f"memory is released ({what}); resume it first")
        self.wanted = WantedSwitch(target, CALIBRATION if self._decisions.calibrating else "request", query.query_id)

    def _predict_seconds(self, target: ParallelLayout) -> dict[str, Any]:
        """Predicted seconds in which a switch would let nothing be decoded, or why that is not known."""
        if self._costs is None:
            return {"expected_seconds": None, "why": "without a profile (--pat-profile) times cannot be predicted"}
        load = sum_load(self._leaders, self.layout.working)
        try:
            cost = self._costs.estimate(self.layout.tp, target.tp, load.prompt + load.output)
        except ProfileError as error:
            return {"expected_seconds": None, "why": str(error)}
        return {"expected_seconds": cost.seconds}

    def lend_ranks(self, query: m.LendRanks, released: frozenset[str], now: float) -> None:
        """Handle ``POST /pat/lend_ranks`` and ``/pat/take_back_ranks``: answered when the switch is over, or at
        once."""
        self._leases.hear(query.client, now)
        try:
            if query.stride != 1:
                self._config.check_stride(query.stride)
        except ValueError as error:
            return self._reply(query.query_id, 400, str(error))
        if self.under_way or self.wanted or self._decisions.calibrating:
            return self._reply(query.query_id, 409, "a switch is under way; try again when it is over")
        holder = self._lease if self.lends else None
        if query.stride > 1 and holder is not None and holder.client != query.client and not holder.is_over(now):
            return self._reply(query.query_id, 409, f"ranks are lent to {holder.client}; take them back first")
        if query.stride != self.layout.stride and released:
            what = ", ".join(sorted(released))
            return self._reply(query.query_id, 409, f"memory is released ({what}); resume it first")
        if query.stride > 1:
            self._end_lease()
            self._lease = self._leases.begin(query.client, query.lease_seconds, now)
        if query.stride == self.layout.stride:
            return self._reply(query.query_id, 200, f"already in {self.layout}")
        reason = "lend" if query.stride > self.layout.stride else "take back"
        self.wanted = WantedSwitch(self._choose_lent(query.stride), reason, query.query_id)

    def decide_lending(self, query: m.LendingQuery, requests: int, now: float) -> None:
        """Handle ``POST /pat/lending``: answered at once.

        Args:
            requests: in the engine and in the backlog.
        """
        self._leases.hear(query.client, now)
        if self.under_way or self.wanted or not all(self._leaders[rank].known for rank in self.layout.working):
            decision = LendingDecision(move=Move.WAIT, why="a switch is under way", tp=self.layout.tp)
        else:
            decision = self._decisions.decide_lending(self.layout, requests, query.training, now)
        self._reply(query.query_id, 200, "", asdict(decision))

    def describe_lease(self, now: float) -> dict[str, Any] | None:
        """The lease of the ranks that are lent now, for ``/pat/status``."""
        if self._lease is None or self.layout.stride == 1:
            return None
        left = self._lease.get_seconds_left(now)
        return {"client": self._lease.client, "seconds": self._lease.seconds, "left": left}

    @property
    def _leases(self) -> Leases:
        return self._decisions.round.leases

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._leases.end(self._lease)
            self._lease = None

    def _take_back_from_silent(self, traffic: Traffic, now: float) -> None:
        """Want ranks back whose lease is over, if there is work: it is of others, as that of whoever holds the lease
        would have renewed it."""
        if self._lease is None or not (self.lends and self._lease.is_over(now)) or self.wanted:
            return
        works = traffic.in_engine or traffic.held or self._decisions.round.open
        if works and not (traffic.paused or traffic.released) and now >= self._last_attempt + RETRY_SECONDS:
            self._last_attempt = now
            self.wanted = WantedSwitch(self._choose_lent(1), "lease over")

    def _choose_lent(self, stride: int) -> ParallelLayout:
        """The layout with this stride, of the degree in force, or the highest one for which enough ranks are left."""
        tp = max(degree for degree in self._config.list_degrees(stride) if degree <= self.layout.tp)
        return self._config.layout(tp, stride)

    def decide(self, traffic: Traffic, now: float, ahead: bool = False) -> None:
        """Ask the policy, if a switch may start now and the policy is due."""
        # While nothing decodes a switch gains nothing, and without its memory a rank cannot.
        if traffic.paused or traffic.released or self.under_way or self.wanted or traffic.controls:
            return
        if self._decisions.is_due(now) and all(self._leaders[rank].known for rank in self.layout.leaders):
            self.wanted = self._decisions.decide(self.layout, traffic.in_engine, traffic.held, now, ahead)

    def _follow_schedule(self, traffic: Traffic) -> None:
        """Want what the schedule wants now."""
        while not (self.under_way or self.wanted or traffic.paused or traffic.released):
            entry = self._schedule.advance(self.layout)
            if entry is None:
                return
            if entry.stride not in (None, self.layout.stride):
                self.wanted = WantedSwitch(self._choose_lent(entry.stride), "schedule")
            elif entry.tp not in (None, self.layout.tp):
                stays = self.layout.stride if entry.tp in self._config.list_degrees(self.layout.stride) else 1
                self.wanted = WantedSwitch(self._config.layout(entry.tp, stays), "schedule")
            else:
                self._schedule.complete_entry(None)

    # -- its commands -------------------------------------------------------------------------------

    def advance(self, traffic: Traffic, now: float) -> None:
        """See whether a switch is due, begin the one that is wanted, or command the one that is prepared."""
        self._take_back_from_silent(traffic, now)
        self.decide(traffic, now)
        if self._schedule.active:
            self._follow_schedule(traffic)
        if self.under_way is None and self.wanted is not None:
            switch, self.wanted = self.wanted, None
            if switch.target != self.layout:
                self._prepare(switch, now)
        elif self._prepared and not traffic.controls:  # the last reply of a control request brings us back here
            self._command()

    def _prepare(self, switch: WantedSwitch, now: float) -> None:
        self._epoch += 1
        target = self._choose_step(switch.target)
        self.under_way = ActiveSwitch(switch, self.layout, target, self._epoch, now)
        self._send(self._make_command(m.Prepare))

    def _choose_step(self, goal: ParallelLayout) -> ParallelLayout:
        """What the next switch on the way to ``goal`` leads to: it changes the degree, or the stride."""
        here = self.layout
        if here.tp == goal.tp or here.stride == goal.stride:
            return goal
        return here.with_stride(goal.stride) if goal.stride < here.stride else here.with_tp(goal.tp)

    def _make_command(self, kind: type[m.Prepare | m.Switch]) -> m.Prepare | m.Switch:
        switch, target = self._switch, self._switch.target
        below = switch.wanted.recompute_below
        return kind(epoch=switch.epoch, tp=target.tp, stride=target.stride, recompute_below=below)

    @property
    def _prepared(self) -> bool:
        """Whether all ranks are prepared, and the switch is not commanded yet."""
        switch = self.under_way
        return switch is not None and not switch.commanded and len(switch.prepared) == self._config.num_ranks

    def _command(self) -> None:
        self._switch.commanded = True
        self._send(self._make_command(m.Switch))

    def _send(self, command: m.Prepare | m.Switch | m.Cancel) -> None:
        for rank in self._switch.source.leaders:
            self._outbox.send_to_leader(rank, command)

    @property
    def _switch(self) -> ActiveSwitch:
        assert self.under_way is not None, "no switch is under way"
        return self.under_way

    # -- what the ranks answer ------------------------------------------------------------------------

    def keep_early_report(self, report: m.LoadReport) -> None:
        """Keep the report of a rank that is ahead of others.  Ranks report on a change only: dropped, this one might
        not come again."""
        if self._commanded and is_report_of(report, self._switch.target):
            self._switch.early[report.rank] = report

    def handle_answer(self, message: m.Prepared | m.RankSwitched, now: float) -> str:
        """Handle the answer of a rank; returns why the engine gave up to get to the base layout, "" if it did not.

        Raises:
            RuntimeError: the ranks disagree about the end, or lost requests.
        """
        switch = self.under_way
        if switch is None or message.epoch != switch.epoch:
            return ""
        if isinstance(message, m.RankSwitched):
            switch.reports[message.rank] = message
            return self._all_switched(now) if len(switch.reports) == self._config.num_ranks else ""
        switch.prepared[message.rank] = message
        return self._all_prepared(now) if len(switch.prepared) == self._config.num_ranks else ""

    def _all_prepared(self, now: float) -> str:
        switch = self._switch
        switch.prepare_seconds += max(reply.seconds for reply in switch.prepared.values())
        errors = [reply.error for reply in switch.prepared.values() if reply.error]
        if errors:
            self._send(m.Cancel(epoch=switch.epoch))
            return self._end(now, "; ".join(errors))
        if not switch.compiling and any(reply.grammars for reply in switch.prepared.values()):
            self._compile()
        return ""

    def _compile(self) -> None:
        """Have each rank compile the grammars of those groups that it joins."""
        switch = self._switch
        named = {rank: switch.prepared[rank].grammars for rank in switch.source.leaders}
        switch.compiling, switch.prepared = True, {}
        for rank in switch.source.leaders:
            counts: Counter[tuple[str, str]] = Counter()
            for other, grammars in named.items():
                dests = list_destinations(switch.source, switch.target, other)
                if other != rank and switch.target.group_of(rank) in dests:
                    counts.update({(grammar.kind, grammar.text): grammar.count for grammar in grammars})
            jobs = [m.Grammar(kind=kind, text=text, count=count) for (kind, text), count in counts.items()]
            self._outbox.send_to_leader(rank, m.Compile(epoch=switch.epoch, grammars=jobs))

    def _all_switched(self, now: float) -> str:
        switch, replies = self._switch, list(self._switch.reports.values())
        errors = {reply.error for reply in replies}
        if len(errors) > 1:
            raise RuntimeError(f"ranks disagree about switch {switch.epoch}: {sorted(errors)}")
        error = errors.pop()
        came = sum(reply.requests_in for reply in replies)
        went = sum(reply.requests_out for reply in replies)
        if not error and came != went:
            raise RuntimeError(f"requests were lost in switch {switch.epoch}: {came} in, {went} out")
        phases = {"prepare": switch.prepare_seconds}
        for reply in replies:
            for name, seconds in reply.phases.items():
                phases[name] = max(phases.get(name, 0.0), seconds)
        pause = max(sum(reply.phases.values()) for reply in replies)
        counts = ("migrated", "parked", "recomputed", "recomputed_tokens", "tokens", "moved_bytes")
        totals = {name: sum(getattr(reply, name) for reply in replies) for name in counts}
        return self._end(now, error, pause_seconds=pause, phases=phases, requests=went, **totals)

    # -- how it ended ---------------------------------------------------------------------------------

    def _end(self, now: float, error: str, **totals: Any) -> str:
        switch, self.under_way = self._switch, None
        record = m.SwitchRecord(
            epoch=switch.epoch,
            from_tp=switch.source.tp,
            to_tp=switch.target.tp,
            reason=switch.wanted.reason,
            started=switch.started,
            lent=switch.target.lent,
            error=error,
            **totals,
        )
        self._outbox.record_switch(record)
        if record.reason != CALIBRATION:
            self._account.record_switch(record)
        self._decisions.record_switch(now, aborted=bool(error))
        self._base_attempts = self._base_attempts + (record.reason == "control") if error else 0
        gave_up = self._base_attempts == BASE_ATTEMPTS
        if gave_up:
            self._base_attempts = 0
        if not error:
            self._enter_layout(switch)
            self._schedule.record_switch(switch.source, switch.target)
        if not error and self.layout != switch.wanted.target:
            if switch.wanted.query_id is not None:  # a control request and a schedule want it again
                self.wanted = switch.wanted
            return ""  # the first of two steps
        if self.layout.stride == 1:
            self._end_lease()
        if record.reason == "schedule":
            self._schedule.complete_entry(record)
        query_id, newly_lent = switch.wanted.query_id, set(switch.target.lent) - set(switch.source.lent)
        if query_id is not None and newly_lent and not error:
            self._lending = query_id, record, newly_lent
            self._answer_when_given()
        elif query_id is not None:
            self._reply(query_id, 500 if error else 200, error, msgspec.to_builtins(record))
        return error if gave_up else ""

    def record_release(self, message: m.MemoryReleased) -> None:
        """Note that a rank that was lent has given its memory away, or could not."""
        self._given[message.rank] = message
        self._answer_when_given()

    def _answer_when_given(self) -> None:
        """Answer whoever has lent ranks, as soon as their memory is free."""
        if self._lending is None:
            return
        query_id, record, ranks = self._lending
        messages = [message for rank in ranks if (message := self._given.get(rank)) and message.epoch == record.epoch]
        if len(messages) < len(ranks):
            return
        self._lending = None
        error = "; ".join(message.error for message in messages if message.error)
        answer = msgspec.to_builtins(record) | {"released_bytes": sum(message.bytes for message in messages)}
        self._reply(query_id, 500 if error else 200, error and f"ranks are lent, but {error}", answer)

    def _enter_layout(self, switch: ActiveSwitch) -> None:
        """Set the new leaders' load: what they have reported already, or else what they were handed."""
        self.layout = switch.target
        for rank in self.layout.leaders:
            leader, reply = self._leaders[rank], switch.reports[rank]
            leader.apply_report(switch.early.get(rank) or leader.make_report_after_switch(reply, self.layout))

    def _reply(self, query_id: int, code: int, message: str, record: dict[str, Any] | None = None) -> None:
        self._outbox.send_to_server(m.Reply(query_id=query_id, code=code, message=message, answer=record))
