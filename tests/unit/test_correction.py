"""Layouts' factors from the steps of a run: what is learnt, what is not, and what is forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_pat.predict.correction import BETWEEN_SPREAD, Corrected, StepFactors

from .policy_world import crossing, machine

pytestmark = pytest.mark.unit

DEGREES = (1, 2, 4)


def seen(truth: dict[int, float], reports: int, noise: float = 0.1, seed: int = 0) -> StepFactors:
    """After so many noisy reports of each of these layouts, in turn, half a second apart."""
    random, factors = np.random.default_rng(seed), StepFactors(DEGREES)
    for number in range(reports * len(truth)):
        tp = list(truth)[number % len(truth)]
        factors.observe(tp, truth[tp] * math.exp(noise * random.normal()), 1.0, 32, number / 2)
    return factors


def between(factors: StepFactors, tp: int, base: int = 1) -> float:
    found = factors.factors()
    return found[tp] / found[base]


def test_before_anything_is_seen_the_profile_holds():
    factors = StepFactors(DEGREES)
    assert factors.factors() == {1: 1.0, 2: 1.0, 4: 1.0}
    assert factors.doubts(1) == pytest.approx({1: 0.0, 2: BETWEEN_SPREAD * 2**0.5, 4: BETWEEN_SPREAD * 2**0.5})


def test_a_layout_that_was_never_visited_has_the_common_factor():
    """Of a machine that is slower today most is common: the layouts' order hardly changes."""
    factors = seen({1: 1.3}, 200).factors()
    assert factors[1] == pytest.approx(1.3, rel=0.02)
    assert factors[2] == factors[4] and 1.2 < factors[2] < factors[1]


def test_what_a_profile_gets_wrong_between_layouts_is_learnt():
    factors = seen({1: 1.2, 4: 0.8}, 50)
    assert between(factors, 4) == pytest.approx(0.8 / 1.2, rel=0.04)
    assert factors.doubts(4)[1] < 0.03 < 0.1 < factors.doubts(4)[2]


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_a_right_profile_little(seed):
    """One report says 10% more or less, by chance."""
    assert abs(math.log(between(seen({1: 1.0, 4: 1.0}, 10, seed=seed), 4))) < 0.15
    assert abs(math.log(between(seen({1: 1.0, 4: 1.0}, 100, seed=seed), 4))) < 0.03


def test_a_pause_of_the_machine_is_no_property_of_a_layout():
    factors = seen({1: 1.0, 4: 1.0}, 20, noise=0.0)
    factors.observe(4, 100.0, 1.0, 32, 20.0)
    assert between(factors, 4) < 1.05


def test_the_machine_is_forgotten_in_an_hour_and_the_profile_in_days():
    factors = seen({1: 1.3, 4: 1.0}, 100)
    ratio = between(factors, 4)
    factors.observe(1, 1.0, 1.0, 32, 3600.0)  # the load is gone
    assert between(factors, 4) < 0.9 and factors.factors()[4] < 0.9
    factors.observe(1, 1.0, 1.0, 32, 20 * 86_400.0)
    assert ratio == pytest.approx(1 / 1.3, rel=0.04) and between(factors, 4) == pytest.approx(1.0, rel=0.01)


def calibrated(truth: dict[int, float], noise: float, turns: int = 4, seed: int = 0) -> StepFactors:
    random, factors = np.random.default_rng(seed), StepFactors(DEGREES)
    factors.calibrate([{tp: f * math.exp(noise * random.normal()) for tp, f in truth.items()} for _ in range(turns)], 0)
    return factors


@pytest.mark.parametrize("seed", range(5))
def test_a_calibration_finds_what_is_wrong_before_the_first_step(seed):
    factors = calibrated({1: 1.2, 2: 0.8, 4: 1.2}, 0.03, seed=seed)
    assert between(factors, 2) == pytest.approx(0.8 / 1.2, rel=0.08)
    assert between(factors, 4) == pytest.approx(1.0, rel=0.08)
    assert max(factors.doubts(1).values()) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_calibration_hardly_moves_a_right_profile(seed):
    """Half as far as the noise of what was measured."""
    assert abs(math.log(between(calibrated({1: 1.0, 2: 1.0, 4: 1.0}, 0.03, seed=seed), 4))) < 0.025
    slower = calibrated({1: 1.3, 2: 1.3, 4: 1.3}, 0.03, seed=seed)
    assert abs(math.log(between(slower, 4))) < 0.025
    assert slower.factors()[1] == pytest.approx(1.3, rel=0.05)


def test_a_calibration_whose_turns_disagree_is_worth_little():
    quiet, loud = calibrated({1: 1.2, 2: 0.8, 4: 1.2}, 0.01), calibrated({1: 1.2, 2: 0.8, 4: 1.2}, 0.2)
    assert quiet.doubts(1)[2] < 0.05 < 0.08 < loud.doubts(1)[2]


def test_a_machine_that_slows_down_between_turns_is_no_noise():
    """It did so in all layouts."""
    turns = [{tp: slow * factor for tp, factor in {1: 1.2, 2: 0.8, 4: 1.0}.items()} for slow in (1.0, 1.5, 0.7, 1.1)]
    factors = StepFactors(DEGREES)
    factors.calibrate(turns, 0)
    assert between(factors, 2) == pytest.approx(0.8 / 1.2, rel=0.05) and factors.doubts(1)[2] < 0.05


def test_a_run_still_corrects_what_a_calibration_confirmed():
    factors = calibrated({1: 1.0, 2: 1.0, 4: 1.0}, 0.01)
    for number in range(400):
        factors.observe(1 if number % 2 else 4, 1.0 if number % 2 else 1.2, 1.0, 32, number / 2)
    assert between(factors, 4) == pytest.approx(1.2, rel=0.05)


def test_a_calibration_is_believed_however_wrong_the_profile_is():
    """What its turns agree upon is no pause of the machine."""
    assert between(calibrated({1: 1.0, 2: 0.02, 4: 1.0}, 0.01), 2) < 0.05


def test_turns_that_were_broken_off_do_not_count():
    factors = StepFactors(DEGREES)
    factors.calibrate([], 0)
    factors.calibrate([{1: 1.5}, {1: 1.5, 2: 1.5}], 0)
    StepFactors((1,)).calibrate([{1: 1.5}], 0)
    assert factors.factors() == {1: 1.0, 2: 1.0, 4: 1.0}


def test_what_says_nothing_is_left_out():
    factors = StepFactors(DEGREES)
    factors.observe(1, 0.0, 0.0, 0, 1.0)
    factors.observe(1, 1.0, 0.0, 32, 1.0)
    assert factors.factors() == {1: 1.0, 2: 1.0, 4: 1.0}


def test_a_corrected_predictor():
    predictor, _ = machine(crossing())
    corrected = Corrected(predictor, {2: 1.5})
    assert corrected.step_seconds(2, 4, 400) == 1.5 * predictor.step_seconds(2, 4, 400)
    assert corrected.step_seconds(1, 4, 400) == predictor.step_seconds(1, 4, 400)
    assert corrected.has_prefill(2) == predictor.has_prefill(2)
