"""When the policies switch: a table of situations."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from sglang_pat import policies
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.rules import RETRY_SECONDS, SETTLE_SECONDS
from sglang_pat.policies.snapshot import Decision, Snapshot
from sglang_pat.policies.threshold import make_threshold_policy

from .policy_world import NOW
from .policy_world import snapshot as make_snapshot

pytestmark = pytest.mark.unit

HISTORY = LengthHistory()


def snapshot(requests=0, peak=None, quiet=0.0, **about) -> Snapshot:
    """``quiet``: seconds since the last request came in."""
    return make_snapshot(requests=requests, peak=requests if peak is None else peak, quiet=quiet, **about)


def degree(decide, snap: Snapshot) -> int:
    decision = decide(snap, HISTORY)
    assert isinstance(decision, Decision)
    return decision.tp


CASES = [
    ("empty engine stays in base", dict(), 1),
    ("empty, and the round goes on", dict(tp=4, in_round=True), 4),
    ("empty engine goes back to base", dict(tp=4), 1),
    ("empty engine goes back to base at once", dict(tp=4, peak=20, quiet=0.0), 1),
    ("a full batch runs in base", dict(requests=9), 1),
    ("drained to the threshold: merge", dict(requests=8, peak=9), 4),
    ("one above the threshold: wait", dict(requests=9, peak=20), 1),
    ("drained to one", dict(requests=1, peak=20), 4),
    ("first requests of a batch: wait for more", dict(requests=3), 1),
    ("still coming in", dict(requests=8, quiet=SETTLE_SECONDS - 0.01), 1),
    ("a small batch that has settled", dict(requests=3, quiet=SETTLE_SECONDS), 4),
    ("a small batch, and no more are expected", dict(requests=3, complete=True), 4),
    ("no more are expected, but just split", dict(requests=3, complete=True, since_switch=SETTLE_SECONDS - 0.01), 1),
    ("no more are expected, but too many", dict(requests=9, complete=True), 1),
    ("a large batch never settles", dict(requests=30, quiet=60.0), 1),
    ("merged stays merged", dict(tp=4, requests=8, peak=20), 4),
    ("merged stays merged though one came in just now", dict(tp=4, requests=3, peak=3, quiet=0.0), 4),
    ("merged and filled up again: split", dict(tp=4, requests=17, peak=20), 1),
    ("merged and a few more: stay", dict(tp=4, requests=16, peak=20), 4),
    ("in between, drained: to the top", dict(tp=2, requests=4, peak=20), 4),
    ("in between, not yet settled: stay", dict(tp=2, requests=4), 2),
    ("in between, filled up: to base", dict(tp=2, requests=17), 1),
    ("after an abort: stay, though drained", dict(requests=2, peak=20, since_abort=RETRY_SECONDS - 0.01), 1),
    ("after an abort: stay, though empty", dict(tp=4, since_abort=0.0), 4),
    ("after an abort and a pause: again", dict(requests=2, peak=20, since_abort=RETRY_SECONDS), 4),
    ("just split for a control request: wait", dict(requests=2, peak=20, since_switch=SETTLE_SECONDS - 0.01), 1),
    ("no other control request came: merge again", dict(requests=2, peak=20, since_switch=SETTLE_SECONDS), 4),
    ("just merged and filled up: split at once", dict(tp=4, requests=17, since_switch=0.0), 1),
    ("just merged and empty: base at once", dict(tp=4, since_switch=0.0), 1),
    ("one layout only", dict(requests=2, peak=20, degrees=(2,), tp=2), 2),
    ("base is not 1", dict(tp=8, degrees=(2, 8)), 2),
]


@pytest.mark.parametrize(("kwargs", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_threshold(kwargs, expected):
    assert degree(make_threshold_policy(8), snapshot(**kwargs)) == expected


@pytest.mark.parametrize(("max_running", "requests", "expected"), [(2, 2, 4), (2, 3, 1), (3, 3, 4), (None, 8, 4)])
def test_threshold_merges_no_more_than_decode_at_once(max_running, requests, expected):
    assert degree(make_threshold_policy(8, max_running), snapshot(requests=requests, peak=20)) == expected


def run(decide, steps, tp=1) -> list[int]:
    """Degrees over ``(seconds since the step before, requests)``, arrivals where the count goes up."""
    now, peak, before, arrival, result = NOW, 0, 0, float("-inf"), []
    for seconds, requests in steps:
        now += seconds
        arrival = now if requests > before else arrival
        before, peak = requests, max(peak, requests) if requests else 0
        snap = Snapshot(
            now=now, tp=tp, degrees=(1, 2, 4), num_ranks=4, requests=requests, peak=peak, last_arrival=arrival
        )
        tp = degree(decide, snap)
        result.append(tp)
    return result


def test_a_round_merges_once():
    """Fill up, drain, next round: one merge and one split a round, none while it fills."""
    round_ = [(0.01, n) for n in range(1, 33)] + [(0.1, n) for n in range(31, -1, -1)]
    degrees = run(make_threshold_policy(8), round_ * 2)
    changes = [b for a, b in zip([1, *degrees], degrees, strict=False) if a != b]
    assert changes == [4, 1, 4, 1]


def test_trickle_does_not_flap():
    """Few requests, one at a time: merged after the first quiet second, and again only after the engine was empty."""
    degrees = run(
        make_threshold_policy(8), [(0.0, 1), (0.5, 2), (0.5, 1), (0.6, 1), (0.1, 2), (0.1, 3), (5.0, 1), (1.0, 0)]
    )
    assert degrees == [1, 1, 1, 4, 4, 4, 4, 1]


def test_hovering_about_the_threshold_does_not_flap():
    """Merged at 8, split above twice as many only."""
    load = [(0.1, 20), (0.1, 9), (0.1, 8), (0.1, 9), (0.1, 8), (0.1, 16), (0.1, 17)]
    assert run(make_threshold_policy(8), load) == [1, 1, 4, 4, 4, 4, 1]


def test_a_weight_update_in_buckets_on_a_paused_engine_does_not_flap():
    """Each bucket needs the base layout; the paused requests look like a tail all the while."""
    switch, degrees = NOW, []
    for tenth in range(50):
        now = NOW + tenth * 0.1
        if tenth % 5 == 0:
            switch = now  # a bucket came, and the engine is in base once more
        snap = dataclasses.replace(snapshot(requests=3, peak=20), now=now, last_switch=switch)
        degrees.append(degree(make_threshold_policy(8), snap))
    assert set(degrees) == {1}


def test_no_clock_in_the_module():
    for name in ("registry", "threshold", "pat", "survival", "rules"):
        module = importlib.import_module(f"{policies.__name__}.{name}")
        assert not {"time", "datetime", "random"} & set(vars(module)), name


def test_what_cannot_be_made():
    with pytest.raises(ValueError, match="choose one of survival, pat, threshold, schedule, manual, off"):
        make_policy("magic")
    for name in ("pat", "survival"):
        with pytest.raises(ValueError, match="--pat-profile"):
            make_policy(name)
