"""Replicas with real gates under a real coordinator that follows a schedule; no test of its own."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.decision_log import encode_event
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.coordinator.router import Coordinator
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.snapshot import Policy
from sglang_pat.rank.step_gate import StepGate

BASE = ParallelLayout(1, 4)


@dataclass
class Request:
    """``length`` tokens after ``prefills`` steps of prefill."""

    length: int
    prefills: int = 1
    output: int = 0


@dataclass
class Rank:
    """One rank; only a leader takes messages and has requests, but every rank of its group has its gate."""

    gate: StepGate = field(default_factory=StepGate)
    inbox: deque[Any] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    received: int = 0
    steps: int = 0
    batches: int = 0
    generated: int = 0
    ended: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Fired:
    """The engine at a switch: by replica with requests its steps, and what was alive and generated in all."""

    steps: dict[int, int]
    batches: dict[int, int]
    alive: int
    generated: int


class World:
    """The coordinator's outbox.  Whose turn it is, is drawn at random; a turn takes a second.

    Args:
        decide: in place of the policy that the options name.

    Attributes:
        log: events of its decision log.
    """

    def __init__(
        self, base: ParallelLayout, seed: int, policy: str = "schedule", decide: Policy | None = None, **options: Any
    ) -> None:
        self.config = AdaptiveConfig(base=base, policy=policy, **options)
        self.layout = base
        self.ranks = [Rank() for _ in range(base.num_ranks)]
        self.answers: dict[int, m.Reply] = {}
        self.fired: list[Fired] = []
        self.commands: dict[int, Any] = {}
        self.rng = random.Random(seed)
        self.wire: deque[Any] = deque()
        self.log: list[bytes] = []
        self.now = 0.0
        self.coordinator = Coordinator(self.config, self, decide)
        self._queries = 0

    # -- the outbox -----------------------------------------------------------------------------------

    def send_to_leader(self, rank: int, obj: Any) -> None:
        assert rank in self.layout.leaders
        self.ranks[rank].inbox.append(obj)

    def send_to_server(self, obj: Any) -> None:
        self.answers[obj.query_id] = obj

    def record_switch(self, record: m.SwitchRecord) -> None: ...
    def record_training_step(self, step: Any) -> None: ...

    def start_counting_requests(self) -> None:
        self.log.append(encode_event("counting"))

    def log_decision(self, snapshot, decision) -> None:
        self.log.append(encode_event("decision", snapshot=snapshot, decision=decision))

    def record_steps(self, counts: m.StepCounts) -> None: ...

    def log_response(self, response: m.Finished) -> None:
        about = dict(length=response.length, family=response.family, finished=not response.cut)
        self.log.append(encode_event("length", **about))

    # -- the server -----------------------------------------------------------------------------------

    def set(self, entries: list[dict]) -> None:
        checked = [m.ScheduleEntry(**entry) for entry in entries]
        self.coordinator.receive(m.SetSchedule(query_id=self._query(), entries=checked), self.now)

    def wait(self) -> int:
        """Asks to be answered when the schedule is over; the query's number."""
        self.coordinator.handle_schedule_query(m.ScheduleQuery(query_id=self._query()))
        return self._queries

    def send(self, *requests: Request, counts: bool = True) -> None:
        for request in requests:
            self.coordinator.receive(Generation(obj=request, tokens=1, counts=counts), self.now)

    def _query(self) -> int:
        self._queries += 1
        return self._queries

    # -- the ranks ------------------------------------------------------------------------------------

    def run(self, until=lambda world: False, turns: int = 20_000) -> None:
        """Take turns until nobody has anything to do, or ``until`` says so."""
        for _ in range(turns):
            if until(self):
                return
            self.now += 1.0
            able = [rank for rank in self.layout.leaders if self._able(rank)]
            if not able and not self.wire:
                return
            if self.wire and (not able or self.rng.random() < 0.3):
                self.coordinator.handle_rank_message(self.wire.popleft(), self.now)
            else:
                self._iterate(self.rng.choice(able))
        raise AssertionError("it goes on for ever")

    def _able(self, rank: int) -> bool:
        leader = self.ranks[rank]
        return bool(leader.inbox) or (leader.gate.closed and not leader.gate.said) or self._works(leader)

    @staticmethod
    def _works(leader: Rank) -> bool:
        return bool(leader.requests) and not leader.gate.closed

    def _group(self, leader: int) -> list[Rank]:
        return [self.ranks[rank] for rank in self.layout.group(leader)]

    def _iterate(self, rank: int) -> None:
        """One turn of the loop of a leader's group: all messages, then a step."""
        leader, group = self.ranks[rank], self._group(rank)
        while leader.inbox:
            obj = leader.inbox.popleft()
            if isinstance(obj, Request):
                leader.requests.append(obj)
                leader.received += 1
                self._report(rank)
            elif isinstance(obj, m.StepPermit):
                for member in group:
                    member.gate.set_permit(obj)
            else:
                self.commands[rank] = obj
                if len(self.commands) == self.layout.dp:
                    self._command()
                return
        assert len({member.gate.closed for member in group}) == 1, "ranks of a group part"
        if leader.gate.closed and not leader.gate.said:
            held = [member.gate.make_hold_report(rank) for member in group]
            self._report(rank)
            self.wire.append(held[0])
        elif self._works(leader):
            self._step(rank, leader, group)

    def _step(self, rank: int, leader: Rank, group: list[Rank]) -> None:
        prefilling = [request for request in leader.requests if request.prefills]
        batch = prefilling[:3] or leader.requests
        for member in group:
            member.gate.record_step(not prefilling)
        leader.batches += 1
        leader.steps += not prefilling
        for request in batch:
            request.prefills -= bool(prefilling)
            if not request.prefills:
                request.output += 1
                leader.generated += 1
        done = [request for request in batch if request.output == request.length]
        leader.requests = [request for request in leader.requests if request not in done]
        leader.ended += [request.length for request in done]
        if done:
            self._report(rank)

    def _report(self, rank: int) -> None:
        leader = self.ranks[rank]
        running = sum(not request.prefills for request in leader.requests)
        self.wire.append(
            m.LoadReport(
                rank=rank, tp=self.layout.tp, received=leader.received, running=running,
                waiting=len(leader.requests) - running, tokens=0, kv_used=0, kv_total=0, retracted=0, weight_updates=0,
                requests=[m.Running(1, r.output, r.length, 0) for r in leader.requests],
                finished=[m.Finished(length, 0, False) for length in leader.ended],
            )
        )  # fmt: skip
        leader.ended = []

    def _command(self) -> None:
        """All leaders have the same command: all ranks together."""
        (command,) = {(type(c), c.epoch, c.tp): c for c in self.commands.values()}.values()
        self.commands = {}
        if isinstance(command, m.Prepare):
            self.wire.extend(m.Prepared(rank=r, epoch=command.epoch, seconds=0) for r in range(len(self.ranks)))
            return
        old, new = self.layout, self.config.layout(command.tp)
        busy = [rank for rank in old.leaders if self.ranks[rank].requests]
        alive = [request for rank in old.leaders for request in self.ranks[rank].requests]
        self.fired.append(
            Fired(
                steps={rank: self.ranks[rank].steps for rank in busy},
                batches={rank: self.ranks[rank].batches for rank in busy},
                alive=len(alive),
                generated=sum(rank.generated for rank in self.ranks),
            )
        )
        came = {leader: [self.ranks[old.group_of(r)] for r in new.group(leader)] for leader in new.leaders}
        counts = {leader: (max(r.steps for r in of), max(r.batches for r in of)) for leader, of in came.items()}
        held = {rank: self.ranks[rank].requests for rank in old.leaders}
        for number, rank in enumerate(self.ranks):
            left = rank.gate.close_for_switch(number)
            if left is not None and number in old.leaders:
                self.wire.append(left)
            rank.requests = []
        for leader, (steps, batches) in counts.items():
            self.ranks[leader].steps, self.ranks[leader].batches = steps, batches
        self.layout = new
        if new.tp > old.tp:
            for rank, requests in held.items():
                self.ranks[new.group_of(rank)].requests += requests
        else:
            for index, request in enumerate(alive):
                self.ranks[index % new.dp].requests.append(request)
        for rank in range(len(self.ranks)):
            own = self.ranks[rank].requests
            running = sum(not request.prefills for request in own)
            self.wire.append(
                m.RankSwitched(
                    rank=rank, epoch=command.epoch, phases={"drain": 0.0}, migrated=running,
                    requests_in=len(held.get(rank, ())), requests_out=len(own),
                )
            )  # fmt: skip
