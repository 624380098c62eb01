"""Rounds of the admitter on a simulated engine (``studies.rounds``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.policies.lending import make_lending_policy
from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout.records import SampleId
from sglang_pat.rollout.rules import Rules
from studies import PROFILES, tail_batching
from studies.rounds import RESERVE, Engines, Replica, Simulation
from studies.shapes import parse_shape

pytestmark = [pytest.mark.unit, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
PROFILE = PROFILES / "8xH100-qwen3-14b.json"


class Constant:
    """A step takes 10 ms, whatever runs."""

    def step_seconds(self, tp, batch, tokens, replicas=None):
        return 0.01


def simulation(lengths: str, rho: float = 0.0, predictor=None, policy=None, training=None, **rules) -> Simulation:
    """``training``: more of the engines, for rounds in which ranks are lent."""
    profile = load(PROFILE)
    fits = build_predictors(profile)
    engines = Engines(
        predictor=predictor or fits[0], costs=fits[1], fingerprint=profile.fingerprint, nodes=1, tp=2, policy=policy,
        **training or {},
    )  # fmt: skip
    given = {"num_prompts": 8, "num_responses": 4, "eta_prompts": 1.25, "eta_responses": 1.25} | rules
    return Simulation(engines, Rules(**given), parse_shape(lengths), rho, seed=3)


def test_equal_lengths_end_together():
    """All tie: the first ones complete the batch, the others are stopped in that moment."""
    mine = simulation("lognormal:4.60517,0,1000", predictor=Constant())
    found = mine.run_round(0)
    assert found.seconds == pytest.approx(1.0)
    assert found.summary.kept_lengths == [100] * 32
    assert found.summary.thrown == pytest.approx((50 - 32) * 100, abs=50)


def test_a_round_takes_as_long_as_what_it_waits_for():
    mine = simulation("lognormal:5,1,4000", predictor=Constant(), eta_prompts=1.0, eta_responses=1.0)
    for version in range(5):
        found = mine.run_round(version)
        assert found.seconds == pytest.approx(0.01 * max(found.summary.kept_lengths))
        assert found.summary.thrown == 0


def test_tail_batching_is_faster_than_waiting_and_keeps_every_prompt():
    shape = "body-atom:6.363,0.70,16384,0.01"
    waiting = simulation(shape, eta_prompts=1.0, eta_responses=1.0)
    tail = simulation(shape)
    seconds = [sum(job.run_round(version).seconds for version in range(12)) for job in (waiting, tail)]
    assert seconds[1] < 0.8 * seconds[0]
    state = tail.admitter.state
    assert state.drawn == state.returned + len(state.waiting)


def test_adaptive_tp_on_top():
    profile = load(PROFILE)
    predictor, costs = build_predictors(profile)
    policy = make_policy("survival", predictor=predictor, costs=costs)
    shape = "body-atom:5,0.70,4096,0.02"
    still = simulation(shape, eta_prompts=1.0, eta_responses=1.0)
    adaptive = simulation(shape, eta_prompts=1.0, eta_responses=1.0, policy=policy)
    pairs = [(still.run_round(version), adaptive.run_round(version)) for version in range(2)]
    kept = [[sorted(found.summary.kept_lengths) for found in pair] for pair in pairs]
    assert all(one and one == other for one, other in kept), "the same work"
    assert all(b.switches for _, b in pairs)
    assert sum(b.seconds for _, b in pairs) < sum(a.seconds for a, _ in pairs)


def test_a_round_in_which_ranks_are_lent():
    """Less training is left to do of the same work, and none is done twice."""
    profile = load(PROFILE)
    predictor, costs = build_predictors(profile)
    policy = make_policy("survival", predictor=predictor, costs=costs)
    lending = make_lending_policy(predictor, costs, profile.fingerprint.num_ranks, profile.fingerprint.degrees)
    shape, per_token, each = "body-atom:6,0.70,6000,0.02", 1e-3, {"eta_prompts": 1.0, "eta_responses": 1.0}
    streams = simulation(
        shape, policy=policy, training={"lending": lending, "seconds_per_token": per_token, "setup": 1.0}, **each
    )
    still = simulation(shape, policy=policy, **each)
    lent = 0
    for version in range(2):
        without, found = still.run_round(version), streams.run_round(version)
        assert sorted(found.summary.kept_lengths) == sorted(without.summary.kept_lengths)
        seconds = per_token * sum(map(streams.count_training_tokens, found.groups))
        waiting, training = found.after
        assert waiting == 0 and found.hidden + training == pytest.approx(seconds)
        assert 0 <= found.hidden <= max(found.lent - 1.0, 0.0) / 2 + 1e-9 and found.lent < found.seconds
        assert found.seconds + training <= (without.seconds + seconds) * 1.02
        lent += found.lent > 0
    assert lent


def test_rewards_come_after_the_last_token():
    mine = simulation("lognormal:5,1,4000", predictor=Constant(), eta_prompts=1.0, eta_responses=1.0,
                      training={"reward_seconds": lambda sample: 7.0 if sample.index == 1 else 0.5,
                                "seconds_per_token": 1e-9})  # fmt: skip
    found = mine.run_round(0)
    assert sorted(took for _, took in found.rewards) == [0.5] * 28 + [7.0] * 4
    last = max(end + took for end, took in found.rewards) - found.seconds
    assert found.after[0] == pytest.approx(last, abs=1e-3) and last >= 0.5


def make_full_replica(room: float, lengths: list[int]) -> Replica:
    """Prompts of 100 tokens; a step takes 1 s."""
    replica = Replica(lambda batch, tokens: 1.0, 1000, 0.0, room)
    for number, length in enumerate(lengths):
        replica.add(SampleId(0, 0, number, 0), 100, length, 0.0)
    return replica


def test_a_sample_waits_for_room():
    replica = make_full_replica(2 * (100 + RESERVE) + 50, [50, 80, 10])
    assert len(replica.ids) == 2 and len(replica.waiting) == 1
    for seconds, number in ((50, 0), (60, 2), (80, 1)):
        assert replica.due == seconds
        replica.advance(seconds)
        assert replica.pop_finished() == SampleId(0, 0, number, 0)
    assert make_full_replica(10, [50]).due == 50, "one alone has room"


def test_a_full_replica_puts_the_shortest_back():
    replica = make_full_replica(400 + 2 * RESERVE, [600])
    replica.add(SampleId(0, 0, 1, 0), 300, 600, 0.0)
    replica.add(SampleId(0, 0, 2, 0), 20, 600, 0.0)
    assert len(replica.ids) == 2
    assert replica.due == 512 and replica.retract() == []
    replica.advance(512.0)
    assert replica.pop_finished() is None and replica.retract() == [612]
    assert len(replica.ids) == 1 and [context for _, context, _ in replica.waiting] == [20, 612]
    assert replica.due == 600


def test_a_replica_with_endless_room_divides_nothing_by_it(recwarn):
    """Infinity // n is no number, and said so in a warning."""
    replica = make_full_replica(float("inf"), [4, 7])
    replica.advance(100.0)
    assert replica.pop_finished() is not None and replica.clock == 4.0 and not recwarn.list


