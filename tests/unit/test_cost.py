"""The cost of a switch: known parameters found again, the best split against every split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.predict.cost import DRAIN_STEPS, SwitchCosts, fit_robust_nnls
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import ProfileError

from .drawn import examples
from .profiles_for_tests import prefill_points, profile, switch_sample

pytestmark = pytest.mark.unit

RATES = (0.3, 1.3, 2.0)
"""Prefill time against the exchange's: all is recomputed, some is, or hardly anything."""
FIXED, PER_REQUEST, KV_FIXED, PER_TOKEN = 12e-3, 3e-4, 2e-3, 4e-6


def samples(from_tp=1, to_tp=4, scale=1.0, noise=0.0, outliers=0):
    """Switches of all combinations of 1..16 requests and 100..3200 tokens."""
    rng = np.random.default_rng(3)
    found = []
    for requests in (1, 4, 8, 16):
        for tokens in (100, 800, 3200):
            factor = 1 + noise * rng.standard_normal(3)
            control = scale * (FIXED + PER_REQUEST * requests)
            found.append(
                switch_sample(
                    from_tp,
                    to_tp,
                    requests,
                    tokens,
                    drain=rng.uniform(0, 0.05),
                    capsules=control * 0.3 * factor[0],
                    install=control * 0.7 * factor[1],
                    kv=scale * (KV_FIXED + PER_TOKEN * tokens) * factor[2],
                    **({"plan": 0.5} if len(found) < outliers else {}),
                )
            )
    return found


def costs(switches, **parts) -> SwitchCosts:
    found = profile(switches=tuple(switches), **parts)
    return SwitchCosts(found, Predictor(found))


def slow_prefill(rate):
    return prefill_points(lambda tp, n, b, c: rate * b * (1e-5 * c + 1e-9 * c * c) / tp, (1, 2, 8), (16, 256, 4096))


def test_finds_known_parameters_again():
    fit = costs(samples()).fit(1, 4)
    assert fit.fixed == pytest.approx(FIXED, rel=1e-6)
    assert fit.per_request == pytest.approx(PER_REQUEST, rel=1e-6)
    assert fit.kv_fixed == pytest.approx(KV_FIXED, rel=1e-6)
    assert fit.kv_per_token == pytest.approx(PER_TOKEN, rel=1e-6)
    assert fit.reshard == 0


@examples(50)
@given(st.floats(0, 10), st.floats(0, 10), st.integers(0, 3))
def test_robust_nnls(constant, slope, wrong):
    x = np.arange(12.0)
    y = constant + slope * x
    y[[2, 7, 9][:wrong]] += 100
    assert fit_robust_nnls(np.stack([np.ones(12), x], axis=1), y) == pytest.approx([constant, slope], abs=1e-3)


def test_parts_of_an_estimate():
    found = costs(samples(), prefill=slow_prefill(1e6))
    lengths = np.array([700, 300, 1000])
    cost = found.estimate(1, 4, lengths)
    drain = DRAIN_STEPS * found.predictor.step_seconds(1, 1, 2000 / 3, 3)
    assert cost.state_seconds == pytest.approx(KV_FIXED + PER_TOKEN * 2000, rel=1e-6)
    assert cost.seconds - cost.state_seconds == pytest.approx(FIXED + 3 * PER_REQUEST + drain, rel=1e-6)
    assert cost.recompute_below == 0


def test_a_lone_replica_waits_for_nobody():
    found = costs(samples(4, 1), prefill=slow_prefill(1e6))
    cost = found.estimate(4, 1, [50, 60, 70])
    assert cost.seconds - cost.state_seconds == pytest.approx(FIXED + 3 * PER_REQUEST, rel=1e-6)
    empty = found.estimate(4, 1)
    assert empty.seconds == pytest.approx(FIXED, rel=1e-6) and empty.state_seconds == empty.recompute_below == 0
    assert found.estimate(2, 2, [5, 6]).seconds == 0, "staying costs nothing"


