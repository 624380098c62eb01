"""The coordinator as a state machine (:class:`Coordinator`): it stands between the server and the ranks.

Requests go to one leader; control requests go to all, and their replies are merged.  Switches are decided on and
commanded in ``switching.py``.  The coordinator owns no socket and no clock: every event is a method call with the time,
every effect goes through the :class:`~sglang_pat.coordinator.replicas.Outbox`.

What arrives while ranks are switching waits in ``_backlog``, in order, and goes to the new leaders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.decisions import Decisions
from sglang_pat.coordinator.replicas import Generation, Leader, Outbox, PrefixPlaces, is_report_of
from sglang_pat.coordinator.schedule import Schedule
from sglang_pat.coordinator.siblings import Siblings
from sglang_pat.coordinator.switching import Switching, Traffic
from sglang_pat.figures import Account
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lending import LendingPolicy
from sglang_pat.policies.snapshot import Policy
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control request: goes to all leaders.

    Attributes:
        reply: name of the reply's type, or None if there is none.
        merge: makes one reply of all leaders' replies, which come in the order of their ranks.
        failed: whether such a reply says that nothing was done.
        refusal: makes such a reply, of a reason.
        needs_base: only the base layout can do it (weights, memory).
        takes_back: of these, ranks that are lent come back for it; else it is refused then.
        pauses: True stops generation, False lets it go on.
        releases, resumes: memory it gives away and takes back, by SGLang's tags; ``changes``: of these, what was not so
            before.
    """

    obj: Any
    reply: str | None = None
    merge: Callable[[list[Any]], Any] = lambda replies: replies[0]
    failed: Callable[[Any], bool] = lambda reply: False
    refusal: Callable[[str], Any] = lambda reason: None
    needs_base: bool = False
    takes_back: bool = False
    pauses: bool | None = None
    releases: frozenset[str] = frozenset()
    resumes: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()


@dataclass
class _Collect:
    """Replies to one control request, by leader; ``expected``: of so many."""

    control: Control
    expected: int
    replies: dict[int, Any] = field(default_factory=dict)


