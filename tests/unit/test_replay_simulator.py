"""Simulated rounds: the simulator by hand and step by step, and the command that compares policies."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.profile import load, save
from sglang_pat.tools.commands import run
from studies import PROFILES
from studies.compare import AS_IS, KNOWN, ProfiledMachine, Workload, compare, compute_regrets, main
from studies.shapes import parse_shape
from studies.simulate import Batch, Drain, describe_queueing

from .drawn import examples
from .policy_world import crossing, machine
from .profiles_for_tests import profile as linear_profile

pytestmark = pytest.mark.unit


def batch(lengths, prompt=100) -> Batch:
    lengths = np.asarray(lengths, dtype=np.int64)
    return Batch(prompt=np.full(len(lengths), prompt), length=lengths, family=np.arange(len(lengths)), limit=8192)


def add_up_steps(predictor, drawn: Batch, tp: int, start: int, end: int) -> float:
    """Seconds of tokens ``start`` to ``end`` in one layout, one step and one replica at a time."""
    replicas = 4 // tp
    seconds = np.zeros(replicas)
    for token in range(start, end):
        running = [np.flatnonzero((drawn.length > token) & (np.arange(len(drawn.length)) % replicas == r))
                   for r in range(replicas)]  # fmt: skip
        active = sum(len(on) > 0 for on in running)
        for r, on in enumerate(running):
            if len(on):
                tokens = float((drawn.prompt[on] + token).sum())
                seconds[r] += predictor.step_seconds(tp, len(on), tokens, active)
    return float(seconds.max())


@examples(30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sampled_from([1, 2, 4]))
def test_static_layouts_step_by_step(lengths, tp):
    """Exact where step times are linear in tokens."""
    found = linear_profile()
    predictor, costs = machine(found)
    case = Drain(predictor, costs, found.fingerprint, batch(lengths), 16)
    assert case.run_static(tp).seconds == pytest.approx(
        add_up_steps(predictor, case.batch, tp, 0, max(lengths)), rel=1e-9
    )


def test_a_schedule_step_by_step():
    found = linear_profile()
    predictor, costs = machine(found)
    drawn = batch([20, 100, 100, 300, 400])
    case = Drain(predictor, costs, found.fingerprint, drawn, 1)
    at = int(np.flatnonzero(case.points == 100)[0])
    run = case.run_schedule([(at, 4)])
    expected = add_up_steps(predictor, drawn, 1, 0, 100) + add_up_steps(predictor, drawn, 4, 100, 400)
    assert run.seconds == pytest.approx(expected + costs.estimate(1, 4, [200, 200]).seconds, rel=1e-9)
    assert [switch[:3] for switch in run.switches] == [(100, 1, 4)]


def test_what_a_policy_sees():
    """A policy sees those that still run, their present lengths and replicas; finished ones are in the history."""
    found = linear_profile()
    case = Drain(*machine(found), found.fingerprint, batch([5, 40, 40, 90, 300, 300]), 16)
    seen, history = [], LengthHistory()

    def policy(snapshot, history):
        seen.append((snapshot, len(history)))
        return Decision(tp=2 if snapshot.load.output[0] >= 40 else 1)

    case.run_policy(policy, history, complete=True)
    for snapshot, finished in seen:
        assert snapshot.requests == len(snapshot.load) == 6 - finished
        assert snapshot.peak == 6 and snapshot.last_arrival == 0.0 and snapshot.complete
    tps = [snapshot.tp for snapshot, _ in seen]
    assert tps == sorted(tps) and set(tps) == {1, 2}
    after = next(s for s, _ in seen if s.tp == 2)
    assert after.load.replica.tolist() == [1, 0, 1] and after.last_switch > 0
    times = [snapshot.now for snapshot, _ in seen]
    assert times == sorted(times) and len(history) == 6


def test_lowering_deals_anew_those_that_are_left():
    """The two that one replica of tp=2 had are on one each, as in the engine; the round takes what that takes."""
    found = linear_profile()
    predictor, costs = machine(found)
    drawn = batch([300, 20, 300, 20, 300, 20, 300, 20])
    case = Drain(predictor, costs, found.fingerprint, drawn, 1)
    seen = []

    def policy(snapshot, history):
        seen.append(snapshot)
        return Decision(tp={1: 4, 4: 2, 2: 2}[snapshot.tp] if snapshot.requests == 4 else 1)

    run = case.run_policy(policy, LengthHistory())
    assert [switch[1:3] for switch in run.switches] == [(1, 4), (4, 2)]
    lowered = [s for s in seen if s.tp == 2]
    assert all(s.load.replica.tolist() == [0, 1, 0, 1] for s in lowered), "by place it would be 0 for all of them"
    assert [s.switches for s in seen[-2:]] == [2, 2]
    first = lowered[0]
    left = add_up_steps(predictor, batch([300] * 4), 2, int(first.load.output[0]), 300)
    assert run.seconds - first.now == pytest.approx(left, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("name", "batch"), [("8xH100-qwen3-30b-a3b", 512), ("8xH100-qwen2.5-32b", 1024)])
def test_a_round_does_not_go_to_and_fro(name, batch):
    """The mixture's tp=4 and tp=8 are nearly the same in the tail, if requests are dealt evenly; ``survival`` counts
    on that, and once switched up to 24 times in a simulation that put them back where they were.  Of the dense model's
    replicas it once believed that they decode no more than the 256 requests that the profile was made for."""
    workload = Workload(shape=parse_shape("deepscaler"), batch=batch, rounds=3)
    runs = compare(ProfiledMachine(load(PROFILES / f"{name}.json")), workload, ["survival"], 32)
    assert max(len(run.switches) for run in runs["survival"]) <= 5
    assert compute_regrets(runs, "survival").mean() <= 0.005


def test_crowded_batches_are_told():
    found = linear_profile().fingerprint
    assert describe_queueing(found, batch([100] * 8)) is None
    assert "KV tokens" in describe_queueing(found, batch([200_000] * 8))
    assert "a replica" in describe_queueing(found, batch([10] * 80))


def test_policies_learn_how_many_requests_come():
    """An engine's policy waits in the first two rounds only; one that is told does not even there."""
    asked: dict[str, list[list[bool]]] = {}

    class Watched(ProfiledMachine):
        def make_policy(self, name):
            rounds = asked.setdefault(name, [])

            def decide(snapshot, history):
                if snapshot.now == 0.0:
                    rounds.append(set())
                rounds[-1].add(snapshot.complete)
                return Decision(tp=1)

            return decide

    workload = Workload(shape=parse_shape("lognormal:5,1,2000"), batch=24, rounds=4)
    compare(Watched(crossing()), workload, ["pat", "survival" + KNOWN, "static:4"])
    assert asked == {"pat": [{False}, {False}, {True}, {True}], "survival": [{True}] * 4}