def every_split(found: SwitchCosts, fit, to_tp, lengths):
    """Seconds of recomputing the k shortest, for every k that a single length can tell apart."""
    lengths = sorted(lengths)
    splits = {}
    for k in range(len(lengths) + 1):
        if 0 < k < len(lengths) and lengths[k - 1] == lengths[k]:
            continue
        rest = lengths[k:]
        seconds = fit.kv_fixed + fit.kv_per_token * sum(rest) if rest else 0.0
        if k:
            replicas = min(4 // to_tp, k)
            rms = (sum(length**2 for length in lengths[:k]) / k) ** 0.5
            seconds += found.predictor.prefill_uniform(to_tp, -(-k // replicas), rms, replicas)
        splits[k] = seconds
    return splits


@examples(200)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.sampled_from([(1, 4), (1, 2), (4, 2)]),
    st.sampled_from(RATES),
)
def test_best_split_against_every_split(lengths, pair, rate):
    found = SPLITS[rate]
    cost = found.estimate(*pair, lengths)
    splits = every_split(found, found.fit(*pair), pair[1], lengths)
    assert cost.state_seconds == pytest.approx(min(splits.values()), rel=1e-9)
    recomputed = sum(length < cost.recompute_below for length in lengths)
    assert splits[recomputed] == pytest.approx(cost.state_seconds, rel=1e-9)


PAIRS = samples(1, 4) + samples(1, 2) + samples(4, 2)
SPLITS = {rate: costs(PAIRS, prefill=slow_prefill(rate)) for rate in RATES}


def test_splits_inside_the_batch_happen():
    below = SPLITS[1.3].estimate(1, 4, [30, 60, 4000, 4500]).recompute_below
    assert below == 4000


def test_without_migration_everything_is_recomputed():
    only = [switch_sample(1, 4, 3, 500, mode="recompute", install=1e-2)]
    cost = costs(only).estimate(1, 4, [10, 500])
    assert cost.recompute_below == 501
    assert np.isfinite(cost.seconds)


def test_without_prefill_everything_moves():
    cost = costs(samples(), prefill=()).estimate(1, 4, [10, 500])
    assert cost.recompute_below == 0
    assert cost.state_seconds == pytest.approx(KV_FIXED + PER_TOKEN * 510, rel=1e-6)


def test_pairs_not_measured_follow_the_measured_ones():
    found = costs(samples(1, 4))
    unknown, known = found.fit(1, 2), found.fit(1, 4)
    assert unknown.fixed == pytest.approx(known.fixed) and unknown.per_request == pytest.approx(known.per_request)
    # Half of a token's KV changes rank instead of three quarters.
    assert unknown.kv_per_token == pytest.approx(PER_TOKEN * (1 / 2) / (3 / 4), rel=1e-6)
    assert found.fit(4, 1).kv_per_token == pytest.approx(PER_TOKEN, rel=1e-6)
    with pytest.raises(ProfileError, match="from tp=1 to tp=8"):
        found.fit(1, 8)


def test_one_sample_of_a_pair():
    found = costs(samples() + [switch_sample(1, 2, 6, 1000, kv=5e-3, install=20e-3)])
    fit = found.fit(1, 2)
    assert fit.kv_fixed == 0 and fit.kv_per_token == pytest.approx(5e-6)
    assert fit.fixed + 6 * fit.per_request == pytest.approx(20e-3)
    assert 0 < fit.per_request < PER_REQUEST * 1.5


def test_resharding():
    up = switch_sample(1, 4, 2, 100, kv=1e-3, weights=0.3, install=1e-2)
    found = costs([up, switch_sample(2, 4, 2, 100, kv=1e-3, weights=0.4)])
    seconds = {pair: found.fit(*pair).reshard for pair in ((1, 4), (4, 1), (2, 4), (1, 2))}
    assert seconds == pytest.approx({(1, 4): 0.3, (4, 1): 0.3, (2, 4): 0.4, (1, 2): 0.4})
    assert found.fit(1, 4).fixed == pytest.approx(1e-2)


def test_refuses_a_profile_without_switches():
    with pytest.raises(ProfileError, match="no switches"):
        costs([])
    with pytest.raises(ProfileError, match="neither move nor recompute"):
        costs([switch_sample(1, 4, 2, 10, mode="recompute", install=1e-2)], prefill=())
