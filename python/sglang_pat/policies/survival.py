"""Policy ``survival`` (:func:`make_survival_policy`): the least expected time, given how long responses have been in
this run.

PAT bounds the time that is left by the longest response allowed.  Here each running request has a probability of being
left after so many more tokens (:mod:`~sglang_pat.policies.lengths`), and the best course over all layouts and later
moments is computed (:mod:`~sglang_pat.policies.course`).  It is followed as far as the first move, and only where that
move gains more than the estimates can be trusted to tell apart.

Step times are the profile's, times what this run has told (``Snapshot.factors``).  A layout that it says nothing of yet
may be tried out: see :func:`_estimate_with_trial`.

A round of a known size starts in the layout that is best for all of it, before its first request is passed on.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sglang_pat.policies.course import LayoutPlan, LayoutPlanner, Outlook, look_ahead
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.rules import SETTLE_SECONDS, compute_completion_wait, decide_when_idle, may_raise
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot
from sglang_pat.predict.correction import StepFactor
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor

MARGIN = 0.01
"""A switch must gain at least this share of the time that is left without any."""

MARGIN_SECONDS = 0.02
"""Seconds that a switch must gain at least, besides :data:`MARGIN`."""

COOLDOWN = 2.0
"""No switch for this many times its cost after the last one: at most a third of the time goes into switching."""

LOWER = 0.5
"""Share of the switch's cost that lowering tp must gain on top: a wrong estimate costs the way back as well.  Asked of
raising it too, it loses more than it saves."""

TIRED = (1, 1, 2, 2, 4, 25)
"""Factors on the least gain of the first, second, … and any further switch of a round.  The fourth is no dearer than
the third, so that what the third did can be taken back."""

UNKNOWN = 0.06
"""A layout is unknown while the logarithm of its factor beside the present one's has a larger standard deviation."""

SETTLED = 0.04
"""Standard deviation above which a layout that was just entered is not left within :data:`.rules.SETTLE_SECONDS`: some
reports are needed."""

TRIED_AFTER = 2
"""Switches of a round after which no layout is tried out any more."""

TRIAL_COSTS = 2.0
"""Multiple of the switch's cost that trying a layout out must gain on top."""


def make_survival_policy(predictor: StepPredictor, costs: SwitchCosts, max_running: int | None = None) -> Policy:
    """The policy for a deployment.

    Args:
        predictor, costs: step times and switch costs of its profile.
        max_running: requests that one replica decodes at once; None if memory is the only bound.
    """
    planner = LayoutPlanner(predictor, costs, max_running)

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = decide_when_idle(snapshot)
        if decision is not None:
            return decision
        if len(snapshot.coming):
            return _begin(planner, snapshot, history)
        outlook = look_ahead(snapshot.load, history) if len(snapshot.load) else None
        if outlook is None:
            return Decision(tp=snapshot.tp)
        plan = planner.plan(snapshot, outlook)
        tp = _choose(snapshot, plan, _estimate_with_trial(planner, snapshot, outlook, plan))
        return Decision(tp=tp, estimates=plan.by_degree, recompute_below=plan.recompute_below.get(tp, 0))

    return decide


