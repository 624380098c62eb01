"""The coordinator as a state machine.

It stands between the server and the ranks: requests go to one leader (``places.py``), control requests to all and their
replies are merged, and switches are decided on (``deciding.py``), commanded and accounted for.  It owns no socket
and no clock: every event is a method call with the time, every effect goes through the :class:`Outbox`.

A switch and a control request never overlap.  What arrives while ranks are switching waits in ``_backlog``, in order,
and goes to the new leaders.

One file because it is one state machine: what may happen next depends on all of its state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from typing import Any

import msgspec

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.deciding import Deciding
from sglang_pat.coordinator.follower import Follower
from sglang_pat.coordinator.forecast import forecast
from sglang_pat.coordinator.leader import Generation, Leader
from sglang_pat.coordinator.outbox import Outbox
from sglang_pat.coordinator.places import Places
from sglang_pat.coordinator.replies import Control, Replies
from sglang_pat.coordinator.switching import CALIBRATION, Ended, Switching, Wanted
from sglang_pat.coordinator.traces import Traces
from sglang_pat.figures import Account
from sglang_pat.policies.snapshot import Policy
from sglang_pat.predict.predictor import Predictor

BASE_ATTEMPTS = 3
"""Attempts to get back to the base layout for a control request before it is answered with the error; after the first
one no KV moves, for which there may be no memory."""


class Coordinator:
    """Life cycle: in the base layout with no load; then one event after another, forever.

    Args:
        policy: what ``config.policy`` names; made here if it needs no profile.
        predictor: of the profile that it has, to be corrected by the steps of this run.
    """

    def __init__(
        self, config: AdaptiveConfig, outbox: Outbox, policy: Policy | None = None, predictor: Predictor | None = None
    ) -> None:
        self.config = config
        self.layout = config.base
        self._outbox = outbox
        self._leaders, self._places = {rank: Leader() for rank in config.base.leaders}, Places()
        self._deciding = Deciding(config, self._leaders, outbox, policy, predictor)
        self.history = self._deciding.history
        self._backlog: deque[Generation | Control | m.SetSchedule] = deque()
        self._held_requests = self._in_engine = 0
        """Requests in the backlog; at the leaders of the layout in force."""
        self._replies = Replies()
        self._switching = Switching(config.num_ranks, outbox)
        self._wanted: Wanted | None = None
        self._traces = Traces(config.num_ranks, outbox)
        self.account = Account([layout.tp for layout in config.layouts])
        self._retracted = self._base_attempts = 0
        self._paused = False
        self._released: frozenset[str] = frozenset()
        self._follower = Follower(self._leaders, config.base, outbox, active=config.policy == "schedule")

    # -- events from the server -----------------------------------------------------------------

    def receive(self, event: Generation | Control | m.SetSchedule, now: float) -> None:
        """A request from the TokenizerManager, or a schedule, which holds for those that come after it."""
        self._backlog.append(event)
        self._held_requests += isinstance(event, Generation)
        self._proceed(now)

    def reconfigure(self, query: m.Reconfigure, now: float) -> None:
        """``POST /pat/reconfigure``: answered when the switch is over, or at once with what it would do."""
        try:
            target = self.config.layout(query.tp)
        except ValueError as error:
            return self._answer(query.query_id, 400, str(error))
        if query.dry_run:
            expected = forecast(self._leaders, self.layout, target, self.config.max_running)
            return self._answer(query.query_id, 200, "", expected)
        if self._switching.under_way or self._wanted:
            return self._answer(query.query_id, 409, "a switch is under way; try again when it is over")
        if target == self.layout:
            return self._answer(query.query_id, 200, f"already in {target}")
        if self._released:
            what = ", ".join(sorted(self._released))
            return self._answer(query.query_id, 409, f"memory is released ({what}); resume it first")
        self._wanted = Wanted(target, CALIBRATION if self._deciding.calibrating else "request", query.query_id)
        self._proceed(now)

    def round(self, message: m.BeginRound | m.EndRound, now: float) -> None:
        """A client's round begins or ends."""
        self._deciding.round.told(message, now)
        self._proceed(now)

    def calibrate(self, turn: m.CalibrationTurn, now: float) -> None:
        """Before the first request of an engine whose policy predicts."""
        self._deciding.calibrate(turn, now)

    def schedule(self, query: m.ScheduleQuery) -> None:
        """``GET /pat/schedule``."""
        self._follower.ask(query)

    def status(self, query: m.StatusQuery) -> None:
        """``GET /pat/status``."""
        leaders = {rank: self._leaders[rank] for rank in self.layout.leaders}
        groups = [{"leader": r, "ranks": self.layout.group(r), **leader.status()} for r, leader in leaders.items()]
        status = {
            "layout": asdict(self.layout),
            "base": asdict(self.config.base),
            "candidates": [asdict(layout) for layout in self.config.layouts],
            "policy": self.config.policy,
            "switching": self._switching.under_way is not None,
            "target": asdict(self._switching.under_way.target) if self._switching.under_way else None,
            "requests": self._in_engine + self._held_requests,
            "expected_seconds": self._deciding.expected_seconds if self._in_engine else 0.0,
            "rounds": self._deciding.round.status(),
            "controls": len(self._replies),
            "groups": groups,
            "step_factors": self._deciding.factors.factors() if self._deciding.factors else {},
            "retracted": self._retracted,
        }
        self._outbox.to_server(m.StatusReply(query_id=query.query_id, status=status | self.account.status()))

    def trace(self, query: m.TraceQuery, now: float) -> None:
        """``Engine.trace()``: every rank is asked, as any may have led until the last switch."""
        self._traces.asked(query.query_id)
        self.receive(Control(obj=query), now)

    # -- events from the ranks --------------------------------------------------------------------

    def reply(self, rank: int, obj: Any, now: float) -> None:
        """An object of SGLang's from leader ``rank``: a control reply, or something for the server as it is."""
        merged = self._replies.take(rank, obj)
        if merged is None:
            return self._outbox.to_server(obj)
        for control, reply in merged:
            self._released ^= control.changes if control.failed(reply) else frozenset()
            self._outbox.to_server(reply)
            # Weights or memory: whoever trains has its batch.
            if control.needs_base and (step := self.account.step()) is not None:
                self._outbox.stepped(step)
        self._proceed(now)

    def rank_message(self, message: m.FromRank, now: float) -> None:
        """One of our own messages from a rank."""
        if isinstance(message, m.LoadReport):
            self._load_report(message, now)
        elif isinstance(message, m.RankTrace):
            self._traces.heard(message)
        elif isinstance(message, m.Held):
            self._follower.schedule.held(message)
        elif (ended := self._switching.heard(message)) is not None:
            self._ended(ended, now)
        self._proceed(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._proceed(now)

    # -- load ---------------------------------------------------------------------------------------

    def _load_report(self, report: m.LoadReport, now: float) -> None:
        self._retracted += report.retracted
        self._deciding.round.retracted += 0 if self._deciding.calibrating else report.retracted
        for response in () if self._deciding.calibrating else report.finished:
            self._follower.ended(response.length)
            self._deciding.ended(response, now)
            self._outbox.finished(response)
        if report.rank in self._leaders and report.tp == self.layout.tp:
            self._leaders[report.rank].heard(report)
            self._deciding.decoded(report, self.layout, now)
            self._count_requests()
        else:
            self._switching.early(report)

    def _count_requests(self) -> None:
        self._in_engine = sum(self._leaders[rank].requests for rank in self.layout.leaders)

    # -- getting on -----------------------------------------------------------------------------------

    @property
    def _held(self) -> bool:
        """Whether what comes in has to wait."""
        switch = self._switching.under_way or self._wanted
        return self._switching.commanded or (switch is not None and switch.ahead)

    def _proceed(self, now: float) -> None:
        """Handle what can be handled, then see whether a switch is due."""
        # Here, and not where a policy looks: the engine may run empty during a control request, or a switch.
        arrivals = self._deciding.round
        arrivals.in_engine(self._in_engine, now)
        complete = arrivals.complete
        head = self._backlog[0] if self._backlog else None
        if isinstance(head, Generation) and self._deciding.opens(head, self.layout, now):
            self._decide(now, ahead=True)
        while self._backlog and not self._held:
            head = self._backlog[0]
            elsewhere = self._switching.under_way or self.layout != self.config.base
            if isinstance(head, Control) and head.needs_base and elsewhere:
                if not self._switching.under_way:
                    again = m.NO_KV if self._base_attempts else 0
                    self._wanted = Wanted(self.config.base, "control", recompute_below=again)
                break
            event = self._backlog.popleft()
            self._held_requests -= isinstance(event, Generation)
            self._dispatch(event, now)
        arrivals.in_engine(self._in_engine, now)
        if arrivals.complete > complete:
            self._deciding.hurry()  # the last request is what policies wait for
        self._decide(now)
        if self._follower.active:
            self._follow_schedule()
        if self._switching.under_way is None and self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            if wanted.target != self.layout:
                self._switching.start(wanted, self.layout, now)
        elif self._switching.prepared and not self._replies:  # the last reply of a control request brings us back here
            self._switching.command()
        works = self._in_engine > 0 and not (self._paused or self._deciding.calibrating)
        self.account.state(now, self.layout.tp, works)

    def _decide(self, now: float, ahead: bool = False) -> None:
        """Ask the policy, if a switch may start now and the policy is due."""
        # While nothing decodes a switch gains nothing, and without its memory a rank cannot.
        if self._paused or self._released or self._switching.under_way or self._wanted or self._replies:
            return
        if self._deciding.due(now) and all(self._leaders[rank].known for rank in self.layout.leaders):
            self._wanted = self._deciding.decide(self.layout, self._in_engine, self._held_requests, now, ahead)

    def _dispatch(self, event: Generation | Control | m.SetSchedule, now: float) -> None:
        if isinstance(event, m.SetSchedule):
            self._deciding.counts()
            return self._follower.set(event, self.layout)
        if isinstance(event, Generation):
            self._follower.schedule.arrived(event)
            self._deciding.arrived(event, now)
            self.account.requests += event.counts and not self._deciding.calibrating
            rank = self._places.choose(event, self.layout, self._leaders, self.history.expected(event.limit))
            self._leaders[rank].send(event)
            self._in_engine += 1
            return self._outbox.to_leader(rank, event.obj)
        self._paused = self._paused if event.pauses is None else event.pauses
        changed = (event.releases - self._released) | (event.resumes & self._released)
        self._released, event = self._released ^ changed, replace(event, changes=changed)
        self._replies.expect(event, self.layout.dp)
        for rank in self.layout.leaders:
            self._outbox.to_leader(rank, event.obj)

    def _follow_schedule(self) -> None:
        """Want what the schedule wants now."""
        while not (self._switching.under_way or self._wanted or self._paused or self._released):
            entry = self._follower.look(self.layout)
            if entry is None:
                return
            if entry.tp not in (None, self.layout.tp):
                self._wanted = Wanted(self.config.layout(entry.tp), "schedule")
            else:
                self._follower.carried_out(None)

    # -- a switch has ended ------------------------------------------------------------------------------

    def _ended(self, ended: Ended, now: float) -> None:
        switch, record = ended.switch, ended.record
        self._outbox.switched(record)
        if record.reason != CALIBRATION:
            self.account.switched(record)
        if record.error:
            self._deciding.aborted(now)
            if record.reason == "control":
                self._base_attempts += 1
                if self._base_attempts == BASE_ATTEMPTS:
                    self._refuse_controls(f"the engine cannot return to its base layout: {record.error}")
        else:
            self._take_over(ended)
            self._follower.schedule.switched(switch.source, switch.target)
            self._deciding.switched(now)
            self._base_attempts = 0
        if record.reason == "schedule":
            self._follower.carried_out(record)
        if switch.wanted.query_id is not None:
            code = 500 if record.error else 200
            self._answer(switch.wanted.query_id, code, record.error, msgspec.to_builtins(record))

    def _refuse_controls(self, reason: str) -> None:
        """Answer all that wait for the base layout; those that come later try anew."""
        waiting, self._backlog, self._base_attempts = self._backlog, deque(), 0
        for event in waiting:
            if isinstance(event, Control) and event.needs_base:
                self._outbox.to_server(event.refusal(reason))
            else:
                self._backlog.append(event)

    def _take_over(self, ended: Ended) -> None:
        """The new leaders' load: what they have reported already, or else what they were handed."""
        self.layout = ended.switch.target
        for rank in self.layout.leaders:
            leader, reply = self._leaders[rank], ended.switch.reports[rank]
            leader.heard(ended.switch.early.get(rank) or leader.handed(reply, self.layout.tp))
        self._count_requests()

    def _answer(self, query_id: int, code: int, message: str, record: dict[str, Any] | None = None) -> None:
        self._outbox.to_server(m.ReconfigureReply(query_id=query_id, code=code, message=message, record=record))
