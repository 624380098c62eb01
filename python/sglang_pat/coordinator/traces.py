"""The steps of all ranks, gathered for ``Engine.trace()``."""

from __future__ import annotations

import msgspec

from sglang_pat import messages as m
from sglang_pat.coordinator.outbox import Outbox


class Traces:
    """Traces that were asked for and are not complete.

    Args:
        num_ranks: ranks that answer each query.
        outbox: where the server gets its answer.
    """

    def __init__(self, num_ranks: int, outbox: Outbox) -> None:
        self._num_ranks, self._outbox = num_ranks, outbox
        self._heard: dict[int, list[m.RankTrace]] = {}

    def asked(self, query_id: int) -> None:
        """Every rank is."""
        self._heard[query_id] = []

    def heard(self, trace: m.RankTrace) -> None:
        """The answer of a rank; the server gets all of them as one with the last."""
        traces = self._heard.get(trace.query_id)
        if traces is None:
            return  # nobody waits for it
        traces.append(trace)
        if len(traces) < self._num_ranks:
            return
        steps = [{"rank": t.rank} | msgspec.structs.asdict(step) for t in traces for step in t.steps]
        steps.sort(key=lambda step: step["at"])
        del self._heard[trace.query_id]
        self._outbox.to_server(m.TraceReply(query_id=trace.query_id, steps=steps))
