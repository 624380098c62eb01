"""The policies that predict in known situations; survival: what it expects, and that it does not go to and fro."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from sglang_pat.config import POLICIES
from sglang_pat.policies import course, lengths
from sglang_pat.policies.course import LayoutPlan, LayoutPlanner
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.rules import MIN_PATIENCE_SECONDS, RETRY_SECONDS, SETTLE_SECONDS, compute_completion_wait
from sglang_pat.policies.survival import _choose
from sglang_pat.predict.correction import StepFactor

from .drawn import examples
from .policy_world import crossing, machine, profiles, snapshot, snapshots
from .profiles_for_tests import decode_points, prefill_points

pytestmark = pytest.mark.unit


def policy(found):
    predictor, costs = machine(found)
    return make_policy("survival", predictor=predictor, costs=costs)


def learnt(median=400, sigma=0.8, responses=2000, seed=0) -> LengthHistory:
    history = LengthHistory()
    lengths = np.exp(np.log(median) + sigma * np.random.default_rng(seed).normal(size=responses))
    for index, length in enumerate(np.minimum(lengths, 4096).astype(int)):
        history.observe(length, -1 - index)
    return history


LEARNT = learnt()


def make_factors(scales: dict[int, float]) -> dict[int, StepFactor]:
    return {tp: StepFactor(scales.get(tp, 1.0)) for tp in (1, 2, 4)}


DECIDE = policy(crossing())

PREDICTING = ("survival", "pat")
CASES = [
    ("full batch", dict(outputs=[10] * 128, peak=256), 1, PREDICTING),
    ("tail", dict(outputs=[1000] * 2, peak=64), 4, PREDICTING),
    ("tail at the limit", dict(outputs=[4096] * 2, peak=64), 1, PREDICTING),
    ("tail, nearly at the limit: not worth it", dict(outputs=[4090] * 2, peak=64), 1, PREDICTING),
    ("merged and the load came back", dict(outputs=[10] * 128, tp=4, quiet=0.0), 1, PREDICTING),
    ("empty", dict(tp=4), 1, PREDICTING),
    ("empty, and the round goes on", dict(tp=4, in_round=True), 4, PREDICTING),
    ("a few, just come in", dict(outputs=[0] * 2, quiet=0.0), 1, PREDICTING),
    ("a few, nothing else came", dict(outputs=[0] * 2, quiet=SETTLE_SECONDS), 4, PREDICTING),
    ("a few, just come in, and no more are expected", dict(outputs=[0] * 2, quiet=0.0, complete=True), 4, PREDICTING),
    ("no more are expected, but just switched", dict(outputs=[0] * 2, complete=True, since_switch=0.5), 1, PREDICTING),
    ("no more, and a full batch it is", dict(outputs=[10] * 128, quiet=0.0, complete=True), 1, PREDICTING),
    ("merged, one more comes", dict(outputs=[500, 0], tp=4, quiet=0.0), 4, PREDICTING),
    ("just switched", dict(outputs=[1000] * 2, peak=64, since_switch=0.5), 1, PREDICTING),
    ("just aborted", dict(outputs=[1000] * 2, peak=64, since_abort=RETRY_SECONDS - 0.1), 1, PREDICTING),
    ("known by number only", dict(requests=5, tp=2), 2, PREDICTING),
    ("a small round begins", dict(requests=1, coming=2, quiet=0.0, since_switch=0.0), 4, ("survival",)),
    ("a large round begins", dict(requests=1, coming=128, quiet=0.0), 1, PREDICTING),
    ("a large round begins, merged", dict(requests=1, coming=128, tp=4, quiet=0.0), 1, ("survival",)),
    ("a small round comes in", dict(outputs=[0], coming=2, quiet=0.0), 4, ("survival",)),
    ("a small round comes in, just switched", dict(outputs=[0], coming=2, quiet=0.0, since_switch=0.01), 1, PREDICTING),
    ("a large round comes in, few so far", dict(outputs=[0] * 2, coming=128, quiet=0.9), 1, ("survival",)),
    ("between rounds", dict(coming=2, tp=4), 1, PREDICTING),
    ("a small round begins, just aborted", dict(requests=1, coming=2, since_abort=1.0), 1, PREDICTING),
]
MADE = {
    name: make_policy(name, **dict(zip(("predictor", "costs"), machine(crossing()), strict=True)))
    for name in PREDICTING
}


@pytest.mark.parametrize(
    ("kwargs", "expected", "name"),
    [pytest.param(case[1], case[2], name, id=f"{name}: {case[0]}") for case in CASES for name in case[3]],
)
def test_situations(kwargs, expected, name):
    assert MADE[name](snapshot(**kwargs), LEARNT).tp == expected


def test_what_it_learnt_decides():
    """A switch of a second pays if responses of this length tend to go on, and not if they tend to end."""
    decide = policy(crossing(control=1.0))
    situation = snapshot([600] * 3, peak=64, families=[1, 2, 3])
    short = learnt(median=640, sigma=0.02)
    assert decide(situation, short).tp == 1
    assert decide(situation, learnt(median=1500, sigma=0.8)).tp == 4
    predictor, costs = machine(crossing(control=1.0))
    assert make_policy("pat", predictor=predictor, costs=costs)(situation, short).tp == 4, "pat would take the bound"


def test_estimates_of_one_request_by_hand(monkeypatch):
    """One request that surely ends at 1000 tokens: steps left times step time, plus the switch."""
    predictor, costs = machine(crossing())
    planner = LayoutPlanner(predictor, costs)
    monkeypatch.setattr(lengths, "PRIOR_MEDIAN", 1e6)  # ends at its limit only
    situation = snapshot([500], limit=1000)
    plan = planner.plan(situation, course.look_ahead(situation.load, LengthHistory()))
    for tp in (1, 4):
        step = predictor.step_seconds(tp, 1, 850, 1)
        cost = costs.estimate(1, tp, [600]).seconds
        assert 500 * step + cost == pytest.approx({1: plan.kept[1], 4: plan.by_degree[4]}[tp], rel=0.01)
    # Staying one interval and then switching: dearer than now, cheaper than never.
    assert plan.by_degree[4] < plan.by_degree[1] < plan.kept[1]


def test_expected_number_alive(monkeypatch):
    """Lognormal lengths, no history: number and probability by the closed form."""
    monkeypatch.setattr(lengths, "PRIOR_MEDIAN", np.exp(6.0) / 100_000)
    monkeypatch.setattr(lengths, "PRIOR_STRENGTH", 1e9)
    situation = snapshot([200] * 10, limit=100_000)
    ahead = course.look_ahead(situation.load, LengthHistory())
    middle = np.cumsum(ahead.width) - ahead.width / 2
    alive = ndtr(6.0 - np.log(200 + middle)) / ndtr(6.0 - np.log(200))
    assert ahead.any_alive == pytest.approx(1 - (1 - alive) ** 10, rel=0.02, abs=1e-6)
    assert ahead.number[:30] == pytest.approx((10 * alive / (1 - (1 - alive) ** 10))[:30], rel=0.02)
    assert ahead.context == pytest.approx(300 + middle)


@examples(100)
@given(snapshots())
def test_counting_alike_requests_together_changes_little(snap):
    if len(snap.load) == 0:
        return
    exact = course.look_ahead(snap.load, LEARNT)
    before, course.CLASSES = course.CLASSES, 16
    try:
        coarse = course.look_ahead(snap.load, LEARNT)
    finally:
        course.CLASSES = before
    if exact is None:
        assert coarse is None
        return
    assert (coarse.any_alive * coarse.number * coarse.width).sum() == pytest.approx(
        (exact.any_alive * exact.number * exact.width).sum(), rel=0.25
    )


@examples(100)
@given(profiles(), snapshots(), st.sampled_from(POLICIES), st.integers(1, 16))
def test_pure_and_within_the_candidates(found, snap, name, switch_at):
    predictor, costs = machine(found)
    decide = make_policy(name, predictor=predictor, costs=costs, switch_at=switch_at)
    first = decide(snap, LEARNT)
    assert first.tp in snap.degrees and set(first.estimates) <= set(snap.degrees)
    assert all(np.isfinite(seconds) for seconds in first.estimates.values())
    decide(snapshot([5, 5], tp=2), LEARNT)
    assert decide(snap, LEARNT) == first


@examples(25)
@given(st.integers(0, 2**31), st.integers(4, 48), st.sampled_from([0.0, 0.05, 1.0]), st.floats(0.1, 2.0))
def test_a_draining_batch_switches_a_bounded_number_of_times(seed, requests, control, sigma):
    """Never more switches than there are degrees above the base, whatever the lengths."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(6 + sigma * random.normal(size=requests)), 4096).astype(int) + 1
    decide, history = policy(crossing(control=control)), LengthHistory()
    tp, switches = 1, 0
    for length in np.unique(lengths):
        running = np.flatnonzero(lengths > length)
        for index in np.flatnonzero(lengths == length):
            history.observe(length, index)
        if len(running):
            wanted = decide(snapshot([length] * len(running), tp=tp, families=running, peak=requests,
                                     replicas=running % (4 // tp)), history).tp  # fmt: skip
            switches += wanted != tp
            tp = wanted
    assert switches <= 3


@pytest.mark.parametrize("name", ["survival", "pat", "threshold"])
def test_a_round_that_outgrows_the_last_ones_is_raised_for_once(name):
    """The guess that it was complete costs one switch up and the way back, however slowly the rest comes."""
    predictor, costs = machine(crossing())
    decide = make_policy(name, predictor=predictor, costs=costs)
    for interval in (1, 5, 20):  # requests each 0.1 s
        tp, tps, switched = 1, [], -100
        for step, number in enumerate(range(2, 129, interval)):
            outputs = 10 * np.arange(number, 0, -1) // interval
            situation = snapshot(outputs, tp=tp, quiet=0.0, since_switch=0.1 * (step - switched), complete=True)
            tps.append(decide(situation, LEARNT).tp)
            tp, switched = tps[-1], step if tps[-1] != tp else switched
        assert tps[0] == 4 and tps[-1] == 1 and tps == sorted(tps, reverse=True), interval


def test_load_that_hovers_does_not_flap():
    """Multi-turn agents about the crossing point: requests come and go, and the layout stays."""
    random = np.random.default_rng(3)
    for centre in range(4, 40, 6):
        tp, switches = 1, 0
        for _ in range(40):
            number = max(1, centre + int(random.integers(-2, 3)))
            outputs = random.integers(0, 600, number)
            wanted = DECIDE(snapshot(outputs, tp=tp, peak=centre + 2, quiet=2.0), LEARNT).tp
            switches += wanted != tp
            tp = wanted
        assert switches <= 3, centre


def test_step_times_are_the_profiles_times_what_the_run_has_told():
    """Two requests are faster at tp=4 on the profile; not if it turned out to be twice as slow there."""
    situation = snapshot([1000] * 2, peak=64)
    assert DECIDE(situation, LEARNT).tp == 4
    assert DECIDE(replace(situation, factors=make_factors({4: 2.0})), LEARNT).tp == 2
    slower = DECIDE(replace(situation, factors=make_factors(dict.fromkeys((1, 2, 4), 1.3))), LEARNT)
    assert slower.tp == 4 and slower.estimates[4] == pytest.approx(
        1.3 * DECIDE(situation, LEARNT).estimates[4], rel=0.02
    )


def make_plan(**given) -> LayoutPlan:
    return LayoutPlan(**{"crowded": frozenset(), "recompute_below": {}, "course": None} | given)


def test_lowering_tp_must_gain_half_of_its_cost_on_top():
    plan = make_plan(by_degree={1: 8.0, 2: 9.5}, kept={2: 9.5}, now={1: 1.0}, saving={1: 0.2, 2: 0.0})
    load = snapshot([10] * 64, tp=2, degrees=(1, 2))
    assert _choose(load, plan, plan.by_degree) == 1
    dear = dataclasses.replace(plan, now={1: 3.0})
    assert _choose(load, dear, plan.by_degree) == 2
    up = dataclasses.replace(plan, by_degree={2: 8.0, 1: 9.5}, kept={1: 9.5}, now={2: 3.0}, saving={1: 0.0, 2: 0.2})
    assert _choose(snapshot([10] * 64, degrees=(1, 2)), up, up.by_degree) == 2, "raising is asked no more than before"


def test_a_layout_is_tried_out_where_little_is_known_of_it():
    """The layout looks a little slower than the present one.  The longer the rest takes, the more there is to gain."""
    load = snapshot([600] * 4, tp=2, peak=64, complete=True)
    unknown = replace(load, factors=make_factors({4: 1.1}), doubts={1: 0.0, 2: 0.0, 4: 0.2})
    assert DECIDE(unknown, LEARNT).tp == 4
    assert DECIDE(replace(unknown, doubts={1: 0.0, 2: 0.0, 4: 0.01}), LEARNT).tp == 2, "known"
    assert DECIDE(replace(unknown, switches=2), LEARNT).tp == 2, "enough for this round"
    assert DECIDE(replace(unknown, factors=make_factors({4: 2.0})), LEARNT).tp == 2, "hopeless"
    dear = policy(crossing(control=2.0))
    assert dear(unknown, LEARNT).tp == 2, "not worth the switch"


@pytest.mark.parametrize("doubt", [0.3, 0.5, 0.7, 0.9, 1.1])
def test_no_step_is_expected_to_take_less_than_no_time(doubt):
    """The logarithm of a factor is in doubt.  A step in tp=2 takes 2.8 times as long as in tp=1, in tp=4 7 times: tp=2
    is worth a trial where a third of that would be no wonder, tp=4 is not."""
    slow = {1: 1.0, 2: 1.8, 4: 2.6}
    found = crossing(
        decode=decode_points(lambda tp, *of: (4e-3 + 1e-6 * of[1] * of[2]) * slow[tp], (1, 4, 16, 64), (128, 4096)),
        control=0.1,
    )
    situation = replace(snapshot([60] * 64, complete=True), doubts={1: 0.0, 2: doubt, 4: doubt})
    assert policy(found)(situation, LEARNT).tp == (2 if doubt > 1 else 1)


def test_a_layout_is_not_entered_for_a_moment():
    """Prompts are computed 0.24 s sooner in tp=2, which an interval of tokens there and a second switch would cost less
    than.  But whoever goes to tp=2 stays there for a second."""
    of_token = {1: 7.5e-5, 2: 2.5e-5, 4: 5e-5}  # of a prompt
    found = crossing(
        decode=decode_points(lambda tp, *_: 30e-3 / tp, (1, 8, 64, 128), (128, 1024, 8192)),
        prefill=prefill_points(lambda tp, _, batch, length: batch * length * of_token[tp], (1, 16), (128, 8192)),
    )
    begun = snapshot([0] * 64, complete=True)
    decision = policy(found)(begun, LEARNT)
    assert decision.tp == 4
    stayed = (SETTLE_SECONDS / 15e-3) * (15e-3 - 7.5e-3)
    assert decision.estimates[2] - decision.estimates[4] > stayed - 0.24


def test_a_sixth_switch_of_a_round_needs_a_large_gain():
    """A fourth needs no more than a third, so that it can be taken back: in a round of Qwen3-30B-A3B a third one, to
    tp=8 with 34 requests left, cost 2% of the time as tp=4 was better soon."""
    plan = make_plan(by_degree={1: 10.0, 4: 8.5}, kept={1: 10.0}, now={4: 0.1}, saving={4: 0.2})
    situation = snapshot([600] * 4, peak=64, degrees=(1, 4))
    assert [_choose(replace(situation, switches=n), plan, plan.by_degree) for n in range(7)] == [4] * 5 + [1] * 2
    little = dataclasses.replace(plan, by_degree={1: 10.0, 4: 9.75})
    assert [_choose(replace(situation, switches=n), little, little.by_degree) for n in range(6)] == [4] * 4 + [1] * 2
    worth = dataclasses.replace(plan, by_degree={1: 10.0, 4: 7.0})
    assert _choose(replace(situation, switches=9), worth, worth.by_degree) == 4


def test_the_longer_a_switch_takes_the_longer_it_waits_for_more():
    assert compute_completion_wait(cost=0.001, saving=0.5) == MIN_PATIENCE_SECONDS
    assert compute_completion_wait(cost=0.1, saving=0.5) == pytest.approx(0.4)
    assert compute_completion_wait(cost=5.0, saving=0.5) == SETTLE_SECONDS
    assert compute_completion_wait(cost=0.1, saving=-0.1) == SETTLE_SECONDS


def test_too_many_for_the_slots_wait_in_turn():
    """64 requests with 8 slots a replica take eight turns on one replica; on four they take two."""
    predictor, costs = machine(crossing())
    situation = snapshot([10] * 64)
    wide = make_policy("survival", predictor=predictor, costs=costs, max_running=8)(situation, LEARNT)
    free = make_policy("survival", predictor=predictor, costs=costs)(situation, LEARNT)
    assert wide.tp == 1 and wide.estimates[4] - wide.estimates[1] > free.estimates[4] - free.estimates[1]
