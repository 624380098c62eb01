"""Scheduler steps → step times, prefill times, errors of predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from profiler import trajectory
from profiler.windows import decode_windows, prefill_seconds, spread
from sglang_pat.predict.predictor import Predictor

from .profiles_for_tests import profile

pytestmark = pytest.mark.unit


def steps(rank, count, seconds, requests, *, begin=0.0, tp=1, kind="decode", tokens=100):
    same = dict(rank=rank, tp=tp, kind=kind, seconds=seconds, requests=requests, tokens=tokens)
    return [same | {"at": begin + (i + 1) * seconds} for i in range(count)]


def test_only_full_batches_count():
    trace = steps(0, 3, 0.5, 2) + steps(0, 64, 0.01, 4, begin=1.5, tokens=400) + steps(0, 2, 0.005, 3, begin=2.14)
    found = decode_windows(trace, tp=1, replicas=1, batch=4, warm_up=4, most=60)
    assert found.samples == pytest.approx((0.01, 0.01, 0.01)) and found.size == 20
    assert found.context == 100
    assert decode_windows(trace, tp=1, replicas=1, batch=5, warm_up=4, most=60) is None
    assert decode_windows(trace, tp=2, replicas=1, batch=4, warm_up=4, most=60) is None


def test_several_replicas_count_only_while_all_are_full():
    trace = steps(0, 100, 0.01, 4) + steps(1, 50, 0.02, 4, begin=0.5)
    found = decode_windows(trace, tp=1, replicas=2, batch=4, warm_up=2, most=60)
    # From 0.54 s (rank 1 is warm) to 1.0 s (rank 0 is done): 46 steps of rank 0, 23 of rank 1.
    assert found.size * len(found.samples) <= 23
    assert all(sample == pytest.approx(0.015) for sample in found.samples)
    assert decode_windows(trace, tp=1, replicas=4, batch=4, warm_up=2, most=60) is None


def test_a_lone_replica_counts_once_the_others_are_silent():
    trace = steps(0, 30, 0.02, 2) + steps(0, 30, 0.01, 2, begin=0.6) + steps(1, 30, 0.02, 2)
    found = decode_windows(trace, tp=1, replicas=1, batch=2, warm_up=4, most=60)
    assert all(sample == pytest.approx(0.01) for sample in found.samples)


def test_one_disturbed_window_is_outvoted():
    trace = steps(0, 30, 0.01, 1) + steps(0, 1, 1.0, 1, begin=0.3) + steps(0, 33, 0.01, 1, begin=1.3)
    found = decode_windows(trace, tp=1, replicas=1, batch=1, warm_up=4, most=60)
    assert sorted(found.samples)[1] == pytest.approx(0.01) and spread(found.samples) > 1


def prefills(rank, *shapes, begin=0.0):
    made, at = [], begin
    for requests, tokens, seconds in shapes:
        at += seconds
        made += [dict(rank=rank, tp=1, kind="prefill", at=at, seconds=seconds, requests=requests, tokens=tokens)]
    return made


def test_prefill_of_a_batch_that_was_together():
    trace = prefills(0, (1, 256, 0.1), (4, 2048, 0.8)) + prefills(1, (1, 255, 0.1), (4, 2047, 0.6))
    asked = dict(tp=1, replicas=2, batch=4, length=512, plug=256)
    assert prefill_seconds(trace, **asked) == (pytest.approx(0.7), True)
    # The plug was not alone: its share goes by tokens.
    early = prefills(0, (2, 768, 0.3), (3, 1536, 0.6)) + prefills(1, (1, 256, 0.1), (4, 2048, 0.8))
    seconds, together = prefill_seconds(early, **asked)
    assert not together and seconds == pytest.approx(0.8)
    # Chunks of one request are as it should be, a request that came too early is not.
    chunks = prefills(0, (1, 256, 0.1), (3, 1100, 0.4), (2, 948, 0.4)) + prefills(1, (1, 256, 0.1), (4, 2048, 0.8))
    assert prefill_seconds(chunks, **asked)[1]
    lonely = prefills(0, (1, 256, 0.1), (1, 512, 0.2), (3, 1536, 0.6)) + prefills(1, (1, 256, 0.1), (4, 2048, 0.8))
    assert not prefill_seconds(lonely, **asked)[1]
    at_once = prefills(0, (4, 2048, 0.8)) + prefills(1, (4, 2048, 0.6))
    assert prefill_seconds(at_once, **asked | {"plug": 0}) == (pytest.approx(0.7), True)
    uneven = prefills(0, (1, 256, 0.1), (5, 2560, 1.0)) + prefills(1, (1, 256, 0.1), (3, 1536, 0.6))
    assert prefill_seconds(uneven, **asked) is None


def trace_of(predictor, tp, factor, count=60):
    """A draining batch on every replica that takes ``factor`` times what is predicted."""
    made = []
    for rank in range(4 // tp):
        at = 0.0
        for i in range(count):
            requests, tokens = (4, 800 + 4 * i) if i < count // 2 else (2, 600 + 2 * i)
            seconds = factor * predictor.step_seconds(tp, requests, tokens, 4 // tp)
            at += seconds
            made += [dict(rank=rank, tp=tp, kind="decode", at=at, seconds=seconds, requests=requests, tokens=tokens)]
    return made


def test_errors_of_a_trajectory():
    predictor = Predictor(profile())
    runs = [trajectory.decoded(trace_of(predictor, 2, factor), predictor, 2) for factor in (1.0, 1.1)]
    assert len(runs[0]) == 120
    assert trajectory.error([step] for step in runs[0]) == pytest.approx(0.0, abs=1e-9)
    assert trajectory.error([step] for step in runs[1]) == pytest.approx(0.1 / 1.1)
    assert trajectory.repeat_spread(runs) == pytest.approx(0.1 / 1.05)
    assert trajectory.slowness(runs[1]) == pytest.approx(1.1)
    assert trajectory.shape_error(runs) == pytest.approx(0.0, abs=1e-9), "each run has one speed"
    slow = [trajectory.decoded(trace_of(predictor, 2, factor), predictor, 2) for factor in (0.9, 1.3, 1.1)]
    assert trajectory.repeat_spread(slow) == pytest.approx((0.4 / 1.1 + 0.2 / 1.2 + 0.2) / 3)
    row = trajectory.summary("tp2×dp2", runs)
    assert row["steps"] == 240 and row["repeat to repeat"] == pytest.approx(0.1 / 1.05)
    assert row["slower than the sweep"] == pytest.approx(0.05)
    rates = trajectory.throughput(runs[0])
    assert set(rates) == {8, 4}
    for measured, predicted in rates.values():
        assert measured == pytest.approx(predicted)
    assert rates[8][0] == pytest.approx(8 / predictor.step_seconds(2, 4, 860), rel=0.02)


def test_what_is_wrong_whatever_the_speed():
    """Two windows a replica: one 1.2 times, the other 0.9 times what is predicted."""
    predictor = Predictor(profile())
    even = trajectory.decoded(trace_of(predictor, 2, 1.0, count=40), predictor, 2)
    uneven = [replace(step, measured=step.measured * (1.2 if step.requests == 4 else 0.9)) for step in even]
    first, second = (sum(s.predicted for s in even if s.requests == n) for n in (4, 2))
    whole = (1.2 * first + 0.9 * second) / (first + second)
    assert trajectory.slowness(uneven) == pytest.approx(whole)
    assert trajectory.shape_error([uneven]) == pytest.approx((1 - whole / 1.2 + whole / 0.9 - 1) / 2)


def test_what_is_wrong_beyond_the_noise():
    """Three runs of 24 windows, each window off by 10% up or down, beside noise of 20% or none."""
    predictor, rng = Predictor(profile()), np.random.default_rng(0)
    even = trajectory.decoded(trace_of(predictor, 1, 1.0, count=240), predictor, 1)
    wrong = {id(step): 1.1 if i % 2 else 0.9 for i, w in enumerate(trajectory.windows(even)) for step in w}

    def run(bias: bool, noise: float) -> list[trajectory.Decoded]:
        factor = {id(s): f for w in trajectory.windows(even) for f in [1 + noise * rng.normal()] for s in w}
        return [replace(s, measured=s.measured * factor[id(s)] * (wrong[id(s)] if bias else 1)) for s in even]

    assert trajectory.own_error([run(True, 0.0)] * 3) == pytest.approx(0.1, abs=0.01)
    # Means over many draws, for the estimate itself is noisy.
    for bias, wanted in ((True, 0.1), (False, 0.0)):
        found = [trajectory.own_error([run(bias, 0.2) for _ in range(3)]) for _ in range(40)]
        assert np.mean(np.square(found)) == pytest.approx(wanted**2, abs=0.003)


def test_windows_stay_on_one_replica():
    predictor = Predictor(profile())
    cut = trajectory.windows(trajectory.decoded(trace_of(predictor, 1, 1.0, count=55), predictor, 1))
    assert all(len({step.rank for step in window}) == 1 for window in cut)
    assert sorted({len(window) for window in cut}) == [15, 20]


def test_what_layouts_have_in_common_is_told_from_what_is_between_them():
    """Turns of a machine that is 10, 30 and 20% slower; tp=2 is another 8% slower, give or take 1%."""
    predictor = Predictor(profile())
    speeds = {"tp1×dp4": (1.1, 1.3, 1.2), "tp2×dp2": (1.1 * 1.08, 1.3 * 1.09, 1.2 * 1.07)}
    result = {
        name: [trajectory.decoded(trace_of(predictor, 2, factor), predictor, 2) for factor in factors]
        for name, factors in speeds.items()
    }
    found = trajectory.between_layouts(result)
    assert found.common == pytest.approx(0.245, abs=0.01)
    assert found.beside == pytest.approx({"tp1×dp4": -0.0377, "tp2×dp2": 0.0392}, abs=0.001)
    assert found.error == pytest.approx(np.log(1.08) / 2**0.5, abs=0.001) and 0.002 < found.noise < 0.006
    noisy = {"a": result["tp1×dp4"], "b": result["tp1×dp4"][::-1]}
    assert trajectory.between_layouts(noisy).error == 0 < trajectory.between_layouts(noisy).noise
