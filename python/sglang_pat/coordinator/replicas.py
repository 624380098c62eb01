"""The replicas as the coordinator knows them (:class:`Leader`): what goes to their leaders (:class:`Outbox`), their
load (:func:`sum_load`), and who gets the next request (:meth:`PrefixPlaces.choose`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from sglang_pat import messages as m
from sglang_pat.figures import Figures
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.prompts import compute_allowed_lead
from sglang_pat.policies.snapshot import Decision, Load, Snapshot


class Outbox(Protocol):
    """The coordinator's effects: its only way to act."""

    def send_to_leader(self, rank: int, obj: Any) -> None:
        """Send one of our messages, or an object of SGLang's, to a leader; its group gets it, too."""

    def send_to_server(self, obj: Any) -> None:
        """Send an answer to the server."""

    def record_switch(self, record: m.SwitchRecord) -> None:
        """Tell logs and metrics of a switch that ended."""

    def record_steps(self, counts: m.StepCounts) -> None:
        """Tell metrics of a replica's decode steps."""

    def record_training_step(self, step: Figures) -> None:
        """Tell that a step of whoever trains ended, and what it took."""

    def start_counting_requests(self) -> None:
        """Tell the decision log that requests count from now on."""

    def log_decision(self, snapshot: Snapshot, decision: Decision) -> None:
        """Tell the decision log that the policy was asked, and what it answered."""

    def log_response(self, response: m.Finished) -> None:
        """Tell the decision log of a response that ended."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation request: goes to one leader.

    Attributes:
        tokens: length of its prompt; ``generated``: tokens of it that are the beginning of its response.
        family: equal for siblings, as in load reports; None for a prompt that is not long (``policies.prompts``).
        limit: the longest response that policies reckon with, until its leader reports it.
        counts: schedules and decision logs count it; not a health probe, which comes at any time.
        round: the name of its round, as it says itself; "": it does not say.
    """

    obj: Any
    tokens: int
    family: int | None = None
    limit: int = 4096
    generated: int = 0
    counts: bool = True
    round: str = ""


@dataclass(slots=True)
class Leader:
    """What is known of one leader.

    Attributes:
        sent: requests sent to it so far.
        on_the_way: requests that it has not yet taken from its socket; a long prefill may keep them there for seconds.
        requests: requests that it has, on their way included.
        tokens: KV tokens of the running ones and prompts of those on their way.
        known: whether the report lists the requests one by one; what is assumed right after a switch does not.
    """

    sent: int = 0
    on_the_way: deque[Generation] = field(default_factory=deque)
    report: m.LoadReport | None = None
    requests: int = 0
    tokens: int = 0
    known: bool = True

    def send(self, request: Generation) -> None:
        self.sent += 1
        self.on_the_way.append(request)
        self.requests += 1
        self.tokens += request.tokens

    def apply_report(self, report: m.LoadReport) -> None:
        tokens = self.tokens - (self.report.tokens if self.report else 0)
        self.report = report
        while len(self.on_the_way) > self.in_flight:
            tokens -= self.on_the_way.popleft().tokens
        self.requests = report.running + report.waiting + self.in_flight
        self.tokens = report.tokens + tokens
        self.known = len(report.requests) == report.running + report.waiting

    def make_report_after_switch(self, reply: m.RankSwitched, layout: ParallelLayout) -> m.LoadReport:
        """The report that the leader would send right after a switch to ``layout``, by its account of it."""
        return m.LoadReport(
            rank=reply.rank,
            tp=layout.tp,
            stride=layout.stride,
            received=self.sent,
            running=reply.migrated,
            waiting=reply.requests_out - reply.migrated,
            tokens=reply.tokens,
            kv_used=reply.tokens,
            kv_total=0,
            retracted=0,
            weight_updates=0,
            kv_totals=self.report.kv_totals if self.report else {},
        )

    @property
    def in_flight(self) -> int:
        return self.sent - (self.report.received if self.report else 0)

    @property
    def decoding(self) -> bool:
        """Whether the leader had running requests when it last reported."""
        return self.report is not None and self.report.running > 0

    @property
    def cost(self) -> tuple[int, int]:
        """Requests, then tokens: the next request goes to where this is least."""
        return self.requests, self.tokens

    def get_status(self) -> dict[str, int]:
        """The leader's fields in ``/pat/status``."""
        fields = ("running", "waiting", "tokens", "kv_used", "kv_total", "weight_updates")
        report = {name: getattr(self.report, name) if self.report else 0 for name in fields}
        return {"in_flight": self.in_flight} | report


