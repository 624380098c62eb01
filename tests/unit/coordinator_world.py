"""Ranks that behave like the real ones, for tests of the coordinator; no test of its own.

One file because ranks and wires are one world, in which each message is checked against what all of them do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.router import Control, Coordinator
from sglang_pat.coordinator.switching import BASE_ATTEMPTS
from sglang_pat.figures import Figures
from sglang_pat.layout import list_destinations, needs_capsules
from sglang_pat.messages import NO_KV


@dataclass(unsafe_hash=True)
class Request:
    """What the server sends; ``serial`` numbers all of them, work and controls, in order of arrival."""

    serial: int
    kind: str
    pat_round: str = field(default="", compare=False)


@dataclass(frozen=True)
class FlushReply:
    rank: int
    serial: int


@dataclass(frozen=True)
class UpdateReply:
    rank: int
    serial: int


@dataclass(frozen=True)
class OutOfBand:
    """Something a leader sends that nobody asked for."""

    rank: int


@dataclass(frozen=True)
class Refused:
    """The answer to a control request that did not get its layout."""

    serial: int
    reason: str


@dataclass(frozen=True)
class Merged:
    serial: int
    ranks: tuple[int, ...]


REPLIES = {"flush": FlushReply, "update": UpdateReply}


def merge(replies: list[Any]) -> Merged:
    (serial,) = {reply.serial for reply in replies}  # all to the same request
    return Merged(serial, tuple(reply.rank for reply in replies))


def control(serial: int, kind: str, needs_base: bool = False, takes_back: bool = False) -> Control:
    reply = REPLIES[kind].__name__ if kind in REPLIES else None
    return Control(
        obj=Request(serial, kind), reply=reply, merge=merge, needs_base=needs_base, takes_back=takes_back,
        refusal=lambda reason: Refused(serial, reason),
    )  # fmt: skip


@dataclass
class Rank:
    """One rank.  A leader takes from ``inbox`` in order; what it sends arrives in the order of ``outbox``."""

    rank: int
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    owed: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    """Replies not given yet, in order for each type."""
    requests: list[Request] = field(default_factory=list)
    received: int = 0
    last_load: int | None = None
    prepared: int | None = None
    """Epoch this rank is prepared for."""
    switching: m.Switch | None = None
    compiled: list[m.Grammar] = field(default_factory=list)
    """What it was told to compile for that epoch."""

    def grammars(self) -> list[m.Grammar]:
        count = len(self.requests)
        return [m.Grammar(kind="regex", text=text, count=count) for text in ("", f"{self.rank}") if count]


class World:
    """All ranks and the wires to them; checks whatever the coordinator sends.  It is the outbox."""

    def __init__(self, config: AdaptiveConfig) -> None:
        self.config = config
        self.layout = config.base
        """The ranks' layout; ``known``: the coordinator's."""
        self.known = config.base
        self.ranks = [Rank(rank) for rank in range(config.num_ranks)]
        self.fates: dict[int, tuple[str, int]] = {}
        self.aborts = 0
        """Switches in a row that were aborted on the way to the base layout for a control request."""
        self.finished: list[Request] = []
        self.to_leaders: list[tuple[int, Any]] = []
        self.server: list[Any] = []
        self.records: list[m.SwitchRecord] = []
        self.steps: list[Figures] = []
        self.decisions: list[Any] = []
        self.responses: list[m.Finished] = []
        self.needs_base: set[int] = set()
        self.outstanding: set[int] = set()
        self.commanded: int | None = None
        self.preparing: int | None = None
        self.recompute_below = 0
        self.way_home = "fine"
        """Fate of every switch to the base layout, if not fine."""
        self.grammatical = False
        """Whether requests have grammars."""
        self.kv_totals: dict[int, int] = {}
        self.decoded = m.Decoded()
        self.chances: list[float] = []
        self.draft_seconds = 0.0
        self.counts = m.StepCounts()
        self.retracted = 0
        """What the next load report says."""
        self.last_serial = -1

    # -- the outbox ---------------------------------------------------------------------------

    def send_to_leader(self, rank: int, obj: Any) -> None:
        assert rank in self.known.leaders, f"{obj} sent to {rank}, which leads nothing in {self.known}"
        if isinstance(obj, m.Switch):
            assert not self.outstanding, f"{obj} while controls {self.outstanding} are under way"
            assert self.preparing == obj.epoch and self.commanded in (None, obj.epoch)
            assert self.recompute_below == obj.recompute_below
            self.commanded = obj.epoch
        elif isinstance(obj, m.Prepare):
            assert self.preparing in (None, obj.epoch)
            self.preparing, self.recompute_below = obj.epoch, obj.recompute_below
        elif isinstance(obj, m.Compile):
            assert self.preparing == obj.epoch and self.commanded is None
        elif isinstance(obj, m.Cancel):
            assert self.preparing == obj.epoch and self.commanded is None
        elif isinstance(obj, m.StepPermit):  # real gates: schedule_world.py
            return self.to_leaders.append((rank, obj))
        elif isinstance(obj, m.SiblingTexts):
            assert self.preparing is None, f"{obj} sent to a rank that is about to switch"
            return self.to_leaders.append((rank, obj))
        else:
            assert self.commanded is None, f"{obj} sent to a rank that is switching"
            assert obj.serial >= self.last_serial, "requests pass in the order of their arrival"
            self.last_serial = obj.serial
            if obj.serial in self.needs_base:
                assert self.known == self.config.base, f"{obj} needs the base layout, not {self.known}"
            if obj.kind in REPLIES:
                self.outstanding.add(obj.serial)
        self.to_leaders.append((rank, obj))
        self.ranks[rank].inbox.append(obj)

    def send_to_server(self, obj: Any) -> None:
        if isinstance(obj, Merged):
            assert obj.serial in self.outstanding
            assert obj.ranks == tuple(self.known.leaders)
            self.outstanding.remove(obj.serial)
        if isinstance(obj, Refused):
            assert obj.serial in self.needs_base and obj.serial not in self.outstanding, "no rank has it"
            lent = "are lent" in obj.reason
            assert self.known.lent if lent else self.aborts == BASE_ATTEMPTS
            assert self.known != self.config.base
        self.server.append(obj)

    def start_counting_requests(self) -> None: ...

    def log_decision(self, snapshot, decision) -> None:
        assert snapshot.tp == self.known.tp and decision.tp in snapshot.degrees
        held = snapshot.requests - len(snapshot.load)
        known = len(snapshot.coming) or snapshot.start > snapshot.tp or not self.config.predicts
        assert held == 0 or known, "only the first requests of a round wait for a decision"
        self.decisions.append((snapshot, decision))

    def record_steps(self, counts: m.StepCounts) -> None: ...

    def log_response(self, response: m.Finished) -> None:
        self.responses.append(response)

    def record_training_step(self, step: Figures) -> None:
        self.steps.append(step)

    def record_switch(self, record: m.SwitchRecord) -> None:
        assert record.epoch == self.preparing and record.from_tp == self.known.tp
        self.preparing = self.commanded = None
        if not record.error:
            num_ranks = self.config.num_ranks
            self.known = self.config.layout(record.to_tp, num_ranks // (num_ranks - len(record.lent)))
            assert self.known.lent == record.lent
        self.records.append(record)
        assert self.aborts <= BASE_ATTEMPTS
        if record.reason == "control":
            before = self.aborts % BASE_ATTEMPTS
            assert self.recompute_below == (NO_KV if before else 0), "a second attempt moves no KV"
            self.aborts = before + 1 if record.error else 0
        elif not record.error:
            self.aborts = 0

    # -- the ranks ----------------------------------------------------------------------------

    def iterate(self, leader: int, fate: tuple[str, int] = ("fine", 0)) -> None:
        """One turn of a leader's loop: take a message, then report the load if it changed."""
        rank = self.ranks[leader]
        if rank.switching:
            assert not rank.inbox, "a rank gets nothing while it switches"
            return
        if rank.inbox:
            self._handle(rank, rank.inbox.popleft(), fate)
        if leader in self.layout.leaders and not rank.switching and rank.last_load != len(rank.requests):
            rank.last_load = len(rank.requests)
            self.report(leader)

    def report(self, leader: int) -> None:
        rank = self.ranks[leader]
        running = (len(rank.requests) + 1) // 2
        numbers = dict(received=rank.received, running=running, waiting=len(rank.requests) - running)
        rank.outbox.append(
            m.LoadReport(
                **numbers,
                rank=leader,
                tp=self.layout.tp,
                stride=self.layout.stride,
                tokens=10 * running,
                requests=[m.Running(4, 6, 100, 1)] * len(rank.requests),
                rounds=list({request.pat_round for request in rank.requests} - {""}),
                kv_used=0,
                kv_total=100,
                retracted=self.retracted,
                weight_updates=0,
                kv_totals=self.kv_totals,
                decoded=self.decoded,
                chances=self.chances,
                draft_seconds=self.draft_seconds,
                counts=self.counts,
            )
        )
        self.retracted = 0

    def _handle(self, rank: Rank, obj: Any, fate: tuple[str, int]) -> None:
        assert rank.rank in self.layout.leaders
        group = self.layout.group(rank.rank)
        if isinstance(obj, m.Prepare):
            home = (obj.tp, obj.stride) == (self.config.base.tp, 1) and self.way_home != "fine"
            self.fates.setdefault(obj.epoch, (self.way_home, 0) if home else fate)
            kind, victim = self.fates[obj.epoch]
            assert rank.prepared is None, "the switch before was neither made nor cancelled"
            rank.prepared = obj.epoch
            for member in group:
                error = f"rank {member}: no" if kind == "prepare" and member == victim else ""
                new = self.config.layout(obj.tp, obj.stride)
                named = self.grammatical and member == rank.rank and needs_capsules(self.layout, new)
                grammars = rank.grammars() if named else []
                prepared = m.Prepared(
                    rank=member, epoch=obj.epoch, seconds=0.5 + member, error=error, grammars=grammars
                )
                self.ranks[member].outbox.append(prepared)
        elif isinstance(obj, m.Compile):
            assert rank.prepared == obj.epoch and rank.switching is None
            rank.compiled = obj.grammars
            for member in group:
                self.ranks[member].outbox.append(m.Prepared(rank=member, epoch=obj.epoch, seconds=1.0))
        elif isinstance(obj, m.Cancel):
            assert self.fates[obj.epoch][0] == "prepare" and rank.prepared == obj.epoch
            rank.prepared = None
        elif isinstance(obj, m.Switch):
            assert not any(rank.owed.values()) and rank.prepared == obj.epoch
            rank.switching = obj
            if all(self.ranks[leader].switching == obj for leader in self.layout.leaders):
                self._switch(obj)
        elif obj.kind == "work":
            assert rank.rank in self.layout.working, "lent ranks get no work"
            rank.received += 1
            rank.requests.append(obj)
        elif obj.kind in REPLIES:
            rank.owed[obj.kind].append(REPLIES[obj.kind](rank.rank, obj.serial))

    def _switch(self, command: m.Switch) -> None:
        """All leaders have stopped: every rank of every group switches."""
        old, new = self.layout, self.config.layout(command.tp, command.stride)
        error = "rank 0: no" if self.fates[command.epoch][0] == "abort" else ""
        came = {rank.rank: len(rank.requests) for rank in self.ranks}
        for leader in old.leaders:
            told = {grammar.text for grammar in self.ranks[leader].compiled}
            others = [o for o in old.leaders if o != leader and new.group_of(leader) in list_destinations(old, new, o)]
            assert told <= {"", *map(str, others)}
            # Requests that come while it compiles are compiled in the pause.
            self.ranks[leader].compiled = []
        if not error:
            self.layout = new
            moving = [(leader, r) for leader in old.leaders for r in self.ranks[leader].requests]
            for rank in self.ranks:
                rank.requests = []
            for i, (leader, request) in enumerate(moving):
                targets = list_destinations(old, new, leader)
                self.ranks[targets[i % len(targets)]].requests.append(request)
        for rank in self.ranks:
            rank.switching = rank.prepared = None
            went = len(rank.requests)
            if not error:
                rank.last_load = None
            rank.outbox.append(
                m.RankSwitched(
                    rank=rank.rank,
                    epoch=command.epoch,
                    phases={"kv": 0.1 * (rank.rank + 1), "check": 0.01},
                    requests_in=0 if error else came[rank.rank],
                    requests_out=0 if error else went,
                    migrated=0 if error else went // 2,
                    error=error,
                )
            )
            if not error and rank.rank in new.lent and rank.rank not in old.lent:
                assert not rank.requests
                rank.outbox.append(m.MemoryReleased(rank=rank.rank, epoch=command.epoch, bytes=100))

    def finish(self, leader: int) -> None:
        rank = self.ranks[leader]
        if rank.requests and not rank.switching:
            self.finished.append(rank.requests.pop(0))

    def answer(self, leader: int, kind: str) -> None:
        rank = self.ranks[leader]
        if rank.owed[kind]:
            rank.outbox.append(rank.owed[kind].popleft())


def deliver(coordinator: Coordinator, rank: Rank, now: float) -> None:
    obj = rank.outbox.popleft()
    if isinstance(obj, m.FromRank):
        coordinator.handle_rank_message(m.decode_from_rank(m.encode(obj)), now)
    else:
        coordinator.reply(rank.rank, obj, now)
