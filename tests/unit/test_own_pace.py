"""Rounds in which every request keeps its tokens, and the best policy that does not know the lengths."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.predict.profile import load
from studies import PROFILES
from studies.compare import ProfiledMachine, Workload
from studies.own_pace import BestPolicy, list_moments, run_policy, run_schedule, search_best_seconds
from studies.shapes import parse_shape
from studies.simulate import Batch, find_best_run

pytestmark = [pytest.mark.unit, pytest.mark.long]


@pytest.fixture(scope="module")
def a40() -> ProfiledMachine:
    return ProfiledMachine(load(PROFILES / "8xA40-llama3.1-8b.json", complete=True))


def draw(shape: str, batch: int = 32, rounds: int = 1) -> list:
    return list(Workload(shape=parse_shape(shape), batch=batch, rounds=rounds).make_batches())


def test_replicas_that_are_ahead_do_not_wait(a40):
    """One layout takes what it takes in step; at a switch the longest one keeps what it is ahead."""
    number = np.arange(128)
    length = np.where(number == 1, 4000, np.where(number % 4 == 0, 2000, 1))
    batch = Batch(prompt=np.full(128, 256), length=length, family=number, limit=4096)
    drain = a40.drain(batch)
    assert run_schedule(a40, batch, []) == pytest.approx(drain.run_static(2).seconds, rel=0.01)
    assert run_schedule(a40, batch, [(1e6, 8)]) == run_schedule(a40, batch, []), "it is over by then"
    point = int(np.searchsorted(drain.points, 1500))
    slow, fast = drain.elapsed(2)[:2, point]
    in_step = drain.run_schedule([(point, 8)])
    tokens = (slow - fast) / a40.predictor.step_seconds(2, 1, 1900.0, 2)
    saved = tokens * a40.predictor.step_seconds(8, 1, 4000.0, 1)
    own = run_schedule(a40, batch, list_moments(drain, in_step))
    assert in_step.seconds - own == pytest.approx(saved, rel=0.1) and saved > 1


def test_no_policy_beats_the_search_and_what_it_did_can_be_repeated(a40):
    policy, history = a40.make_policy("survival"), LengthHistory()
    for batch in draw("lognormal:6,1,4096", rounds=2):
        drain = a40.drain(batch)
        seconds, switches = run_policy(a40, batch, policy, history)
        assert run_schedule(a40, batch, switches) == pytest.approx(seconds, rel=1e-9)
        starts = switches, list_moments(drain, find_best_run(drain))
        assert search_best_seconds(a40, batch, starts) <= min(run_schedule(a40, batch, one) for one in starts)
    assert len(history) == 64


@pytest.mark.parametrize("own", [False, True])
def test_the_best_policy_is_the_oracle_if_all_responses_are_alike(a40, own):
    """Then it does know the lengths."""
    shape = parse_shape("lognormal:7,0,4096")
    best = BestPolicy(a40, shape, 16, 256, own)
    (batch,) = draw("lognormal:7,0,4096", 16)
    drain = a40.drain(batch)
    least = find_best_run(drain).seconds
    found = run_policy(a40, batch, best.decide, LengthHistory())[0] if own else best.run_in_step(drain).seconds
    assert found == pytest.approx(least, rel=0.003)


def test_the_best_policy_is_better_than_survival_where_replicas_wait(a40):
    """The best policy sees which replica is behind; ``survival`` in step does not."""
    best = BestPolicy(a40, parse_shape("lognormal:7,1,8192"), 32, 256, own_pace=False)
    policy, history, seconds = a40.make_policy("survival"), LengthHistory(), np.zeros(2)
    for batch in draw("lognormal:7,1,8192", rounds=4):
        drain = a40.drain(batch)
        seconds += drain.run_policy(policy, history, complete=True).seconds, best.run_in_step(drain).seconds
    assert seconds[1] < seconds[0]
