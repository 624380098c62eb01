"""A calibration as the coordinator sees it: switches and requests that leave nothing behind but the factors."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.policies.registry import keep_layout
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.correction import TURNS, StepFactor

from .coordinator_rig import Rig

pytestmark = pytest.mark.unit

TOOK = {1: 0.012, 2: 0.02}
"""Seconds of a step, by degree, at the shortest context; the profile says 0.01 of both, everywhere."""

POWER = 0.1
"""How a step of tp2 grows with the context."""


class Predictor:
    def step_seconds(self, *query):
        return 0.01


def calibrate(rig: Rig, turns: int = 4) -> None:
    for turn in range(turns):
        rig.coordinator.calibrate(m.CalibrationTurn(), 0.0)
        each, context = TURNS[turn]
        for tp in (1, 2) if turn % 2 == 0 else (2, 1):
            if tp != rig.world.known.tp:
                rig.reconfigure(tp)
                rig.settle()
            rig.work(2)
            rig.settle()
            for rank in rig.world.known.leaders:
                steps, batch = 16, each * tp
                seconds = steps * TOOK[tp] * (context / TURNS[0][1]) ** (POWER * (tp == 2))
                rig.world.decoded = m.Decoded(steps, seconds, steps * batch, steps * batch * context)
                rig.world.report(rank)
                rig.deliver()
            rig.world.decoded = m.Decoded()
            rig.coordinator.handle_timer(10.0 * turn)
            rig.finish_all()
    rig.coordinator.calibrate(m.CalibrationTurn(over=True), 100.0)


def status(rig: Rig) -> dict:
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=1), 0.0)
    return rig.world.server[-1].answer


def test_a_calibration_leaves_the_factors_and_nothing_else():
    def merged(snapshot, history):
        return Decision(tp=2 if snapshot.requests else 1)

    rig, untouched = (Rig(1, 2, merged, Predictor(), policy="survival", profile="-") for _ in range(2))
    calibrate(rig)
    assert not rig.world.decisions and not rig.world.responses, "the policy was not asked, and no length was learnt"
    assert {record.reason for record in rig.world.records} == {"calibration"}
    before, after = status(untouched), status(rig)
    del before["groups"], after["groups"]  # of which the ranks tell
    factors = after.pop("step_factors")
    assert before.pop("step_factors") == {1: StepFactor(), 2: StepFactor()}
    assert before == after
    for context in (64, 8192):
        ratio = factors[2].evaluate(2, 2 * context) / factors[1].evaluate(1, context)
        assert ratio == pytest.approx(0.02 / 0.012 * (context / 64) ** POWER, rel=0.1)


def test_the_first_round_is_the_first_round():
    """Made-up requests are no round of a size that would be expected again, and their switches no switches."""
    rig = Rig(1, 2, keep_layout, Predictor(), policy="survival", profile="-")
    calibrate(rig)
    rig.work(2, now=101.0)
    rig.settle()
    rig.coordinator.handle_timer(102.0)
    snapshot = rig.world.decisions[-1][0]
    assert not snapshot.complete and snapshot.switches == 0 and snapshot.peak == 2
    assert snapshot.last_switch == float("-inf") and snapshot.last_arrival == 101.0
    assert 0 < snapshot.doubts[2] < 0.1


@pytest.mark.parametrize("before", [True, False])
def test_a_round_that_is_announced_does_not_disturb_it(before):
    """Nor does it lose the decision for which its first request waits."""

    def merged(snapshot, history):
        return Decision(tp=2 if len(snapshot.coming) else snapshot.tp)

    rig, begun = Rig(1, 2, merged, Predictor(), policy="survival", profile="-"), m.BeginRound(requests=3)
    if before:
        rig.coordinator.handle_round(begun, 0.0)
    rig.coordinator.calibrate(m.CalibrationTurn(), 0.0)
    if not before:
        rig.coordinator.handle_round(begun, 0.0)
    calibrate(rig)
    assert {answer.code for answer in rig.answers()} == {200}
    assert {record.reason for record in rig.world.records} == {"calibration"} and rig.world.known.tp == 1
    sent = len(rig.world.to_leaders)
    rig.work(3, now=101.0)
    assert type(rig.world.to_leaders[sent][1]) is m.Prepare
    rig.settle()
    rig.coordinator.handle_timer(102.0)
    rig.settle()
    assert rig.world.known.tp == 2 and rig.world.records[-1].reason == "survival"


def test_its_steps_are_not_in_the_totals():
    rig = Rig(1, 2, keep_layout, Predictor(), policy="survival", profile="-")
    rig.world.counts = m.StepCounts(decode_steps=5)
    calibrate(rig)
    assert status(rig)["totals"]["decode_steps"] == 0
    rig.work(1, now=101.0)
    rig.settle()
    assert status(rig)["totals"]["decode_steps"] > 0


def test_an_engine_that_believes_its_profile_is_not_corrected():
    rig = Rig(1, 2, keep_layout, Predictor(), policy="survival", profile="-", profile_as_is=True)
    calibrate(rig)
    assert status(rig)["step_factors"] == {}
