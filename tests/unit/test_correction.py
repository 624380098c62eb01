"""Layouts' factors from the steps of a run: what is learnt, what is not, and what is forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_pat.predict.correction import (
    BATCH,
    CONTEXT,
    OWN_SPREADS,
    SHARES,
    TURNS,
    CorrectedPredictor,
    StepFactor,
    StepFactors,
    Steps,
)

from .policy_world import crossing, machine
from .profiles_for_tests import prefill_points

pytestmark = pytest.mark.unit

DEGREES = (1, 2, 4)
RANKS = 4
UNKNOWN = {tp: StepFactor() for tp in DEGREES}


def steps(factor: float, batch: float = BATCH, context: float = CONTEXT, number: int = 32) -> Steps:
    return Steps(number, number * batch, number * batch * context, factor, 1.0)


def observe_reports(truth: dict[int, float], reports: int, noise: float = 0.1, seed: int = 0) -> StepFactors:
    """The correction after so many noisy reports of each of these layouts, in turn, half a second apart."""
    random, factors = np.random.default_rng(seed), StepFactors(DEGREES)
    for number in range(reports * len(truth)):
        tp = list(truth)[number % len(truth)]
        factors.observe(tp, steps(truth[tp] * math.exp(noise * random.normal())), number / 2)
    return factors


def at(factors: StepFactors, tp: int, batch: float = BATCH, context: float = CONTEXT) -> float:
    return factors.get_factors()[tp].evaluate(batch, batch * context)


def compute_ratio(factors: StepFactors, tp: int, batch: float = BATCH, context: float = CONTEXT) -> float:
    return at(factors, tp, batch, context) / at(factors, 1, batch, context)


def doubts(factors: StepFactors, here: int, requests: int = BATCH, context: int = CONTEXT) -> dict[int, float]:
    return factors.compute_uncertainty(here, RANKS, np.full(requests, context))


def test_before_anything_is_seen_the_profile_holds():
    factors = StepFactors(DEGREES)
    assert factors.get_factors() == UNKNOWN
    found = doubts(factors, 1, requests=RANKS * BATCH)
    assert found[1] == 0 < OWN_SPREADS[0] * 2**0.5 < found[2] < found[4], "the more requests a replica has, the less"


def test_a_layout_that_was_never_visited_has_the_common_factor():
    """Most of what makes a machine slower today is common: the layouts' order hardly changes."""
    factors = observe_reports({1: 1.3}, 200)
    assert at(factors, 1) == pytest.approx(1.3, rel=0.02)
    assert at(factors, 2) == at(factors, 4) and 1.2 < at(factors, 2) < at(factors, 1)


def test_what_a_profile_gets_wrong_between_layouts_is_learnt():
    factors = observe_reports({1: 1.2, 4: 0.8}, 50)
    assert compute_ratio(factors, 4) == pytest.approx(0.8 / 1.2, rel=0.04)
    assert doubts(factors, 4)[1] < 0.08 < 0.15 < doubts(factors, 4)[2]
    assert doubts(factors, 1)[4] < doubts(factors, 1, context=16 * CONTEXT)[4], "farther from what was seen"


