"""Policy ``pat``: PAT's Algorithm 1 (section 4.2), which the others are measured against.

The time that is left under a layout is taken to be

    (longest response allowed - its present length) x (step time of the present batch in that layout)

as if no request ended before the limit of the longest and contexts stayed as they are.  Unfinished requests count as
spread evenly over the replicas, and for another layout the cost of the switch is added.  The layout with the smallest
total is chosen, and switched to if its total is below that of staying.  Invoked again and again it may switch
several times in one batch.
"""

from __future__ import annotations

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.rules import compute_completion_wait, decide_when_idle, may_raise, predict_as_seen
from sglang_pat.policies.snapshot import Decision, Load, Policy, Snapshot
from sglang_pat.predict.cost import SwitchCost, SwitchCosts
from sglang_pat.predict.predictor import StepPredictor


def make_pat_policy(predictor: StepPredictor, costs: SwitchCosts) -> Policy:
    """Algorithm 1 with the step times of ``predictor`` and the switch costs of ``costs``."""

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = decide_when_idle(snapshot)
        if decision is not None:
            return decision
        if len(snapshot.load) == 0:
            return Decision(tp=snapshot.tp)
        totals, switch = choose_degree_by_pat(snapshot, predictor, costs)
        best = min(totals, key=lambda tp: totals[tp])
        if totals[best] >= totals[snapshot.tp] or totals[snapshot.tp] == 0:
            best = snapshot.tp  # with nothing left to save, too
        if best == snapshot.tp:
            return Decision(tp=best, estimates=totals)
        cost = switch[best]
        settle = compute_completion_wait(cost.seconds, 1 - (totals[best] - cost.seconds) / totals[snapshot.tp])
        if best > snapshot.tp and not may_raise(snapshot, settle=settle):
            return Decision(tp=snapshot.tp, estimates=totals)
        return Decision(tp=best, estimates=totals, recompute_below=cost.recompute_below)

    return decide


def choose_degree_by_pat(
    snapshot: Snapshot, predictor: StepPredictor, costs: SwitchCosts
) -> tuple[dict[int, float], dict[int, SwitchCost]]:
    """Lines 4 to 14: total predicted seconds by degree, and the switch to each degree other than the present."""
    load: Load = snapshot.load
    lengths = load.prompt + load.output
    mean = float(lengths.mean())
    predictor = predict_as_seen(predictor, snapshot)
    remaining = max(int((load.limit - load.output).max()), 0)
    totals: dict[int, float] = {}
    switch: dict[int, SwitchCost] = {}
    for tp in snapshot.degrees:
        replicas = min(len(load), snapshot.num_ranks // tp)
        batch = -(-len(load) // replicas)  # of the fullest replica, for which the others wait
        totals[tp] = remaining * predictor.step_seconds(tp, batch, batch * mean, replicas)
        if tp != snapshot.tp:
            switch[tp] = costs.estimate(snapshot.tp, tp, lengths)
            totals[tp] += switch[tp].seconds
    return totals, switch
