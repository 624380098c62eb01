"""Lengths of what whole epochs return against what the model gives (simulated rounds): the same, or shorter."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout.rules import Rules
from studies import PROFILES
from studies.rounds import Engines, SimulatedRound, Simulation
from studies.shapes import parse_shape

pytestmark = [pytest.mark.unit, pytest.mark.slow, pytest.mark.long]

PROFILE = PROFILES / "8xH100-qwen3-14b.json"
SHAPE = parse_shape("body-atom:6.363,0.70,16384,0.01")
PROMPTS, SIZE, RESPONSES = 240, 24, 8


class Linear:
    """A step takes 10 ms, and 0.1 ms more for each request."""

    def step_seconds(self, tp, batch, tokens, replicas=None):
        return 0.01 + 1e-4 * batch


@functools.cache
def epoch(rho: float, seed: int, **rules) -> list[SimulatedRound]:
    profile = load(PROFILE)
    engines = Engines(
        predictor=Linear(), costs=build_predictors(profile)[1], fingerprint=profile.fingerprint, nodes=1, tp=2
    )
    given = Rules(num_prompts=SIZE, num_responses=RESPONSES, max_deferrals=64, **rules)
    return Simulation(engines, given, SHAPE, rho, seed, prompts=PROMPTS).run_epoch()


def list_lengths(rounds: list[SimulatedRound]) -> np.ndarray:
    """Lengths by prompt, ``[PROMPTS, RESPONSES]``."""
    groups = sorted((group for found in rounds for group in found.groups), key=lambda group: group.index)
    assert [group.index for group in groups] == list(range(PROMPTS))
    return np.array([[sample.output.tokens for sample in group.list_kept()] for group in groups])


def true(rho: float, seed: int) -> np.ndarray:
    """Other draws of the same prompts, none thrown away, ``[PROMPTS, RESPONSES]``."""
    common = np.array([np.random.default_rng((seed, 2, index)).normal() for index in range(PROMPTS)])
    own = np.random.default_rng((seed, 99)).normal(size=(PROMPTS, RESPONSES))
    return SHAPE.sample_correlated_lengths(common[:, None], own, rho)


def chance(mine: np.ndarray, other: np.ndarray) -> float:
    """P value of Kolmogorov and Smirnov's distance of two samples, ``[prompts, responses]`` each.

    Responses to one prompt are alike, so prompts are what is permuted: each has its two sets swapped or not.
    """
    grid = np.unique(np.quantile(np.concatenate([mine, other]), np.linspace(0, 1, 256)))
    apart = (mine[:, :, None] <= grid).sum(1) - (other[:, :, None] <= grid).sum(1)
    signs = np.random.default_rng(5).choice([-1, 1], size=(999, len(mine)))
    swapped = np.abs(signs @ apart.astype(np.float32)).max(1)
    return (1 + (swapped >= np.abs(apart.sum(0)).max()).sum()) / 1000


def test_unbiased_rounds_return_what_the_model_gives_and_those_of_the_paper_do_not():
    rho = 0.5
    other = true(rho, seed=1)
    assert chance(list_lengths(epoch(rho, seed=1, unbiased=True)), other) > 0.05
    assert chance(list_lengths(epoch(rho, seed=1, eta_responses=1.25)), other) < 0.01


def test_more_prompts_only_lose_the_longest_responses_and_unbiased_rounds_do_not():
    """Responses at the cap, of 19 that are to be expected."""
    at_cap = [int((list_lengths(epoch(0.0, 1, **rules)) == SHAPE.limit).sum()) for rules in
              ({"eta_prompts": 1.0, "eta_responses": 1.0}, {"eta_responses": 1.0}, {"unbiased": True})]  # fmt: skip
    assert at_cap[1] < 0.4 * min(at_cap[0], at_cap[2])
    assert at_cap[2] == pytest.approx(19, rel=0.4)