def test_nodes_switch_and_lend_by_themselves():
    """Two nodes: as much work in each as in one, each with its own layout."""
    profile = load(PROFILE)
    predictor, costs = build_predictors(profile)
    policy = make_policy("survival", predictor=predictor, costs=costs)
    engines = Engines(predictor=predictor, costs=costs, fingerprint=profile.fingerprint, nodes=2, tp=2, policy=policy)
    rules = Rules(num_prompts=16, num_responses=4, eta_prompts=1.0, eta_responses=1.0)
    job = Simulation(engines, rules, parse_shape("body-atom:5,0.70,4096,0.02"), 0.0, seed=3)
    apart = 0
    for version in range(2):
        found = job.run_round(version)
        assert len(found.summary.kept_lengths) == 64
        assert all(profile.fingerprint.num_ranks == node.tp * len(node.replicas) for node in job._nodes)
        apart += len({node.last_switch for node in job._nodes}) > 1
    assert apart == 2, "one may switch without the other"


def test_reorder_by_arithmetic():
    """verl's recipe: 3.9 times."""
    before, after = tail_batching.reorder_by_arithmetic()
    assert (before, after) == (12_000, 3_090)
    assert "12,000 → 3,090 s" in (ROOT / "docs/results/tail_batching.md").read_text()
