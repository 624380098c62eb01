"""The oracle against every schedule there is, and against every policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from studies.simulate import Batch, Drain, oracle

from .drawn import examples
from .policy_world import crossing, machine, profiles

pytestmark = pytest.mark.unit


def drain(found, lengths, prompt=50, limit=None, spacing=1) -> Drain:
    lengths = np.asarray(lengths, dtype=np.int64)
    batch = Batch(
        prompt=np.full(len(lengths), prompt),
        length=lengths,
        family=np.arange(len(lengths)) // 4,
        limit=limit or int(lengths.max()),
    )
    return Drain(*machine(found), found.fingerprint, batch, spacing)


def brute_force(case: Drain) -> float:
    """The least time over every layout at every point."""
    points = len(case.points) - 1
    least = np.inf
    for layouts in itertools.product(case.degrees, repeat=points):
        schedule = [(p, tp) for p, tp in enumerate(layouts) if tp != ((case.degrees[0], *layouts)[p])]
        least = min(least, case.scheduled(schedule).seconds)
    return least


@examples(25)
@given(profiles(), st.lists(st.integers(1, 24), min_size=1, max_size=4), st.integers(1, 16))
def test_as_good_as_every_schedule(found, lengths, spacing):
    case = drain(found, lengths, spacing=spacing)
    assert len(case.points) <= 7
    assert oracle(case).seconds == pytest.approx(brute_force(case), rel=1e-12)


@pytest.mark.parametrize("lengths", [[3, 9, 14], [1, 1, 1, 1, 12, 12], [30], [5, 20, 21, 30], [2] * 8])
def test_as_good_as_every_schedule_on_a_crossing_machine(lengths):
    for control in (0.0, 0.01, 0.2):
        case = drain(crossing(control=control), lengths)
        assert len(case.points) < 9
        assert oracle(case).seconds == pytest.approx(brute_force(case), rel=1e-12)


@examples(40)
@given(
    st.one_of(profiles(), st.sampled_from([0.0, 0.05, 1.0]).map(crossing)),
    st.integers(0, 2**31),
    st.integers(1, 60),
    st.floats(0.1, 1.5),
)
def test_no_policy_is_better(found, seed, requests, sigma):
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(5 + sigma * random.normal(size=requests)), 1, 2048)
    case = drain(found, lengths, limit=2048, spacing=16)
    best = oracle(case)
    predictor, costs = machine(found)
    for name in ("survival", "pat", "threshold", "manual"):
        policy = make_policy(name, switch_at=4, predictor=predictor, costs=costs)
        assert case.follow(policy, LengthHistory()).seconds >= best.seconds * (1 - 1e-12), name
    assert best.seconds <= case.static(1).seconds * (1 + 1e-12)


def test_cheap_switches_give_the_best_layout_of_every_moment():
    """With switches for nothing the oracle's time is the sum over intervals of the quickest layout's."""
    case = drain(crossing(control=0.0, kv=0.0), [40, 80, 400, 800] * 16, limit=800, spacing=16)
    case.switch_seconds = lambda point, a, b: 0.0
    quickest = sum(
        min(float(case.seconds(tp, point)[1]) for tp in case.degrees) for point in range(len(case.points) - 1)
    )
    # Replicas wait for each other at every switch, so changing at every point is an upper bound.
    assert oracle(case).seconds <= quickest * (1 + 1e-12)
    assert oracle(case).seconds >= 0.9 * quickest


def test_it_knows_what_is_to_come():
    """A switch of 0.2 s for a response that ends soon is not made, for a long one it is, at once."""
    found = crossing(control=0.2)
    assert oracle(drain(found, [30] * 2)).switches == []
    assert [s[:3] for s in oracle(drain(found, [4000] * 2)).switches] == [(0, 1, 4)]