def is_report_of(report: m.LoadReport, layout: ParallelLayout) -> bool:
    """Whether the replica worked in ``layout`` when it reported."""
    return (report.tp, report.stride) == (layout.tp, layout.stride)


def sum_load(leaders: Mapping[int, Leader], ranks: Iterable[int]) -> Load:
    """The requests, one by one, at the leaders of these ranks, which are the replicas 0, 1, … that work."""
    rows: list[tuple[int, ...]] = []
    for replica, rank in enumerate(ranks):
        leader = leaders[rank]
        rows += [(*msgspec.structs.astuple(r), replica) for r in (leader.report.requests if leader.report else ())]
        # Of short prompts siblings are not known yet: a family of its own for each, which no hash of a prompt is.
        first = -1 - len(rows)
        rows += [
            (
                request.tokens - request.generated,
                request.generated,
                request.limit,
                first - i if request.family is None else request.family,
                replica,
            )
            for i, request in enumerate(leader.on_the_way)
        ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Load(**dict(zip(("prompt", "output", "limit", "family", "replica"), columns, strict=True)))


REMEMBERED = 512
"""Number of long prompts that are remembered: those sent last."""


class PrefixPlaces:
    """The leader that was last sent each long prompt: siblings find it in the radix tree of that replica.

    What has left the tree since is computed again, as anywhere else.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def choose(
        self, request: Generation, layout: ParallelLayout, leaders: Mapping[int, Leader], response: float
    ) -> int:
        """The leader with the least load; or the one that has the prompt, if it is long and that replica not much
        fuller.

        Args:
            layout: the one in force; those of ``leaders`` that work in it are chosen from.
            response: tokens that a response is expected to have.
        """
        least = min(layout.working, key=lambda rank: leaders[rank].cost)
        if request.family is None:
            return least
        # A merged replica has what its parts had.
        has = layout.get_working_group(self._last.pop(request.family, least))
        fuller = leaders[has].requests - leaders[least].requests
        chosen = has if fuller <= compute_allowed_lead(request.tokens - request.generated, response) else least
        self._last[request.family] = chosen
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
        return chosen


def forecast_switch(
    leaders: Mapping[int, Leader], old: ParallelLayout, new: ParallelLayout, max_running: int | None
) -> dict[str, Any]:
    """What a switch would do to the requests that are alive; by what the leaders last reported, up to 32 steps ago.

    Args:
        max_running: requests that a replica decodes at once; None if unbounded.

    Returns:
        ``requests`` that would be handed over, ``tokens`` of KV of those that decode; ``parked``: how many of these
        would wait for a decode slot, with their KV as far as it fits, since the new replicas decode fewer at once;
        ``recomputed_tokens``: KV for which the new replicas have no room, prefixes in common counted for each request.
    """
    reports = {rank: leaders[rank].report for rank in old.leaders}
    running = {rank: report.running if report else 0 for rank, report in reports.items()}
    tokens = {rank: report.tokens if report else 0 for rank, report in reports.items()}
    parked = lost = 0
    for leader in new.working:
        decoding, held = (_compute_amount_after(amounts, old, new, leader) for amounts in (running, tokens))
        parked += max(0, decoding - max_running) if max_running is not None else 0
        report = leaders[leader].report
        room = report.kv_totals.get(new.tp) if report else None
        # A slot more for the next token of each that goes on.
        going = decoding if max_running is None else min(decoding, max_running)
        lost += max(0, held + going - room) if room is not None else 0
    return {
        "from_tp": old.tp,
        "to_tp": new.tp,
        "requests": sum(leaders[rank].requests for rank in old.leaders),
        "tokens": sum(tokens.values()),
        "parked": parked,
        "recomputed_tokens": lost,
    }


def _compute_amount_after(amounts: Mapping[int, int], old: ParallelLayout, new: ParallelLayout, leader: int) -> int:
    """What the replica of ``leader`` would get, where each old one has ``amounts``: all of those that merge, its share
    of one that is split."""
    if new.tp >= old.tp:
        return sum(amounts[group] for group in {old.group_of(rank) for rank in new.group(leader)})
    return -(-amounts[old.group_of(leader)] * new.tp // old.tp)