class Coordinator:
    """The coordinator as a state machine: in the base layout with no load; then one event after another, forever.

    Args:
        policy: what ``config.policy`` names; made here if it needs no profile.
        predictor: predictor of the policy's profile, to be corrected by the steps of this run.
        lending: says when ranks are lent; None where the policy does not predict.
        costs: costs of switches, by the profile.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        outbox: Outbox,
        policy: Policy | None = None,
        predictor: Predictor | None = None,
        lending: LendingPolicy | None = None,
        costs: SwitchCosts | None = None,
    ) -> None:
        self.config = config
        self._outbox = outbox
        self._leaders, self._places = {rank: Leader() for rank in config.base.leaders}, PrefixPlaces()
        self._decisions = Decisions(config, self._leaders, outbox, policy, predictor, lending)
        self.history = self._decisions.history
        self._backlog: deque[Generation | Control | m.SetSchedule] = deque()
        self._held_requests = 0
        """Requests in the backlog."""
        self._replies: list[_Collect] = []
        """The control requests under way that are answered, oldest first."""
        self._traces: dict[int, list[m.RankTrace]] = {}
        """Traces, by query, that were asked for and are not complete."""
        self._siblings = Siblings(outbox)
        self._retracted = 0
        self._paused = False
        self._released: frozenset[str] = frozenset()
        self.account = Account([layout.tp for layout in config.layouts])
        self._schedule = Schedule(self._leaders, config.base, outbox, active=config.policy == "schedule")
        self._switching = Switching(config, self._leaders, outbox, self._decisions, self._schedule, self.account, costs)

    @property
    def layout(self) -> ParallelLayout:
        """The layout in force."""
        return self._switching.layout

    # -- events from the server -----------------------------------------------------------------

    def receive(self, event: Generation | Control | m.SetSchedule, now: float) -> None:
        """Handle a request from the TokenizerManager, or a schedule, which holds for those that come after it."""
        self._backlog.append(event)
        self._held_requests += isinstance(event, Generation)
        self._advance(now)

    def reconfigure(self, query: m.Reconfigure, now: float) -> None:
        """Handle ``POST /pat/reconfigure``."""
        self._switching.reconfigure(query, self._released)
        if self._switching.wanted is not None:
            self._advance(now)

    def lend_ranks(self, query: m.LendRanks, now: float) -> None:
        """Handle ``POST /pat/lend_ranks`` and ``/pat/take_back_ranks``."""
        self._switching.lend_ranks(query, self._released, now)
        if self._switching.wanted is not None:
            self._advance(now)

    def decide_lending(self, query: m.LendingQuery, now: float) -> None:
        """Handle ``POST /pat/lending``."""
        self._switching.decide_lending(query, self._in_engine + self._held_requests, now)

    def handle_round(self, message: m.BeginRound | m.EndRound, now: float) -> None:
        """Begin or end a client's round."""
        self._decisions.round.update_announced_round(message, now)
        self._advance(now)

    def calibrate(self, turn: m.CalibrationTurn, now: float) -> None:
        """Calibrate before the first request of an engine whose policy predicts."""
        self._decisions.calibrate(turn, now)

    def handle_schedule_query(self, query: m.ScheduleQuery) -> None:
        """Handle ``GET /pat/schedule``."""
        self._schedule.answer_query(query)

    def handle_status_query(self, query: m.StatusQuery, now: float) -> None:
        """Handle ``GET /pat/status``."""
        leaders = {rank: self._leaders[rank] for rank in self.layout.working}
        groups = [{"leader": r, "ranks": self.layout.group(r), **leader.get_status()} for r, leader in leaders.items()]
        status = {
            "layout": self.layout.as_dict(),
            "lent": self.layout.lent,
            "lease": self._switching.describe_lease(now),
            "base": self.config.base.as_dict(),
            "candidates": [layout.as_dict() for layout in self.config.layouts],
            "policy": self.config.policy,
            "switching": self._switching.under_way is not None,
            "target": self._switching.under_way.target.as_dict() if self._switching.under_way else None,
            "requests": self._in_engine + self._held_requests,
            "expected_seconds": self._decisions.expected_seconds if self._in_engine else 0.0,
            "rounds": self._decisions.round.get_status(now),
            "controls": len(self._replies),
            "groups": groups,
            "step_factors": self._decisions.factors.get_factors() if self._decisions.factors else {},
            "retracted": self._retracted,
        }
        self._outbox.send_to_server(m.Reply(query_id=query.query_id, answer=status | self.account.get_status()))

    def handle_trace_query(self, query: m.TraceQuery, now: float) -> None:
        """Handle ``Engine.trace()``: every rank is asked, as any may have led until the last switch."""
        self._traces[query.query_id] = []
        self.receive(Control(obj=query), now)

    # -- events from the ranks --------------------------------------------------------------------

    def reply(self, rank: int, obj: Any, now: float) -> None:
        """Pass on an object of SGLang's from leader ``rank``: a control reply, or something for the server as it is."""
        # Leaders answer requests of one type in the order they got them, but not in step with each other: this reply is
        # to the oldest one that still lacks this leader's.
        name = type(obj).__name__
        waiting = (one for one in self._replies if one.control.reply == name and rank not in one.replies)
        collect = next(waiting, None)
        if collect is None:
            return self._outbox.send_to_server(obj)
        collect.replies[rank] = obj
        if len(collect.replies) == collect.expected:
            self._replies.remove(collect)
            control = collect.control
            reply = control.merge([collect.replies[leader] for leader in sorted(collect.replies)])
            self._released ^= control.changes if control.failed(reply) else frozenset()
            self._outbox.send_to_server(reply)
            # Weights or memory: whoever trains has its batch.
            if control.needs_base and (step := self.account.end_training_step()) is not None:
                self._outbox.record_training_step(step)
        self._advance(now)

    def handle_rank_message(self, message: m.FromRank, now: float) -> None:
        """Handle one of our own messages from a rank."""
        if isinstance(message, m.LoadReport):
            self._load_report(message, now)
        elif isinstance(message, m.EndedText):
            self._siblings.record(message)
        elif isinstance(message, m.RankTrace):
            self._handle_trace_answer(message)
        elif isinstance(message, m.MemoryReleased):
            self._switching.record_release(message)
        elif isinstance(message, m.HoldReport):
            self._schedule.record_hold(message)
        else:
            before = self.layout
            error = self._switching.handle_answer(message, now)
            if self.layout is not before:
                self._siblings.forget_known()
            if error:
                self._refuse_controls(f"the engine cannot return to its base layout: {error}")
        self._advance(now)

    def _handle_trace_answer(self, trace: m.RankTrace) -> None:
        """Collect the trace of a rank; the server gets all of them as one with the last."""
        traces = self._traces.get(trace.query_id)
        if traces is None:
            return  # nobody waits for it
        traces.append(trace)
        if len(traces) == self.config.num_ranks:
            del self._traces[trace.query_id]
            steps = [{"rank": t.rank} | msgspec.structs.asdict(step) for t in traces for step in t.steps]
            steps.sort(key=lambda step: step["at"])
            self._outbox.send_to_server(m.Reply(query_id=trace.query_id, answer=steps))

    def handle_timer(self, now: float) -> None:
        """Do what time alone makes due."""
        self._advance(now)

    # -- load ---------------------------------------------------------------------------------------

    def _load_report(self, report: m.LoadReport, now: float) -> None:
        self._retracted += report.retracted
        if not self._decisions.calibrating:
            self.account.record_steps(report.counts)
            self._outbox.record_steps(report.counts)
            self._decisions.round.retracted += report.retracted
            for response in report.finished:
                self._schedule.record_response_end(response.length)
                self._decisions.record_response_end(response, now)
                self._outbox.log_response(response)
        if report.rank in self._leaders and is_report_of(report, self.layout):
            self._leaders[report.rank].apply_report(report)
            self._decisions.record_decode_steps(report, self.layout, now)
            self._decisions.record_drafts(report)
            if self._switching.under_way is None:
                self._siblings.tell(report)
        else:
            self._switching.keep_early_report(report)

    @property
    def _in_engine(self) -> int:
        """Requests at the leaders of the layout in force."""
        return sum(self._leaders[rank].requests for rank in self.layout.leaders)

    # -- getting on -----------------------------------------------------------------------------------

    @property
    def _traffic(self) -> Traffic:
        return Traffic(
            in_engine=self._in_engine, held=self._held_requests, controls=len(self._replies), paused=self._paused,
            released=self._released,
        )  # fmt: skip

    def _advance(self, now: float) -> None:
        """Handle what can be handled, then see whether a switch is due."""
        # Here, and not where a policy looks: the engine may run empty during a control request, or a switch.
        arrivals = self._decisions.round
        self._renew_leases(now)
        arrivals.end_silent_rounds(now)
        arrivals.update_request_count(self._in_engine)
        complete = arrivals.complete
        head = self._backlog[0] if self._backlog else None
        if isinstance(head, Generation) and self._decisions.is_first_of_known_round(head, self.layout, now):
            self._switching.decide(self._traffic, now, ahead=True)
        while self._backlog and not self._switching.holds_requests:
            head = self._backlog[0]
            if isinstance(head, Control) and head.needs_base and not self._switching.at_base:
                if self._switching.lends and not head.takes_back:
                    self._backlog.popleft()
                    ranks = ", ".join(map(str, self.layout.lent))
                    why = f"ranks {ranks} are lent; take them back first (POST /pat/take_back_ranks)"
                    self._outbox.send_to_server(head.refusal(why))
                    continue
                self._switching.want_base()
                break
            event = self._backlog.popleft()
            self._held_requests -= isinstance(event, Generation)
            self._dispatch(event, now)
        arrivals.update_request_count(self._in_engine)
        if arrivals.complete > complete:
            self._decisions.decide_soon()  # the last request is what policies wait for
        self._switching.advance(self._traffic, now)
        works = self._in_engine > 0 and not (self._paused or self._decisions.calibrating)
        self.account.record_state(now, self.layout.tp, works)

    def _renew_leases(self, now: float) -> None:
        """Renew the leases of clients whose requests are in the engine."""
        for rank in self.layout.working:
            report = self._leaders[rank].report
            for name in report.rounds if report else ():
                self._decisions.round.leases.hear(name, now)

    def _dispatch(self, event: Generation | Control | m.SetSchedule, now: float) -> None:
        if isinstance(event, m.SetSchedule):
            self._outbox.start_counting_requests()
            return self._schedule.set(event, self.layout)
        if isinstance(event, Generation):
            self._schedule.record_arrival(event)
            if name := self._decisions.record_arrival(event, now):
                setattr(event.obj, m.ROUND_MARK, name)
            self.account.requests += event.counts and not self._decisions.calibrating
            rank = self._places.choose(event, self.layout, self._leaders, self.history.estimate_mean(event.limit))
            self._leaders[rank].send(event)
            return self._outbox.send_to_leader(rank, event.obj)
        self._paused = self._paused if event.pauses is None else event.pauses
        changed = (event.releases - self._released) | (event.resumes & self._released)
        self._released, event = self._released ^ changed, replace(event, changes=changed)
        if event.reply:
            self._replies.append(_Collect(event, self.layout.dp))
        for rank in self.layout.leaders:
            self._outbox.send_to_leader(rank, event.obj)

    def _refuse_controls(self, reason: str) -> None:
        """Answer all requests that wait for the base layout; those that come later try anew."""
        waiting, self._backlog = self._backlog, deque()
        for event in waiting:
            if isinstance(event, Control) and event.needs_base:
                self._outbox.send_to_server(event.refusal(reason))
            else:
                self._backlog.append(event)