def test_a_policy_learns_that_its_profile_is_wrong():
    """tp=4 is believed to be twice as fast as it is, tp=1 half as fast: the first round pays for it, not the rest.
    Calibrated, not even the first one does."""
    right = crossing(control=0.02)
    off = {1: 2.0, 2: 1.0, 4: 0.5}
    points = tuple(msgspec.structs.replace(p, seconds=p.seconds * off[p.tp]) for p in right.decode)
    wrong = ProfiledMachine(msgspec.structs.replace(right, decode=points))
    workload = Workload(shape=parse_shape("lognormal:6,0.8,1024"), batch=24, rounds=2)
    names = ["survival", "survival" + AS_IS]
    learnt = compare(ProfiledMachine(right), workload, names, believed=wrong, noise=0.1)
    first = replace(workload, rounds=1)
    calibrated = compare(ProfiledMachine(right), first, names[:1], believed=wrong, noise=0.1, calibration=0.03)
    assert compute_regrets(learnt, "survival" + AS_IS)[1:].mean() > 0.15
    assert compute_regrets(learnt, "survival")[1:].mean() < 0.05
    assert max(len(run.switches) for run in learnt["survival"]) <= 4
    assert compute_regrets(calibrated, "survival")[0] < 0.05 < compute_regrets(learnt, "survival")[0]


def test_the_command(tmp_path, capsys):
    save(crossing(), tmp_path / "profile.json")
    words = (
        f"--profile {tmp_path / 'profile.json'} --lengths lognormal:5,1,1500 --batch 24 --rounds 2 --rho 0.5".split()
    )
    assert main([*words, "--policies", "pat,survival,threshold:4,static:1,oracle"]) == 0
    printed = capsys.readouterr().out
    for name in ("pat", "survival, later rounds", "threshold:4", "static:1", "oracle"):
        assert name in printed
    for bad in (
        "--lengths nothing",
        "--batch 0",
        "--rho 1.5",
        "--policies static:3",
        "--policies threshold:x",
        "--out x",
    ):
        assert run("compare", main, [*words, *bad.split()]) == 2
        assert capsys.readouterr().err.count("\n") == 1
