"""When GPUs go over to training in the middle of a round, and what KV the rest is expected to need."""

from __future__ import annotations

import random

import pytest

from sglang_pat.policies.lending import count_milestones
from sglang_pat.rollout.scale_down import ScaleDown, project_peak

pytestmark = pytest.mark.unit


def test_milestones_are_those_of_the_paper():
    shares = (0, 0.19, 0.2, 0.249, 0.25, 0.3, 0.5, 0.549, 0.55)
    assert [count_milestones(share) for share in shares] == [0, 0, 1, 1, 2, 3, 7, 7, 8]


def test_the_peak_is_that_of_a_round_of_these_lengths():
    """All keep pace: the oracle lets them grow token by token."""
    draw = random.Random(0)
    for _ in range(20):
        lengths = sorted(draw.randint(1, 400) for _ in range(40))
        done = draw.randrange(40)
        running = lengths[done:]
        oracle = max(sum(tokens + 7 for end in running if end >= tokens) for tokens in range(running[0], 401))
        assert project_peak(lengths, done, 40, 7, 1000) == oracle


def test_without_earlier_lengths_all_go_on_to_the_limit():
    assert project_peak([], 4, 10, 5, 100) == 6 * 105
    assert project_peak([500], 4, 10, 5, 100) == 6 * 105, "no response is longer than that"
    assert project_peak([500], 10, 10, 5, 100) == 0


def test_they_go_at_the_first_milestone_that_fits():
    round_ = ScaleDown(groups=20, room=100)
    asked = [(3, 50), (4, 101), (4, 50), (5, 101), (6, 100)]
    assert [round_.is_due(*one) for one in asked] == [False, False, False, False, True]


def test_past_half_of_the_batch_they_stay_until_it_is_complete():
    round_ = ScaleDown(groups=20, room=100)
    assert [round_.is_due(complete, 1) for complete in (3, 11, 19, 20)] == [False, False, False, True]
    assert ScaleDown(groups=20, room=0).is_due(20, 1)
