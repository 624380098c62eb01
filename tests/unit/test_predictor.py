"""Step and prefill times between, at and beyond measured points, against a slow interpolation written apart."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.predict.predictor import Predictor, Surface
from sglang_pat.predict.profile import ProfileError

from .drawn import examples
from .profiles_for_tests import decode_points, prefill_points, profile

pytestmark = pytest.mark.unit

BATCHES, CONTEXTS = (1, 2, 4, 8, 16), (128, 512, 1024, 2048, 8192)


def linear(tp, replicas, batch, context):
    return 1e-3 + 4e-3 / tp + 2e-5 * batch + 1e-8 * batch * context * replicas


def crooked(tp, replicas, batch, context):
    """Rises everywhere, with a different slope in every cell."""
    return 1e-3 + 5e-3 / tp + 3e-4 * batch**0.7 + 2e-7 * (batch * context) ** 0.8 + 1e-4 * (replicas - 1)


def table(seconds, tp=2, replicas=2):
    """Batch → sorted [(aggregate tokens, seconds)]."""
    return {b: [(b * c, seconds(tp, replicas, b, c)) for c in CONTEXTS] for b in BATCHES}


def slow_curve(knots, x):
    if len(knots) == 1:
        return knots[0][1]
    xs = [knot[0] for knot in knots]
    i = min(max(bisect.bisect_right(xs, x) - 1, 0), len(knots) - 2)
    (x0, y0), (x1, y1) = knots[i], knots[i + 1]
    slope = (y1 - y0) / (x1 - x0)
    if x < xs[0]:
        return y0 + min(max(slope, 0), y0 / x0) * (x - x0)
    if x > xs[-1]:
        return y1 + max(slope, 0) * (x - x1)
    return y0 + slope * (x - x0)


def slow(curves, batch, x):
    batches = sorted(curves)
    i = min(max(bisect.bisect_right(batches, batch) - 1, 0), len(batches) - 2)
    b0, b1 = batches[i], batches[i + 1]
    low, high = slow_curve(curves[b0], x), slow_curve(curves[b1], x)
    value = low + (high - low) * (batch - b0) / (b1 - b0)
    if batch > batches[-1]:
        return max(value, high)
    if batch < batches[0]:
        return min(max(value, low * batch / b0), low)
    return value


@pytest.mark.parametrize("seconds", [linear, crooked])
def test_exact_at_measured_points(seconds):
    found = Predictor(profile(decode=decode_points(seconds, BATCHES, CONTEXTS)))
    for tp, replicas in ((1, 4), (2, 2), (4, 1)):
        for batch in BATCHES:
            for context in CONTEXTS:
                got = found.step_seconds(tp, batch, batch * context)
                assert got == pytest.approx(seconds(tp, replicas, batch, context), rel=1e-12)


@examples(300)
@given(st.floats(0.25, 64), st.floats(1, 1e6))
def test_agrees_with_a_slow_interpolation(batch, tokens):
    got = CROOKED.step_seconds(2, batch, tokens)
    assert isinstance(got, float)
    assert got == pytest.approx(slow(table(crooked), batch, tokens), rel=1e-9)


CROOKED = Predictor(profile(decode=decode_points(crooked, BATCHES, CONTEXTS)))


@examples(50)
@given(st.lists(st.floats(1e-4, 1.0), min_size=25, max_size=25), st.floats(0.5, 40), st.floats(1, 3e5))
def test_agrees_on_measurements_that_neither_rise_nor_fall(seconds, batch, tokens):
    lookup = dict(zip([(b, c) for b in BATCHES for c in CONTEXTS], seconds, strict=True))
    curves = table(lambda tp, replicas, b, c: lookup[b, c])
    surface = Surface((b, x, s) for b, curve in curves.items() for x, s in curve)
    got = float(surface(np.asarray(batch), np.asarray(tokens)))
    assert got == pytest.approx(slow(curves, batch, tokens), rel=1e-9, abs=1e-15)
    assert got >= 0


@examples(50)
@given(st.lists(st.floats(1e-4, 1.0), min_size=25, max_size=25))
def test_more_work_never_takes_less_time(seconds):
    """Whatever was measured.  Where it falls, the times in question lie between the least and the most of them."""
    lookup = dict(zip([(b, c) for b in BATCHES for c in CONTEXTS], seconds, strict=True))
    points = decode_points(lambda tp, replicas, b, c: lookup[b, c], BATCHES, CONTEXTS, layouts=((2, 2),))
    found = Predictor(profile(decode=points))
    times = np.array([[found.step_seconds(2, b, b * c) for c in CONTEXTS] for b in BATCHES])
    assert (np.diff(times, axis=0) >= -1e-12).all() and (np.diff(times, axis=1) >= -1e-12).all()
    assert min(seconds) * 0.99 <= times.min() and times.max() <= max(seconds) * 1.01


def test_noise_of_single_points_is_smoothed():
    """20% at each point by itself: less than 15% are left."""
    random = np.random.default_rng(0)
    noise = {(tp, b, c): random.normal() for tp in (1, 2, 4) for b in BATCHES for c in CONTEXTS}
    noisy = decode_points(lambda tp, r, b, c: linear(tp, r, b, c) * np.exp(0.2 * noise[tp, b, c]), BATCHES, CONTEXTS)
    found = Predictor(profile(decode=noisy))
    off = [found.step_seconds(tp, b, b * c) / linear(tp, 4 // tp, b, c) for tp, b, c in noise]
    assert np.std(np.log(off)) < 0.15 and 0.9 < np.std(list(noise.values())) < 1.1


def test_beyond_the_grid():
    found = Predictor(profile(decode=decode_points(linear, BATCHES, CONTEXTS)))
    assert found.step_seconds(2, 32, 32 * 8192) == pytest.approx(linear(2, 2, 32, 8192))
    assert found.step_seconds(2, 4, 1_000_000) == pytest.approx(linear(2, 2, 4, 250_000))
    assert found.step_seconds(2, 4, 4) == pytest.approx(linear(2, 2, 4, 1))
    assert found.step_seconds(2, 0, 0) == 0.0


def test_a_curve_of_one_knot_borrows_a_slope():
    points = decode_points(linear, (1, 2), (128, 1024)) + decode_points(linear, (8,), (1024,))
    found = Predictor(profile(decode=points))
    for context in (128, 1024, 4096):
        assert found.step_seconds(2, 8, 8 * context) == pytest.approx(linear(2, 2, 8, context))


def test_single_batch_and_single_point():
    one = Predictor(profile(decode=decode_points(linear, (2,), (128, 1024))))
    assert one.step_seconds(1, 9, 2048) == one.step_seconds(1, 2, 2048) == pytest.approx(linear(1, 4, 2, 1024))
    point = Predictor(profile(decode=decode_points(linear, (2,), (128,))))
    assert point.step_seconds(1, 9, 5000) == pytest.approx(linear(1, 4, 2, 128))


def test_between_numbers_of_replicas():
    layouts = ((1, 1), (1, 4), (2, 2), (4, 1))
    found = Predictor(profile(decode=decode_points(linear, BATCHES, CONTEXTS, layouts)))
    for replicas in (1, 2, 2.5, 4):
        assert found.step_seconds(1, 4, 4096, replicas) == pytest.approx(linear(1, replicas, 4, 1024))
    assert found.step_seconds(1, 4, 4096) == found.step_seconds(1, 4, 4096, 4) == found.step_seconds(1, 4, 4096, 9)
    replicas = np.array([0, 1, 3, 4, 7])
    expected = [found.step_seconds(1, 4, 4096, r) for r in replicas]
    assert found.step_seconds(1, 4, 4096, replicas) == pytest.approx(expected)


def test_arrays_equal_scalars():
    rng = np.random.default_rng(7)
    batch, tokens = rng.uniform(0, 40, 500), rng.uniform(1, 4e5, 500)
    expected = [CROOKED.step_seconds(1, b, t) for b, t in zip(batch, tokens, strict=True)]
    assert CROOKED.step_seconds(1, batch, tokens) == pytest.approx(expected, rel=1e-14)
    grid = CROOKED.step_seconds(1, batch[:, None], tokens[None, :7])
    assert grid.shape == (500, 7) and grid[3, 5] == CROOKED.step_seconds(1, batch[3], tokens[5])


def test_prefill():
    seconds = lambda tp, replicas, batch, length: batch * (1e-4 * length + 1e-8 * length**2) / tp  # noqa: E731
    found = Predictor(profile(prefill=prefill_points(seconds, (1, 2, 8), (128, 1024, 4096))))
    for batch, length in ((1, 1024), (5, 4096), (11, 128)):
        assert found.prefill_uniform(2, batch, length) == pytest.approx(seconds(2, 2, batch, length))
    assert found.has_prefill(4) and not found.has_prefill(8)


def test_refuses_what_it_has_not_got():
    with pytest.raises(ProfileError, match="no decode times"):
        Predictor(profile(decode=()))
    with pytest.raises(ProfileError, match=r"tp=3, only for \[1, 2, 4\]"):
        CROOKED.step_seconds(3, 1, 100)
    with pytest.raises(ProfileError, match="no prefill times for tp=1"):
        Predictor(profile(prefill=())).prefill_uniform(1, 1, 5)


@pytest.mark.parametrize("x, seconds", [(447, 0.001765), (3520, 0.006888), (3364, 0.003584)])
def test_no_time_is_negative_by_rounding(x, seconds):
    """The line from the first knot to the origin ends a hair above it."""
    steep = Surface([(1, x, seconds), (1, 2 * x, 3 * seconds)])
    assert 0 < steep(np.array(1.0), np.array(0.0)) < 1e-8 * seconds
