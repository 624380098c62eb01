"""RollPacker's parallelism planner, and importance weights."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.integrations.importance import decoupled_objective, decoupled_weights
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile
from sglang_pat.rollout.planner import TOO_MANY, Planner, StartDegree, profiled_degree

from .profiles_for_tests import FINGERPRINT, decode_points

pytestmark = pytest.mark.unit


TOKENS = 100_000
MANY, SOME = 2 * int(TOO_MANY * TOKENS), int(TOO_MANY * TOKENS) // 2


def degrees(planner: Planner, counts: list[int], tokens: int = TOKENS) -> list[int]:
    return [planner.observe("short", count, tokens) for count in counts]


def test_as_many_retractions_in_every_round_raise_tp():
    assert degrees(Planner([1, 2, 4], 1), [10_000] * 4) == [2, 4, 4, 4]


def test_it_is_the_retractions_a_token_that_count():
    assert degrees(Planner([1, 2], 1), [MANY], TOKENS) == [2]
    assert degrees(Planner([1, 2], 1), [MANY], 10 * TOKENS) == [1]


def test_a_single_retraction_says_nothing():
    assert degrees(Planner([1, 2, 4], 2), [1, 0, 1], tokens=100) == [2, 2, 2]


def test_between_the_thresholds_the_degree_stays():
    assert set(degrees(Planner([1, 2, 4], 2), [SOME] * 50)) == {2}


def test_noise_does_not_carry_it_to_the_top():
    """Poisson(100) in 10 million tokens: far below the threshold, however it varies."""
    counts = np.random.default_rng(1).poisson(100, 200).tolist()
    assert max(degrees(Planner([1, 2, 4, 8], 1), counts, tokens=10_000_000)) == 1


def test_quiet_rounds_bring_it_back_down():
    planner = Planner([1, 2, 4], 4)
    assert degrees(planner, [0] * 9) == [4, 4, 4, 2, 2, 2, 2, 1, 1]


def test_a_degree_that_was_too_low_is_tried_again_later_and_later():
    """tp 1 never does: it is tried after 4, 8, 16, … quiet rounds."""
    planner, tp, lowered = Planner([1, 2], 2), 2, []
    for number in range(130):
        now = planner.observe("short", MANY if tp == 1 else 0, TOKENS)
        lowered += [number] * (now < tp)
        tp = now
    assert [after - before for before, after in pairwise([-2, *lowered])] == [5, 9, 17, 33, 65]


def test_its_course_is_kept():
    planner = Planner([1, 2, 4], 1)
    degrees(planner, [MANY, 0, 0])
    kept = msgspec.json.decode(msgspec.json.encode(planner.courses), type=dict[str, StartDegree])
    assert degrees(Planner([1, 2, 4], 1, kept), [0, 0]) == degrees(planner, [0, 0]) == [2, 1]
    assert Planner([4], 4, kept).tp("short") == 4, "a degree that there is no more"


def test_kinds_have_courses_of_their_own():
    planner = Planner([1, 2], 1)
    degrees(planner, [MANY])
    assert (planner.tp("short"), planner.tp("long")) == (2, 1)


@given(st.lists(st.integers(0, 2 * MANY), max_size=60))
def test_degrees_change_one_step_at_a_time(retractions):
    planner, tp = Planner([1, 2, 4, 8], 2), 2
    for count in retractions:
        after = planner.observe("short", count, TOKENS)
        assert after in (tp // 2, tp, tp * 2)
        assert 1 <= after <= 8
        tp = after


def test_a_degree_that_is_not_there():
    with pytest.raises(ValueError, match="tp 3 is none of"):
        Planner([1, 2], 3)


def profiled(samples: int, prompt: int = 100, limit: int = 200, **engine) -> int:
    """Of a profile where tp1 steps in 10 ms however many requests there are, tp2 in 6, and one more for each."""
    seconds = {1: lambda batch: 0.010, 2: lambda batch: 0.006 + 0.001 * batch}
    points = decode_points(lambda tp, _, batch, __: seconds[tp](batch), (1, 64), (1, 4096), ((1, 2), (2, 1)))
    engine = msgspec.structs.replace(FINGERPRINT, num_ranks=2, base_tp=1, degrees=(1, 2), **engine)
    profile = Profile(fingerprint=engine, decode=points)
    return profiled_degree(Predictor(profile), engine, samples, prompt, limit)


def test_the_profile_says_where_to_start():
    room = dict(kv_tokens=10**6, max_running=100)
    assert [profiled(samples, **room) for samples in (1, 3, 5, 60)] == [2, 2, 1, 1]


def test_what_finds_no_room_waits():
    """One sample at a time fits in tp1, three in tp2: tp1 needs 30 steps of 10 ms for 60 samples, tp2 20 of 9."""
    assert profiled(60, kv_tokens=450, max_running=100) == 2
    assert profiled(60, kv_tokens=10**6, max_running=1) == 1
    assert profiled(60, kv_tokens=1, max_running=1) == 1, "one at a time at least"


def test_without_staleness_it_is_ppo():
    torch.manual_seed(0)
    train, proximal = torch.randn(3, 5), torch.randn(3, 5)
    advantage = torch.randn(3, 1)
    ratio = (train - proximal).exp()
    ppo = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(decoupled_objective(train, proximal, proximal, advantage), ppo)


def test_the_recipes_formula():
    """min(train/behaviour · A, prox/behaviour · clip(train/prox) · A), written out for one token at a time."""
    torch.manual_seed(1)
    train, proximal, behaviour, advantage = torch.randn(4, 200).unbind()
    found = decoupled_objective(train, proximal, behaviour, advantage, clip=0.2)
    for t, p, b, a, value in zip(train, proximal, behaviour, advantage, found, strict=True):
        t, p, b = t.exp(), p.exp(), b.exp()
        clipped = max(0.8, min(1.2, float(t / p)))
        assert float(value) == pytest.approx(min(float(t / b * a), float(p / b) * clipped * float(a)), rel=1e-4)


def test_only_the_trained_policy_has_a_gradient():
    train, proximal, behaviour = (torch.randn(6, requires_grad=True) for _ in range(3))
    decoupled_objective(train, proximal, behaviour, torch.ones(6), clip=100.0).sum().backward()
    assert train.grad is not None
    assert proximal.grad is None
    assert behaviour.grad is None


def test_weights_are_capped_and_shapes_checked():
    ratio, weight = decoupled_weights(torch.zeros(2), torch.tensor([3.0, 0.0]), torch.zeros(2), cap=2.0)
    assert weight.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match="must be the same"):
        decoupled_weights(torch.zeros(2), torch.zeros(3), torch.zeros(2))
