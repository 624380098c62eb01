"""The times at which the policy is asked (:meth:`Decisions.is_due`), what it is shown
(:meth:`Decisions.make_snapshot`), and which switch it then wants (:meth:`Decisions.decide`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_pat import messages as m
from sglang_pat.config import DECIDING, AdaptiveConfig
from sglang_pat.coordinator.replicas import Generation, Leader, Outbox, sum_load
from sglang_pat.coordinator.round_tracker import RoundTracker
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lending import STRIDE, LendingDecision, LendingPolicy, Move, Training, make_lending_policy
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import NO_LOAD, Policy, Snapshot
from sglang_pat.predict.correction import StepFactors, Steps
from sglang_pat.predict.predictor import Predictor

DECISION_INTERVAL_SECONDS = 0.1
"""Least seconds between two questions to policies that predict: a decision takes milliseconds of a core that ranks may
want."""

DECISION_SHARE = 0.01
"""Share of the time that a round has got on without arrivals or switches, after which the policy is asked again: a
switch that is late by it costs less than that share."""

LONGEST_INTERVAL_SECONDS = 1.0
"""Most seconds between two questions, as aborts may empty half of a batch at any time."""


NEW = 0.2
"""Weight of the last report in what is known of drafts."""

CALIBRATION = "calibration"
"""Reason of switches that no status, record or metric counts."""


@dataclass(frozen=True)
class WantedSwitch:
    """A switch that is to start as soon as nothing stands in its way.

    Attributes:
        reason: who wants it: a policy's name, ``request``, ``control``, ``schedule``, ``lend``, ``take back``,
            ``lease over`` or :data:`CALIBRATION`.
        query_id: number of the query whose client waits for an answer.
        recompute_below: requests with fewer KV tokens are recomputed.
        ahead: whether it comes ahead of a round, whose requests wait for it.
    """

    target: ParallelLayout
    reason: str
    query_id: int | None = None
    recompute_below: int = 0
    ahead: bool = False


class Decisions:
    """The policy, and what it goes by beside the load.

    Args:
        leaders: the coordinator's, by rank.
        outbox: where decisions are told.
        policy: what ``config.policy`` names; made here if it needs no profile.
        predictor: of the profile that the policy has; None if it has none.
        lending: says when ranks are lent, by the profile; None without one: the room for KV decides.

    Attributes:
        history: lengths of the responses that ended.
        round: requests as they come in, and what clients have said of them.
        factors: by what the profile is off in each layout; None without a profile, or if it is to be believed.
        calibrating: requests are made up, to measure the layouts; the policy is not asked.
        expected_seconds: until all requests are done, as the policy saw it when it was last asked; None if it does not
            predict.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        leaders: Mapping[int, Leader],
        outbox: Outbox,
        policy: Policy | None,
        predictor: Predictor | None = None,
        lending: LendingPolicy | None = None,
    ) -> None:
        self.history = LengthHistory()
        self.expected_seconds: float | None = None
        self._lending = lending or make_lending_policy(None, None, config.num_ranks, config.list_degrees())
        self._why_never = ""
        """Why the engine would refuse to lend ranks as the policy means it; empty if it would not."""
        try:
            config.check_stride(STRIDE)
        except ValueError as error:
            self._why_never = str(error)
        self.policy = policy or make_policy(config.policy, switch_at=config.switch_at, max_running=config.max_running)
        self._config, self._leaders, self._outbox = config, leaders, outbox
        self._degrees = tuple(layout.tp for layout in config.layouts)
        self.round = RoundTracker(self._degrees if config.policy in DECIDING else (config.base.tp,))
        self._predictor = predictor
        corrects = predictor is not None and not config.profile_as_is
        self.factors = StepFactors(self._degrees) if corrects else None
        self._turns: list[dict[int, Steps]] = []
        """Turns of the calibration: steps by degree."""
        self.calibrating = False
        self._last_abort = self._last_switch = self._last_decision = float("-inf")
        self._opened = False
        self._chances: tuple[float, ...] = ()
        self._draft_seconds = 0.0

    # -- what has happened ------------------------------------------------------------------------

    def record_arrival(self, request: Generation, now: float) -> str:
        """A request goes into the engine; returns the name of its round, "" if nobody can say."""
        if self.calibrating:
            return ""
        if not request.counts:  # no part of a round; but it comes to an end before policies take it for what is left
            self.round.last = now
            return ""
        # Of n responses SGLang first has the prompt computed alone, which is none of them.
        self._opened = False
        return self.round.record_arrival(now, sample=request.limit > 0 and not request.generated, name=request.round)

    def record_response_end(self, response: m.Finished, now: float) -> None:
        sample = response.length > response.since
        self.round.record_response_end(now, sample=sample)
        self.round.tokens += response.length - response.since
        if sample:  # else it says nothing of lengths
            self.history.observe(response.length, response.family, not response.cut, response.since)

    def calibrate(self, turn: m.CalibrationTurn, now: float) -> None:
        """Begin a turn of a calibration, or end it when all turns are over."""
        self.calibrating = not turn.over
        if self.calibrating:
            return self._turns.append({})
        if self.factors is not None:
            self.factors.calibrate(self._turns, now)
        self._turns = []

    def record_switch(self, now: float, aborted: bool) -> None:
        if aborted:
            self._last_abort = now
        elif not self.calibrating:
            self._last_switch = now
            self.round.switches += 1

    def record_drafts(self, report: m.LoadReport) -> None:
        """Learn how likely drafts are right; replicas report some tens of times in a second."""
        if report.chances and not self.calibrating:
            new = (*report.chances, report.draft_seconds)
            old = (*self._chances, self._draft_seconds) if self._chances else new
            *chances, self._draft_seconds = ((1 - NEW) * a + NEW * b for a, b in zip(old, new, strict=True))
            self._chances = tuple(chances)

    def record_decode_steps(self, report: m.LoadReport, layout: ParallelLayout, now: float) -> None:
        """Learn from steps of ``layout``, which is in force, that a leader reports."""
        counts = report.decoded
        if self.factors is None or self._predictor is None or not counts.steps:
            return
        others = sum(self._leaders[rank].decoding for rank in layout.leaders if rank != report.rank)
        batch, tokens = counts.requests / counts.steps, counts.tokens / counts.steps
        predicted = counts.steps * self._predictor.step_seconds(report.tp, batch, tokens, 1 + others)
        steps = Steps(counts.steps, counts.requests, counts.tokens, counts.seconds, predicted)
        if self.calibrating:
            before = self._turns[-1].get(report.tp, (0,) * len(steps))
            self._turns[-1][report.tp] = Steps(*map(sum, zip(before, steps, strict=True)))
        else:
            self.factors.observe(report.tp, steps, now)

    # -- when to ask ------------------------------------------------------------------------------

    def is_first_of_known_round(self, request: Generation, layout: ParallelLayout, now: float) -> bool:
        """Whether a request that is about to go in is the first of a round that may start in another layout: its size
        is known, or there was too little room in earlier ones.  A switch stops nobody yet.  Says so once; the policy is
        then due."""
        if self.calibrating or not request.counts or self.round.came or self._opened:
            return False
        if not (self._config.predicts and len(self.round.predict_round_load(now))) and layout.tp >= self.round.start:
            return False
        self._opened = True
        self.decide_soon()
        return True

    def decide_soon(self) -> None:
        """Have the policy asked at once."""
        self._last_decision = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether the policy may be asked again: always if it does not predict."""
        if self.calibrating:
            return False
        return not self._config.predicts or now >= self._last_decision + self._choose_interval(now)

    def _choose_interval(self, now: float) -> float:
        calm = now - max(self.round.last, self._last_switch) if self.round.came else 0.0
        return min(max(DECISION_SHARE * calm, DECISION_INTERVAL_SECONDS), LONGEST_INTERVAL_SECONDS)

    # -- the decision -----------------------------------------------------------------------------

    def decide(
        self, layout: ParallelLayout, in_engine: int, held: int, now: float, ahead: bool = False
    ) -> WantedSwitch | None:
        """The switch that the policy wants, if any.

        Args:
            layout: the one in force.
            in_engine: requests at its leaders; ``held``: in the backlog.
            ahead: whether the switch comes ahead of a round, whose requests wait for it.
        """
        self._last_decision = now
        snapshot = self.make_snapshot(layout, in_engine + held, now)
        if ahead:  # what waits for the decision has come, though it was not passed on: it is not all that is left
            snapshot = replace(snapshot, last_arrival=now)
        self.round.record_load(snapshot.load)
        decision = self.policy(snapshot, self.history)
        self.expected_seconds = decision.estimates.get(decision.tp)
        self._outbox.log_decision(snapshot, decision)
        if decision.tp == layout.tp:
            return None
        target = self._config.layout(decision.tp, layout.stride)
        return WantedSwitch(target, self._config.policy, recompute_below=decision.recompute_below, ahead=ahead)

    def decide_lending(self, layout: ParallelLayout, requests: int, training: Training, now: float) -> LendingDecision:
        """Whether ranks should be lent now, or taken back.

        Args:
            layout: the one in force; ``requests``: as for :meth:`make_snapshot`.
        """
        if layout.stride == 1 and self._why_never:
            return LendingDecision(move=Move.NEVER, why=self._why_never, tp=layout.tp)
        snapshot = self.make_snapshot(layout, requests, now)
        if not self._config.predicts:
            load, room = sum_load(self._leaders, layout.working), self._room(layout)
            snapshot = replace(snapshot, load=load, room=room)
        return self._lending(snapshot, self.history, training)

    def make_snapshot(self, layout: ParallelLayout, requests: int, now: float) -> Snapshot:
        """What the policy is shown; ``requests``: in the engine and in the backlog."""
        predicts = self._config.predicts
        # Policies that do not predict do not look at it, and are asked at every event.
        load = sum_load(self._leaders, layout.working) if predicts else NO_LOAD
        degrees, working = tuple(self._config.list_degrees(layout.stride)), layout.num_ranks // layout.stride
        return Snapshot(
            now=now,
            tp=layout.tp,
            degrees=degrees,
            num_ranks=working,
            requests=requests,
            peak=self.round.peak,
            last_arrival=self.round.last,
            complete=self.round.complete,
            in_round=bool(self.round.open),
            last_switch=self._last_switch,
            last_abort=self._last_abort,
            load=load,
            coming=self.round.predict_round_load(now) if predicts and requests else NO_LOAD,
            start=degrees[0] if self.round.only_probes else min(self.round.start, degrees[-1]),
            room=self._room(layout) if predicts else {},
            switches=self.round.switches,
            factors=self.factors.get_factors() if self.factors else {},
            doubts=self.factors.compute_uncertainty(layout.tp, working, load.prompt + load.output)
            if self.factors
            else {},
            chances=self._chances,
            draft_seconds=self._draft_seconds,
        )

    def _room(self, layout: ParallelLayout) -> dict[int, int]:
        """KV tokens that one replica has room for, by degree, as the first leader has reported them: all ranks have as
        much."""
        report = self._leaders[layout.leaders[0]].report
        return dict(report.kv_totals) if report is not None else {}