def _begin(planner: LayoutPlanner, snapshot: Snapshot, history: LengthHistory) -> Decision:
    """The decision while a round comes in: where all of it would be done first, whatever is there of it so far.

    Before the first request a switch is all but free, and a small gain is enough; later it costs what it would cost
    with all of them.
    """
    coming, here = snapshot.coming, snapshot.tp
    spread = replace(coming, replica=np.arange(len(coming)) % (snapshot.num_ranks // here))
    outlook = look_ahead(spread, history)
    if outlook is None:
        return Decision(tp=here)
    plan = planner.plan(replace(snapshot, load=spread), outlook)
    totals = {tp: seconds - plan.now.get(tp, 0.0) for tp, seconds in plan.by_degree.items()}
    best = min(totals, key=lambda tp: totals[tp])
    gain = totals[here] - totals[best]
    if best in plan.crowded:
        # Waits are estimated as if all requests went on, more slowly.  In truth some stand still, and end late.  So a
        # course that would leave a degree when its replicas are full must gain more than a layout that has room.
        near = {tp: plan.kept[tp] for tp in totals if totals[tp] <= (1 + MARGIN) * totals[best]}
        best = min(near, key=lambda tp: near[tp])
        gain = near[here] - near[best] if here in near else totals[here] - totals[best]
    if not len(snapshot.load):
        return Decision(tp=best if gain >= MARGIN_SECONDS else here, estimates=totals)
    cost = plan.now.get(best, 0.0)
    worth = gain - cost >= max(MARGIN * totals[here], MARGIN_SECONDS)
    calm = snapshot.now - snapshot.last_switch >= COOLDOWN * cost
    return Decision(tp=best if worth and calm else here, estimates=totals)


def _estimate_with_trial(
    planner: LayoutPlanner, snapshot: Snapshot, outlook: Outlook, plan: LayoutPlan
) -> dict[int, float]:
    """Expected seconds by degree, where the factor of an unknown one is found out on arrival.

    Three values stand for the factor's logarithm (Gauss-Hermite); for each there is a best course, which may be to go
    back at once.  So the less is known of a layout the less it takes, and what it takes is never less than knowing it
    would save.  Only if the plan is to stay: if it is to switch, that is what should be tried.  Only where the next
    step would be faster if the factor were one standard deviation better.
    """
    totals, here = plan.by_degree, snapshot.tp
    if snapshot.switches >= TRIED_AFTER or min(totals, key=lambda tp: totals[tp]) != here:
        return totals
    totals = dict(totals)
    for tp in totals:
        doubt = snapshot.doubts.get(tp, 0.0)
        if tp == here or doubt <= UNKNOWN or 1 - plan.saving[tp] > math.exp(doubt):
            continue
        for off in (-(3**0.5) * doubt, 3**0.5 * doubt):
            factor = snapshot.factors.get(tp, StepFactor())
            factors = {**snapshot.factors, tp: factor._replace(scale=factor.scale * math.exp(off))}
            trial = planner.plan(replace(snapshot, factors=factors), outlook)
            totals[tp] += (trial.by_degree[tp] - plan.by_degree[tp]) / 6
    return totals


def _choose(snapshot: Snapshot, plan: LayoutPlan, totals: dict[int, float]) -> int:
    """The degree to be in: the first move that ``totals`` says, if it is worth it and allowed."""
    best = min(totals, key=lambda tp: totals[tp])
    if best == snapshot.tp:
        return snapshot.tp
    # Against never switching, not against switching one interval later: that gain is always small.
    if plan.kept[snapshot.tp] - totals[best] < _compute_min_gain(snapshot, plan, best):
        return snapshot.tp
    passed = snapshot.now - snapshot.last_switch
    unsettled = snapshot.doubts.get(best, 0.0) > SETTLED and passed < SETTLE_SECONDS
    if unsettled or passed < COOLDOWN * plan.now[best]:
        return snapshot.tp
    settle = compute_completion_wait(plan.now[best], plan.saving[best])
    if best > snapshot.tp and not may_raise(snapshot, settle=settle):
        return snapshot.tp
    return best


def _compute_min_gain(snapshot: Snapshot, plan: LayoutPlan, tp: int) -> float:
    """Seconds that a switch to ``tp`` must gain."""
    doubt, cost = snapshot.doubts.get(tp, 0.0), plan.now[tp]
    least = TIRED[min(snapshot.switches, len(TIRED) - 1)] * max(MARGIN * plan.kept[snapshot.tp], MARGIN_SECONDS)
    if doubt > UNKNOWN:
        least += TRIAL_COSTS * cost
    if tp < snapshot.tp:
        least += LOWER * cost + min(doubt, UNKNOWN) * plan.kept[snapshot.tp]
    return least
