"""Policy ``survival``: the least expected time, given how long responses have been in this run.

PAT bounds the time that is left by the longest response allowed.  Here each running request has a probability of being
left after so many more tokens (:mod:`~sglang_pat.policies.lengths`, :mod:`~sglang_pat.policies.outlook`), and the
best course over all layouts and later moments is computed (:mod:`~sglang_pat.policies.course`).  It is followed as
far as the first move, and only where that move gains more than the estimates can be trusted to tell apart.

A round of a known size starts in the layout that is best for all of it, before its first request is passed on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_pat.policies.course import LayoutPlan, LayoutPlanner
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.outlook import look_ahead
from sglang_pat.policies.rules import forced, may_raise, patience
from sglang_pat.policies.snapshot import Decision, Snapshot

MARGIN = 0.01
"""A switch must gain at least this share of the time that is left without any."""

MARGIN_SECONDS = 0.02
"""And at least this much."""

COOLDOWN = 2.0
"""No switch for this many times its cost after the last one: at most a third of the time goes into switching."""


def survival(predictor, costs, max_running: int | None = None):
    """The policy for a deployment.

    Args:
        predictor, costs: step times and switch costs of its profile.
        max_running: requests that one replica decodes at once; None if memory is the only bound.
    """
    planner = LayoutPlanner(predictor, costs, max_running)

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = forced(snapshot)
        if decision is not None:
            return decision
        if len(snapshot.coming):
            return _begin(planner, snapshot, history)
        outlook = look_ahead(snapshot.load, history) if len(snapshot.load) else None
        if outlook is None:
            return Decision(tp=snapshot.tp)
        plan = planner.plan(snapshot, outlook)
        tp = _choose(snapshot, plan)
        return Decision(tp=tp, estimates=plan.by_degree, recompute_below=plan.recompute_below.get(tp, 0))

    return decide


def _begin(planner: LayoutPlanner, snapshot: Snapshot, history: LengthHistory) -> Decision:
    """While a round comes in: where all of it would be done first, whatever is there of it so far.

    Before the first request a switch is all but free, and a small gain is enough; later it costs what it would cost
    with all of them.
    """
    coming, here = snapshot.coming, snapshot.tp
    spread = replace(coming, replica=np.arange(len(coming)) % (snapshot.num_ranks // here))
    outlook = look_ahead(spread, history)
    if outlook is None:
        return Decision(tp=here)
    plan = planner.plan(replace(snapshot, load=spread), outlook)
    totals = {tp: s - plan.now.get(tp, 0.0) + planner.prefill(snapshot, coming, tp) for tp, s in plan.by_degree.items()}
    best = min(totals, key=lambda tp: totals[tp])
    gain = totals[here] - totals[best]
    if not len(snapshot.load):
        return Decision(tp=best if gain >= MARGIN_SECONDS else here, estimates=totals)
    cost = plan.now.get(best, 0.0)
    worth = gain - cost >= max(MARGIN * totals[here], MARGIN_SECONDS)
    calm = snapshot.now - snapshot.last_switch >= COOLDOWN * cost
    return Decision(tp=best if worth and calm else here, estimates=totals)


def _choose(snapshot: Snapshot, plan: LayoutPlan) -> int:
    """The degree to be in: the first move of the plan, if it is worth it and allowed."""
    best = min(plan.by_degree, key=lambda tp: plan.by_degree[tp])
    if best == snapshot.tp:
        return snapshot.tp
    # Against never switching, not against switching one interval later: that gain is always small.
    gain = plan.never - plan.by_degree[best]
    if gain < max(MARGIN * plan.never, MARGIN_SECONDS):
        return snapshot.tp
    if snapshot.now - snapshot.last_switch < COOLDOWN * plan.now[best]:
        return snapshot.tp
    settle = patience(plan.now[best], plan.saving[best])
    if best > snapshot.tp and not may_raise(snapshot, settle=settle):
        return snapshot.tp
    return best