def test_what_depends_on_batch_and_context_is_learnt_in_the_run():
    """tp4 is right for long contexts, and 1.4 times too slow for short ones; no layout is off for batches."""
    random, factors = np.random.default_rng(0), StepFactors(DEGREES)
    for number in range(200):
        tp, context, batch = (1, 4)[number % 2], (128, 8192)[number // 2 % 2], (2, 32)[number // 4 % 2]
        truth = 1.4 if (tp, context) == (4, 128) else 1.0
        factors.observe(tp, steps(truth * math.exp(0.1 * random.normal()), batch, context), number / 2)
    assert compute_ratio(factors, 4, context=128) == pytest.approx(1.4, rel=0.05)
    assert compute_ratio(factors, 4, context=8192) == pytest.approx(1.0, rel=0.05)
    assert compute_ratio(factors, 4, 2, 1024) / compute_ratio(factors, 4, 32, 1024) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_a_right_profile_little(seed):
    """One report says 10% more or less, by chance."""
    assert abs(math.log(compute_ratio(observe_reports({1: 1.0, 4: 1.0}, 10, seed=seed), 4))) < 0.15
    assert abs(math.log(compute_ratio(observe_reports({1: 1.0, 4: 1.0}, 100, seed=seed), 4))) < 0.03


def test_a_pause_of_the_machine_is_no_property_of_a_layout():
    factors = observe_reports({1: 1.0, 4: 1.0}, 20, noise=0.0)
    factors.observe(4, steps(100.0), 20.0)
    assert compute_ratio(factors, 4) < 1.05


def test_the_machine_is_forgotten_in_an_hour_and_the_profile_in_days():
    factors = observe_reports({1: 1.3, 4: 1.0}, 100)
    ratio = compute_ratio(factors, 4)
    factors.observe(1, steps(1.0), 3600.0)  # the load is gone
    assert compute_ratio(factors, 4) < 0.9 and at(factors, 4) < 0.9
    factors.observe(1, steps(1.0), 20 * 86_400.0)
    assert ratio == pytest.approx(1 / 1.3, rel=0.04) and compute_ratio(factors, 4) == pytest.approx(1.0, rel=0.01)


def make_calibrated(truth: dict[int, StepFactor], noise: float, turns: int = 4, seed: int = 0) -> StepFactors:
    random, factors = np.random.default_rng(seed), StepFactors(DEGREES)
    found = []
    for each, context in TURNS[:turns]:
        loads = {tp: (each * tp, context) for tp in DEGREES}
        ratios = {tp: truth[tp].evaluate(b, b * c) * math.exp(noise * random.normal()) for tp, (b, c) in loads.items()}
        found.append({tp: steps(ratios[tp], *loads[tp]) for tp in DEGREES})
    factors.calibrate(found, 0)
    return factors


def off(tp1: float, tp2: float, tp4: float) -> dict[int, StepFactor]:
    """One error everywhere."""
    return dict(zip(DEGREES, map(StepFactor, (tp1, tp2, tp4)), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_a_calibration_finds_what_is_wrong_before_the_first_step(seed):
    factors = make_calibrated(off(1.2, 0.8, 1.2), 0.03, seed=seed)
    assert compute_ratio(factors, 2) == pytest.approx(0.8 / 1.2, rel=0.1)
    assert compute_ratio(factors, 4) == pytest.approx(1.0, rel=0.1)
    assert max(doubts(factors, 1).values()) < 0.06


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "power", [StepFactor(1.0, 0.12, 0.0), StepFactor(1.0, 0.0, 0.08), StepFactor(1.0, -0.1, -0.05)]
)
def test_a_calibration_finds_what_depends_on_batch_or_context(power, seed):
    """The middle of a draining batch is as its ends."""
    truth = off(1.0, 1.0, 1.0) | {4: power}
    factors = make_calibrated(truth, 0.02, seed=seed)
    for each, context in (*TURNS, (4, 512)):
        batch, tokens = 4 * each, 4 * each * context
        found = factors.get_factors()[4].evaluate(batch, tokens) / factors.get_factors()[1].evaluate(
            each, each * context
        )
        assert found == pytest.approx(power.evaluate(batch, tokens), rel=0.08), (each, context)


@pytest.mark.parametrize("seed", range(5))
def test_a_calibration_hardly_moves_a_right_profile(seed):
    for everywhere in (1.0, 1.3):
        factors = make_calibrated(off(*[everywhere] * 3), 0.03, seed=seed)
        for each, context in TURNS:
            assert abs(math.log(compute_ratio(factors, 4, each, context))) < 0.06
        assert at(factors, 1) == pytest.approx(everywhere, rel=0.05)
        assert doubts(factors, 1)[4] < 2 * SHARES[0] * OWN_SPREADS[0]


def test_a_calibration_whose_turns_disagree_is_worth_little():
    quiet, loud = make_calibrated(off(1.2, 0.8, 1.2), 0.01), make_calibrated(off(1.2, 0.8, 1.2), 0.3, seed=2)
    assert 2 * doubts(quiet, 1)[2] < doubts(loud, 1)[2]


def test_a_machine_that_slows_down_between_turns_is_no_noise():
    factors = StepFactors(DEGREES)
    truth = {1: 1.2, 2: 0.8, 4: 1.0}
    factors.calibrate(
        [
            {tp: steps(slow * factor, each * tp, context) for tp, factor in truth.items()}
            for slow, (each, context) in zip((1.0, 1.5, 0.7, 1.1), TURNS, strict=True)
        ],
        0,
    )
    assert compute_ratio(factors, 2) == pytest.approx(0.8 / 1.2, rel=0.05) and doubts(factors, 1)[2] < 0.06


def test_a_run_still_corrects_what_a_calibration_confirmed():
    factors = make_calibrated(off(1.0, 1.0, 1.0), 0.01)
    for number in range(400):
        factors.observe(1 if number % 2 else 4, steps(1.0 if number % 2 else 1.2), number / 2)
    assert compute_ratio(factors, 4) == pytest.approx(1.2, rel=0.05)


def test_what_says_nothing_is_left_out():
    """Reports without steps, and turns that were broken off."""
    factors = StepFactors(DEGREES)
    factors.observe(1, Steps(0, 0, 0, 0.0, 0.0), 1.0)
    factors.observe(1, Steps(32, 32, 320, 1.0, 0.0), 1.0)
    factors.calibrate([], 0)
    factors.calibrate([{1: steps(1.5)}, {1: steps(1.5), 2: steps(1.5)}], 0)
    StepFactors((1,)).calibrate([{1: steps(1.5)}], 0)
    assert factors.get_factors() == UNKNOWN


def test_a_corrected_predictor():
    predictor, _ = machine(crossing())
    corrected = CorrectedPredictor(predictor, {2: StepFactor(1.5), 4: StepFactor(1.5, 0.5, 0.1)})
    assert corrected.step_seconds(2, 4, 400) == 1.5 * predictor.step_seconds(2, 4, 400)
    batch = np.array([BATCH, 4 * BATCH])
    found = corrected.step_seconds(4, batch, batch * CONTEXT) / predictor.step_seconds(4, batch, batch * CONTEXT)
    assert found == pytest.approx([1.5, 3.0])
    assert type(corrected.step_seconds(4, 4, 400)) is float
    assert corrected.step_seconds(1, 4, 400) == predictor.step_seconds(1, 4, 400)
    assert corrected.has_prefill(2) == predictor.has_prefill(2)


def test_a_prefill_is_as_slow_as_the_machine_not_as_the_steps_of_its_degree():
    """Factors of a profile of short requests, after a calibration with long ones: nothing of them is known of prefills
    but that the machine is as fast as profiled."""
    predictor, _ = machine(crossing(prefill=prefill_points(lambda tp, *_: 0.1 * tp, (1, 4), (64, 128))))
    wild = {1: StepFactor(1.6, 0.1, 0.1), 2: StepFactor(1.0), 4: StepFactor(1 / 1.6, -0.1, -0.2)}
    for scale in (1.0, 1.5):
        factors = {tp: factor._replace(scale=scale * factor.scale) for tp, factor in wild.items()}
        corrected = CorrectedPredictor(predictor, factors)
        for tp in DEGREES:
            assert corrected.prefill_uniform(tp, 4, 64) == pytest.approx(scale * predictor.prefill_uniform(tp, 4, 64))
