"""The life of a switch as the coordinator sees it: prepare, compile grammars if need be, switch; or cancel.

What the ranks do meanwhile is in ``switch/executor.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_pat import messages as m
from sglang_pat.coordinator.outbox import Outbox
from sglang_pat.layout import ParallelLayout

CALIBRATION = "calibration"
"""Reason of switches that no status, record or metric counts."""


@dataclass(frozen=True)
class Wanted:
    """A switch that is to start as soon as nothing stands in its way.

    Attributes:
        reason: who wants it: a policy's name, ``request``, ``control``, ``schedule`` or :data:`CALIBRATION`.
        query_id: of the client who waits for an answer.
        recompute_below: requests with fewer KV tokens are recomputed.
        ahead: of a round, whose requests wait for it.
    """

    target: ParallelLayout
    reason: str
    query_id: int | None = None
    recompute_below: int = 0
    ahead: bool = False


@dataclass
class UnderWay:
    """A switch under way.

    Attributes:
        commanded: decoding may have stopped already: what arrives waits.
        compiling: the current command is the second part of the preparation.
        prepared: answers to PREPARE, or to its second part, by rank.
        reports: of the ranks that have switched.
        early: load reports of ranks that already work in the new layout while others still switch.
    """

    wanted: Wanted
    source: ParallelLayout
    epoch: int
    started: float
    commanded: bool = False
    compiling: bool = False
    prepare_seconds: float = 0.0
    prepared: dict[int, m.Prepared] = field(default_factory=dict)
    reports: dict[int, m.RankSwitched] = field(default_factory=dict)
    early: dict[int, m.LoadReport] = field(default_factory=dict)

    @property
    def target(self) -> ParallelLayout:
        return self.wanted.target

    @property
    def ahead(self) -> bool:
        return self.wanted.ahead


@dataclass(frozen=True)
class Ended:
    """How a switch ended.

    Attributes:
        switch: as it was at the end.
    """

    switch: UnderWay
    record: m.SwitchRecord


class Switching:
    """At most one switch at a time.

    Life cycle: :meth:`start`; :meth:`heard` for each answer of a rank; :meth:`command` once :attr:`prepared`; over
    when :meth:`heard` says how it ended.

    Attributes:
        under_way: the switch, None while there is none.
    """

    def __init__(self, num_ranks: int, outbox: Outbox) -> None:
        self.under_way: UnderWay | None = None
        self._num_ranks, self._outbox = num_ranks, outbox
        self._epoch = 0

    @property
    def commanded(self) -> bool:
        return self.under_way is not None and self.under_way.commanded

    @property
    def prepared(self) -> bool:
        """All ranks are, and the switch is not commanded yet."""
        switch = self.under_way
        return switch is not None and not switch.commanded and len(switch.prepared) == self._num_ranks

    @property
    def _switch(self) -> UnderWay:
        assert self.under_way is not None, "no switch is under way"
        return self.under_way

    def start(self, wanted: Wanted, source: ParallelLayout, now: float) -> None:
        """PREPARE, on all ranks; decoding goes on."""
        self._epoch += 1
        self.under_way = UnderWay(wanted, source, self._epoch, now)
        about = dict(epoch=self._epoch, tp=wanted.target.tp, recompute_below=wanted.recompute_below)
        for rank in source.leaders:
            self._outbox.to_leader(rank, m.Prepare(**about))

    def command(self) -> None:
        """The switch itself: decoding stops at the next step."""
        switch = self._switch
        switch.commanded = True
        for rank in switch.source.leaders:
            below = switch.wanted.recompute_below
            command = m.Switch(epoch=switch.epoch, tp=switch.target.tp, recompute_below=below)
            self._outbox.to_leader(rank, command)

    def early(self, report: m.LoadReport) -> None:
        """Of a rank that is ahead of others.  Ranks report on a change only: dropped, this one might not come again."""
        if self.commanded and report.tp == self._switch.target.tp:
            self._switch.early[report.rank] = report

    def heard(self, message: m.Prepared | m.RankSwitched) -> Ended | None:
        """The answer of a rank; returns how the switch ended if this was the last one.

        Raises:
            RuntimeError: the ranks disagree about the end, or lost requests.
        """
        switch = self.under_way
        if switch is None or message.epoch != switch.epoch:
            return None
        if isinstance(message, m.RankSwitched):
            switch.reports[message.rank] = message
            return self._switched() if len(switch.reports) == self._num_ranks else None
        switch.prepared[message.rank] = message
        return self._prepared() if len(switch.prepared) == self._num_ranks else None

    def _prepared(self) -> Ended | None:
        switch = self._switch
        switch.prepare_seconds += max(reply.seconds for reply in switch.prepared.values())
        errors = [reply.error for reply in switch.prepared.values() if reply.error]
        if errors:
            for rank in switch.source.leaders:
                self._outbox.to_leader(rank, m.Cancel(epoch=switch.epoch))
            return self._end("; ".join(errors))
        if not switch.compiling and any(reply.grammars for reply in switch.prepared.values()):
            self._compile()
        return None

    def _compile(self) -> None:
        """Each rank compiles the grammars of those groups that it joins."""
        switch = self._switch
        named = {rank: switch.prepared[rank].grammars for rank in switch.source.leaders}
        switch.compiling, switch.prepared = True, {}
        for rank in switch.source.leaders:
            counts: Counter[tuple[str, str]] = Counter()
            for other, grammars in named.items():
                if other != rank and switch.target.group_of(other) == switch.target.group_of(rank):
                    counts.update({(grammar.kind, grammar.text): grammar.count for grammar in grammars})
            wanted = [m.Grammar(kind=kind, text=text, count=count) for (kind, text), count in counts.items()]
            self._outbox.to_leader(rank, m.Compile(epoch=switch.epoch, grammars=wanted))

    def _switched(self) -> Ended:
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
        return self._end(
            error,
            pause_seconds=max(sum(reply.phases.values()) for reply in replies),
            phases=phases,
            requests=went,
            migrated=sum(reply.migrated for reply in replies),
            parked=sum(reply.parked for reply in replies),
            recomputed=sum(reply.recomputed for reply in replies),
            recomputed_tokens=sum(reply.recomputed_tokens for reply in replies),
            tokens=sum(reply.tokens for reply in replies),
            moved_bytes=sum(reply.moved_bytes for reply in replies),
        )

    def _end(self, error: str, **totals: Any) -> Ended:
        switch, self.under_way = self._switch, None
        nothing: dict[str, Any] = {"pause_seconds": 0.0, "phases": {}}
        record = m.SwitchRecord(
            epoch=switch.epoch,
            from_tp=switch.source.tp,
            to_tp=switch.target.tp,
            reason=switch.wanted.reason,
            started=switch.started,
            error=error,
            **nothing | totals,
        )
        return Ended(switch, record)
