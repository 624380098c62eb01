"""When to switch, and to what: pure functions of a snapshot and of the response lengths seen so far.

``threshold`` (here) needs no profile.  ``pat`` (PAT's Algorithm 1) and ``survival`` predict the time that is left,
for which they are given the predictor and the switch costs of a profile.  ``docs/policies.md`` compares them.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_pat.config import PREDICTING
from sglang_pat.coordinator.lengths import LengthHistory
from sglang_pat.coordinator.pat import pat
from sglang_pat.coordinator.rules import forced, may_raise
from sglang_pat.coordinator.snapshot import Decision, Snapshot
from sglang_pat.coordinator.survival import survival

SPLIT_FACTOR = 2
"""Merged replicas are split again above this many times the load at which they merge, so that a load
that hovers about the threshold does not switch to and fro."""

Policy = Callable[[Snapshot, LengthHistory], Decision]
"""Says which degree to be in; the one in force means stay.  Reads both arguments and changes neither."""


def stay(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """``manual`` and ``schedule``: others say when to switch."""
    return Decision(tp=snapshot.tp)


def base_only(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """``off``: never leave the base layout."""
    return Decision(tp=snapshot.degrees[0])


def threshold(switch_at: int, max_running: int | None = None) -> Policy:
    """Merge into the highest degree when ``switch_at`` requests or fewer are left; split above twice as many.

    Not while more are left than the merged replicas decode at once: the others would wait.

    Args:
        max_running: most requests that one replica decodes at once; None if unbounded.
    """

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = forced(snapshot)
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


def make_policy(
    name: str, *, switch_at: int = 8, predictor=None, costs=None, max_running: int | None = None
) -> Policy:
    """The policy called ``name``.

    Args:
        switch_at: of ``threshold``.
        predictor, costs: :class:`~sglang_pat.predict.predictor.Predictor` and
            :class:`~sglang_pat.predict.cost.SwitchCosts` of this deployment, for ``pat`` and ``survival``.
        max_running: most requests that one replica decodes at once (``--max-running-requests``), for ``survival``.

    Raises:
        ValueError: no such policy, or it needs a profile and there is none.
    """
    if name in PREDICTING and (predictor is None or costs is None):
        raise ValueError(
            f"policy {name} needs a profile: give --pat-profile FILE (python -m profiler.sweep makes one) "
            "or choose threshold"
        )
    makers = {
        "survival": lambda: survival(predictor, costs, max_running),
        "pat": lambda: pat(predictor, costs),
        "threshold": lambda: threshold(switch_at, max_running),
        "schedule": lambda: stay,
        "manual": lambda: stay,
        "off": lambda: base_only,
    }
    if name not in makers:
        raise ValueError(f"policy {name!r}: choose one of {', '.join(makers)}")
    return makers[name]()
