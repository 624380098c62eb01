"""What is known about the leaders' load: their last reports, and what was sent to them since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sglang_pat import messages as m
from sglang_pat.policies.snapshot import Load


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation request: goes to one leader.

    Attributes:
        tokens: its prompt length; ``generated``: those of them that are the beginning of its response.
        family: equal for siblings, as in load reports; None for a prompt that is not long (``policies.prompts``).
        limit: the longest response that policies reckon with, until its leader reports it.
        counts: schedules and decision logs count it; not a health probe, which comes at any time.
    """

    obj: Any
    tokens: int
    family: int | None = None
    limit: int = 4096
    generated: int = 0
    counts: bool = True


@dataclass(slots=True)
class Leader:
    """One leader.

    Attributes:
        sent: requests sent to it so far.
        on_the_way: those that it has not yet taken from its socket; a long prefill may keep them there for seconds.
        requests: those that it has, on their way included.
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

    def heard(self, report: m.LoadReport) -> None:
        tokens = self.tokens - (self.report.tokens if self.report else 0)
        self.report = report
        while len(self.on_the_way) > self.in_flight:
            tokens -= self.on_the_way.popleft().tokens
        self.requests = report.running + report.waiting + self.in_flight
        self.tokens = report.tokens + tokens
        self.known = len(report.requests) == report.running + report.waiting

    def handed(self, reply: m.RankSwitched, tp: int) -> m.LoadReport:
        """What it would report right after a switch to degree ``tp``, by its account of it."""
        return m.LoadReport(
            rank=reply.rank,
            tp=tp,
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
        """Whether it has running requests, as it last said."""
        return self.report is not None and self.report.running > 0

    @property
    def cost(self) -> tuple[int, int]:
        """The next request goes to where this is least: requests, then tokens."""
        return self.requests, self.tokens

    def status(self) -> dict[str, int]:
        """For ``/pat/status``."""
        fields = ("running", "waiting", "tokens", "kv_used", "kv_total", "weight_updates")
        report = {name: getattr(self.report, name) if self.report else 0 for name in fields}
        return {"in_flight": self.in_flight} | report


def load_of(leaders: Mapping[int, Leader], ranks: Iterable[int]) -> Load:
    """All requests at the leaders of these ranks, one by one."""
    rows: list[tuple[int, ...]] = []
    for rank in ranks:
        leader = leaders[rank]
        rows += [(*msgspec.structs.astuple(r), rank) for r in (leader.report.requests if leader.report else ())]
        # Of short prompts siblings are not known yet: a family of its own for each, which no hash of a prompt is.
        first = -1 - len(rows)
        rows += [
            (
                request.tokens - request.generated,
                request.generated,
                request.limit,
                first - i if request.family is None else request.family,
                rank,
            )
            for i, request in enumerate(leader.on_the_way)
        ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Load(**dict(zip(("prompt", "output", "limit", "family", "replica"), columns, strict=True)))
