"""Policy ``pat``: PAT's Algorithm 1 (section 4.2), which the others are measured against.

The time that is left under a layout is taken to be

    (longest response allowed - its present length) x (step time of the present batch in that layout)

as if no request ended before the limit of the longest and contexts stayed as they are.  For another layout the
unfinished requests are spread evenly over its replicas and the cost of the switch is added.  The layout with the
smallest total is chosen, and switched to if its total is below that of staying.  Invoked again and again it may switch
several times in one batch.
"""

from __future__ import annotations

from sglang_pat.coordinator.lengths import LengthHistory
from sglang_pat.coordinator.rules import forced, may_raise
from sglang_pat.coordinator.snapshot import Decision, Load, Snapshot
from sglang_pat.coordinator.spread import assigned, even


def pat(predictor, costs):
    """Algorithm 1 with the step times of ``predictor`` and the switch costs of ``costs``."""

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        decision = forced(snapshot)
        if decision is not None:
            return decision
        if len(snapshot.load) == 0:
            return Decision(tp=snapshot.tp)
        totals, below = algorithm_1(snapshot, predictor, costs)
        best = min(totals, key=totals.get)
        if totals[best] >= totals[snapshot.tp]:
            best = snapshot.tp
        if best > snapshot.tp and not may_raise(snapshot):
            best = snapshot.tp
        return Decision(tp=best, estimates=totals, recompute_below=below.get(best, 0))

    return decide


def algorithm_1(snapshot: Snapshot, predictor, costs) -> tuple[dict[int, float], dict[int, int]]:
    """Lines 4 to 14: total predicted seconds by degree, and ``recompute_below`` by degree other than the present."""
    load: Load = snapshot.load
    lengths = load.prompt + load.output
    remaining = max(int((load.limit - load.output).max()), 0)
    batch, tokens = assigned(load.replica, lengths)
    steps = predictor.step_seconds(snapshot.tp, batch, tokens, len(batch))
    totals = {snapshot.tp: remaining * float(steps.max())}
    below = {}
    for tp in snapshot.degrees:
        if tp == snapshot.tp:
            continue
        replicas, batch, tokens = even(len(load), float(lengths.sum()), snapshot.num_ranks // tp)
        cost = costs.estimate(snapshot.tp, tp, lengths)
        totals[tp] = remaining * predictor.step_seconds(tp, batch, tokens, replicas) + cost.seconds
        below[tp] = cost.recompute_below
    return dict(sorted(totals.items())), below
