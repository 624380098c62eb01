"""Policy ``threshold``: merge when few requests are left.  It needs no profile."""

from __future__ import annotations

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.rules import decide_when_idle, may_raise
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot

SPLIT_FACTOR = 2
"""Merged replicas are split again above this many times the load at which they merge, so that a load
that hovers about the threshold does not switch to and fro."""


def make_threshold_policy(switch_at: int, max_running: int | None = None) -> Policy:
    """Merge into the highest degree when ``switch_at`` requests or fewer are left; split above twice as many.

    Not while more are left than the merged replicas decode at once: the others would wait.

    Args:
        max_running: most requests that one replica decodes at once; None if unbounded.
    """

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = decide_when_idle(snapshot)
        if decision is not None:
            return decision
        base, top = snapshot.degrees[0], snapshot.degrees[-1]
        if snapshot.requests > switch_at * SPLIT_FACTOR:
            return Decision(tp=base)
        room = None if max_running is None else max_running * (snapshot.num_ranks // top)
        few = snapshot.requests <= (switch_at if room is None else min(switch_at, room))
        if few and may_raise(snapshot, draining=snapshot.peak > switch_at):
            return Decision(tp=top)
        return Decision(tp=snapshot.tp)

    return decide
