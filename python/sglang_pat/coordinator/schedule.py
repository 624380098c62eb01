"""Switches at given steps (:class:`Schedule`): ``--pat-policy schedule``, for tests and to repeat a decision log on a
real engine.

A schedule is a list of entries, carried out one after another.  An entry says when it is due and which degree it
leads to.  While a schedule is in force, every replica works until a point that the coordinator has set, holds there,
and says so (``rank/step_gate.py``).  So an entry is carried out at the same point of the generation on a fast machine
and on a busy one, and nothing ends meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.replicas import Generation, Leader, Outbox
from sglang_pat.layout import ParallelLayout, list_destinations

EXAMPLE = '{"tp": 2, "step": 40}'


def check(values: Iterable[Any], config: AdaptiveConfig) -> list[m.ScheduleEntry]:
    """Entries from plain values; raises ValueError, one line that names the entry and what is wrong with it."""
    degrees = config.list_degrees()
    entries: list[m.ScheduleEntry] = []
    for number, value in enumerate(values, 1):
        try:
            entry = msgspec.convert(value, m.ScheduleEntry)
        except ValueError as error:  # msgspec's ValidationError is one
            raise ValueError(f"entry {number}: {error} (an entry looks like {EXAMPLE})") from None
        if entry.tp not in (None, *degrees):
            raise ValueError(f"entry {number}: tp={entry.tp} is not a candidate; choose one of {degrees}")
        if entry.stride not in (None, 1):
            try:
                config.check_stride(entry.stride)
            except ValueError as error:
                raise ValueError(f"entry {number}: {error}") from None
        entries.append(entry)
    if any(entry.hold for entry in entries[:-1]):
        raise ValueError("hold: only the last entry may have it")
    return entries


@dataclass
class _Replica:
    """What is known of one leader: whether it holds, which ``StepPermit`` it was given last, what its replica has
    done."""

    held: bool = False
    number: int = -1
    steps: int = 0
    batches: int = 0


class Schedule:
    """The schedule in force; without one (and under any other policy) an empty one.

    Life cycle: :meth:`set`; then :meth:`advance` after every event, and :meth:`complete_entry` when an entry that it
    returned has been; over when all have been.

    Args:
        leaders: the coordinator's, by rank.
        active: whether the policy is ``schedule``.
    """

    def __init__(self, leaders: Mapping[int, Leader], base: ParallelLayout, outbox: Outbox, active: bool) -> None:
        self.active = active
        self._leaders, self._outbox = leaders, outbox
        self._queries: list[m.ScheduleQuery] = []
        self._number = self._ended_tokens = 0
        self._begin((), base)

    def _begin(self, entries: Iterable[m.ScheduleEntry], layout: ParallelLayout) -> None:
        self._entries = tuple(entries)
        self._replicas: dict[int, _Replica] = {rank: _Replica() for rank in layout.leaders}
        self._base = None if any(entry.tokens is not None for entry in self._entries) else 0
        """Tokens generated before this schedule; known once all replicas hold."""
        self._next = self._arrived = 0
        self._records: list[m.SwitchRecord] = []
        self._due = False
        """Whether an entry of this schedule is being carried out: another schedule may have been set meanwhile."""

    @property
    def over(self) -> bool:
        return self._next == len(self._entries)

    @property
    def _holding(self) -> bool:
        """Whether replicas hold until there is another schedule."""
        return self.over and bool(self._entries) and self._entries[-1].hold

    # -- the server ---------------------------------------------------------------------------------

    def set(self, message: m.SetSchedule, layout: ParallelLayout) -> None:
        """Replace the schedule; whoever waits for the old one is answered."""
        if self.active:
            self._answer_waiting()
            self._begin(message.entries, layout)
            for rank in layout.leaders:  # hold, or go on without end
                self._make_permit(rank, steps=0 if self._entries else None)
        self._answer_query(message.query_id)

    def answer_query(self, query: m.ScheduleQuery) -> None:
        """Answer a query when the schedule is over."""
        if self.over:
            self._answer_query(query.query_id)
        else:
            self._queries.append(query)

    def _answer_waiting(self) -> None:
        waiting, self._queries = self._queries, []
        for query in waiting:
            self._answer_query(query.query_id)

    def _answer_query(self, query_id: int) -> None:
        state = m.ScheduleState(
            entries=len(self._entries), done=self._next, holding=self._holding, switches=list(self._records)
        )
        self._outbox.send_to_server(m.Reply(query_id=query_id, answer=state))

    # -- events ---------------------------------------------------------------------------------------

    def record_arrival(self, request: Generation) -> None:
        """Count a request that was passed on to a replica."""
        self._arrived += request.counts

    def record_response_end(self, tokens: int) -> None:
        """Count a response of ``tokens`` tokens that has ended."""
        self._ended_tokens += tokens

    def record_hold(self, message: m.HoldReport) -> None:
        """Note that a leader has come to the point that its last ``StepPermit`` set."""
        replica = self._replicas.get(message.rank)
        if replica is None or replica.number != message.number:
            return  # of a schedule that has been replaced
        replica.held = True
        replica.steps += message.steps
        replica.batches += message.batches

    def record_switch(self, old: ParallelLayout, new: ParallelLayout) -> None:
        """Have every replica hold after a switch; what the replicas of a group have done counts once."""
        if self.over and not self._holding:
            self._replicas = {rank: _Replica() for rank in new.leaders}
            return
        before, self._replicas = self._replicas, {}
        for leader in new.leaders:
            came = [before[group] for group in old.leaders if leader in list_destinations(old, new, group)]
            came = came or [before[old.group_of(leader)]]  # it is lent
            steps, batches = max(r.steps for r in came), max(r.batches for r in came)
            self._replicas[leader] = _Replica(held=True, steps=steps, batches=batches)

    def complete_entry(self, record: m.SwitchRecord | None) -> None:
        """Complete the entry that was due; ``record``: of its switch, None if there was none to make."""
        if not self._due:
            return
        self._due = False
        if record is not None:
            self._records.append(record)
        self._next += 1
        if self.over:
            self._answer_waiting()

    # -- what is to happen now ------------------------------------------------------------------------

    def advance(self, layout: ParallelLayout) -> m.ScheduleEntry | None:
        """Tell the replicas how far to go; returns the entry that is due now, if one is."""
        if self.over:
            for rank, replica in self._replicas.items():
                if replica.held and not self._holding:
                    self._make_permit(rank)
            return None
        entry = self._entries[self._next]
        if self._arrived < entry.arrived:
            return None
        requests = {rank: self._leaders[rank].requests for rank in layout.leaders}
        busy = [rank for rank in self._replicas if requests.get(rank)]
        ready = all(self._replicas[rank].held for rank in busy)
        left = None
        if self._base is None or entry.tokens is not None:
            # As long as some replicas work, the count grows under our hands.
            total = self._count_generated_tokens(layout) if ready else None
            if total is None:
                return None
            self._base = total if self._base is None else self._base
            left = None if entry.tokens is None else entry.tokens - (total - self._base)
        if ready and self._is_due(entry, busy, left):
            self._due = True
            return entry
        for rank in busy:
            if not (replica := self._replicas[rank]).held:
                continue
            if point := self._compute_next_point(entry, replica, sum(requests.values()), left):
                self._make_permit(rank, **point)
        return None

    def _is_due(self, entry: m.ScheduleEntry, busy: list[int], left: int | None) -> bool:
        """Whether an entry is due where all replicas with requests hold; ``left``: tokens yet to be generated, where
        the entry counts them."""
        if left is not None:
            return left <= 0
        for name, point in (("steps", entry.step), ("batches", entry.batch)):
            if point is not None:
                done = {rank: getattr(replica, name) >= point for rank, replica in self._replicas.items()}
                return any(done.values()) and all(done[rank] for rank in busy)
        return True

    @staticmethod
    def _compute_next_point(entry: m.ScheduleEntry, replica: _Replica, alive: int, left: int | None) -> dict[str, int]:
        """Fields of the ``StepPermit`` by which a replica that holds may go on towards ``entry``; none if it has to
        wait for the others."""
        if left is not None:
            # Never far beyond it, as a step gives each request a token: nearer with every stop.
            return {"steps": max(1, left // alive)}
        if entry.step is not None and replica.steps < entry.step:
            return {"steps": entry.step - replica.steps}
        if entry.batch is not None and replica.batches < entry.batch:
            return {"batches": entry.batch - replica.batches}
        return {}

    def _count_generated_tokens(self, layout: ParallelLayout) -> int | None:
        """Number of tokens generated so far; None if a leader has yet to list its requests."""
        leaders = [self._leaders[rank] for rank in layout.leaders]
        if not all(leader.known for leader in leaders):
            return None
        alive = (request.output for leader in leaders if leader.report for request in leader.report.requests)
        return self._ended_tokens + sum(alive)

    def _make_permit(self, rank: int, **point: Any) -> None:
        replica = self._replicas[rank]
        replica.held, replica.number = False, self._number
        self._number += 1
        self._outbox.send_to_leader(rank, m.StepPermit(number=replica.number, **point))
