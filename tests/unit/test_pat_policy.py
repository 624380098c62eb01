"""PAT's Algorithm 1 against a transcription of it, and the rules around it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import STAY

from .drawn import examples
from .policy_world import crossing, machine, profiles, snapshot, snapshots

pytestmark = pytest.mark.unit

HISTORY = LengthHistory()


def algorithm_1(snap, predictor, costs) -> tuple[int, dict[int, float]]:
    """PAT section 4.2, line by line; the degree to be in, and every total."""
    # Lines 1 to 3: unfinished samples and how far the longest may still go.
    unfinished = list(zip(snap.load.prompt, snap.load.output, snap.load.limit, strict=True))
    longest_remaining = max([limit - output for _, output, limit in unfinished] + [0])
    contexts = [int(prompt + output) for prompt, output, _ in unfinished]

    def remaining_time(tp):
        dp = snap.num_ranks // tp
        used = min(dp, len(unfinished))
        merged_batch = math.ceil(len(unfinished) / used)
        merged_tokens = merged_batch * sum(contexts) / len(unfinished)  # as many as its requests have on average
        return longest_remaining * predictor.step_seconds(tp, merged_batch, merged_tokens, used)

    # Line 4: staying.
    current = remaining_time(snap.tp)
    best, target, totals = current, snap.tp, {snap.tp: current}
    # Lines 6 to 14: every candidate, with the cost of the switch.
    for tp in snap.degrees:
        if tp == snap.tp:
            continue
        totals[tp] = remaining_time(tp) + costs.estimate(snap.tp, tp, np.array(contexts)).seconds
        if totals[tp] < best:
            best, target = totals[tp], tp
    # Line 15: only if cheaper than staying.
    return (target if best < current else snap.tp), totals


@examples(80)
@given(profiles(), snapshots())
def test_as_transcribed(found, snap):
    predictor, costs = machine(found)
    snap = dataclasses.replace(
        snap, requests=len(snap.load), peak=100, last_arrival=-1e9, last_switch=-1e9, last_abort=-1e9
    )
    decision = make_policy("pat", predictor=predictor, costs=costs)(snap, HISTORY)
    if len(snap.load) == 0:
        assert decision.tp == (snap.tp if snap.in_round else 1)
        return
    tp, totals = algorithm_1(snap, predictor, costs)
    assert decision.estimates == pytest.approx(totals, rel=1e-12)
    if len(set(totals.values())) == len(totals):
        assert decision.tp == tp


def test_nothing_left_to_generate_is_no_division_by_zero():
    """Switch costs below 0 are no sensible profile's, and no reason to die."""

    class Costs:
        def estimate(self, from_tp, to_tp, lengths):
            return dataclasses.replace(STAY, seconds=-1.0)

    predictor, _ = machine(crossing())
    decision = make_policy("pat", predictor=predictor, costs=Costs())(snapshot([4096] * 2, peak=64), HISTORY)
    assert decision.tp == 1
