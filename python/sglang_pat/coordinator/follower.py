"""Carrying a schedule out: what the coordinator tells the replicas, and whom it answers when the schedule is over."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_pat import messages as m
from sglang_pat.coordinator.leader import Leader
from sglang_pat.coordinator.schedule import Schedule
from sglang_pat.layout import ParallelLayout

if TYPE_CHECKING:
    from sglang_pat.coordinator.outbox import Outbox


class Follower:
    """The schedule in force; without one (and under any other policy) an empty one.

    Args:
        leaders: the coordinator's, by rank.
        outbox: where messages go.
        active: whether the policy is ``schedule``.
    """

    def __init__(self, leaders: Mapping[int, Leader], base: ParallelLayout, outbox: Outbox, active: bool) -> None:
        self.active = active
        self._leaders = leaders
        self._outbox = outbox
        self._numbers = itertools.count()
        self._queries: list[m.ScheduleQuery] = []
        self._ended_tokens = 0
        self.schedule = Schedule((), base.leaders, self._numbers)
        self._due_in: Schedule | None = None
        """Whose entry is being carried out: another schedule may have been set meanwhile."""

    def set(self, message: m.SetSchedule, layout: ParallelLayout) -> None:
        """Replace the schedule; whoever waits for the old one is answered."""
        if self.active:
            self._answer_waiting()
            self.schedule = Schedule(message.entries, layout.leaders, self._numbers)
            self._tell(self.schedule.begin())
        self._answer(message.query_id)

    def ask(self, query: m.ScheduleQuery) -> None:
        """Answered now or, if it waits, when the schedule is over."""
        if query.wait and not self.schedule.over:
            self._queries.append(query)
        else:
            self._answer(query.query_id)

    def ended(self, tokens: int) -> None:
        """A response of so many tokens has ended."""
        self._ended_tokens += tokens

    def look(self, layout: ParallelLayout) -> m.ScheduleEntry | None:
        """Tell the replicas how far to go; the entry that is due now, if one is."""
        requests = {rank: self._leaders[rank].requests for rank in layout.leaders}
        goes, entry = self.schedule.look(requests, lambda: self._generated(layout))
        self._tell(goes)
        self._due_in = self.schedule if entry is not None else None
        return entry

    def carried_out(self, record: m.SwitchRecord | None) -> None:
        """The entry that was due; ``record``: of its switch, None if there was none to make."""
        due_in, self._due_in = self._due_in, None
        if due_in is not self.schedule:
            return
        self.schedule.carried_out(record)
        if self.schedule.over:
            self._answer_waiting()

    def _tell(self, goes: dict[int, m.Go]) -> None:
        for rank, go in goes.items():
            self._outbox.to_leader(rank, go)

    def _generated(self, layout: ParallelLayout) -> int | None:
        """Tokens generated so far; None if a leader has yet to list its requests."""
        leaders = [self._leaders[rank] for rank in layout.leaders]
        if not all(leader.known for leader in leaders):
            return None
        alive = (request.output for leader in leaders if leader.report for request in leader.report.requests)
        return self._ended_tokens + sum(alive)

    def _answer_waiting(self) -> None:
        waiting, self._queries = self._queries, []
        for query in waiting:
            self._answer(query.query_id)

    def _answer(self, query_id: int) -> None:
        self._outbox.to_server(m.ScheduleReply(query_id=query_id, state=self.schedule.state()))
