"""The oracle against every schedule there is, and against every policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from studies.simulate import Batch, Drain, find_best_run

from .drawn import examples
from .policy_world import crossing, machine, profiles

pytestmark = [pytest.mark.unit, pytest.mark.long]


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
        least = min(least, case.run_schedule(schedule).seconds)
    return least


@examples(25)
@given(
    st.one_of(profiles(), st.sampled_from([0.0, 0.01, 0.2]).map(crossing)),
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_as_good_as_every_schedule(found, lengths, spacing):
    case = drain(found, lengths, spacing=spacing)
    assert len(case.points) <= 7
    assert find_best_run(case).seconds == pytest.approx(brute_force(case), rel=1e-12)


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
    best = find_best_run(case)
    predictor, costs = machine(found)
    for name in ("survival", "pat", "threshold", "manual"):
        run = case.run_policy(make_policy(name, switch_at=4, predictor=predictor, costs=costs), LengthHistory())
        if all(before < after for _, before, after, _ in run.switches):  # else requests were dealt anew
            assert run.seconds >= best.seconds * (1 - 1e-12), name
    assert best.seconds <= case.run_static(1).seconds * (1 + 1e-12)
