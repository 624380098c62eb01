"""Response lengths: the curve against textbook figures, the prior beyond the data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import lognorm

from sglang_pat.policies.lengths import EDGES, LengthHistory, Lognormal

from .drawn import examples

pytestmark = pytest.mark.unit

# Freireich et al. (1963), remission in weeks under 6-MP, and Kaplan and Meier's estimate of it in any textbook
# (e.g. Kalbfleisch and Prentice, table 1.2).
WEEKS = [6, 6, 6, 7, 10, 13, 16, 22, 23]
CENSORED_WEEKS = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
TEXTBOOK = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}


def tokens(weeks: int) -> int:
    """One bin a week, so that the grid does not blur the ranks."""
    return int(EDGES[40 + weeks])


def test_kaplan_meier_textbook():
    history = LengthHistory(strength=1e-9)
    for week in WEEKS:
        history.observe(tokens(week), week)
    for week in CENSORED_WEEKS:
        history.observe(tokens(week), week, finished=False)
    curve = history.curve(10**6)
    for week, survival in TEXTBOOK.items():
        assert curve.survival(tokens(week)) == pytest.approx(survival, abs=6e-4)
    assert curve.survival(tokens(5)) == pytest.approx(1.0)


def test_running_requests_are_censored():
    """The same figures when those censored are still running."""
    history = LengthHistory(strength=1e-9)
    for week in WEEKS:
        history.observe(tokens(week), week)
    curve = history.curve(10**6, np.array([tokens(week) for week in CENSORED_WEEKS]))
    assert curve.survival(tokens(23)) == pytest.approx(0.448, abs=6e-4)


def test_nothing_seen_is_the_prior():
    curve = LengthHistory(prior=Lognormal(7.919, 0.885)).curve(24576)
    at = EDGES[60:130]
    assert curve.survival(at) == pytest.approx(lognorm(0.885, scale=np.exp(7.919)).sf(at), rel=1e-6)


def test_the_default_prior_is_scaled_to_the_limit():
    history = LengthHistory()
    assert history.curve(8192).survival(1024) == pytest.approx(0.5, abs=0.02)
    assert history.curve(1024).survival(128) == pytest.approx(0.5, abs=0.02)


def test_beyond_what_was_seen_the_prior_rules():
    """All of 1,000 responses were short; one that got far is not taken to end at once."""
    prior = Lognormal(7.0, 1.0)
    history = LengthHistory(prior=prior)
    for family in range(1000):
        history.observe(100, family)
    curve, alone = history.curve(24576), LengthHistory(prior=prior).curve(24576)
    assert curve.survival(110) < 0.01
    left = np.array([2000, 4000, 8000])
    assert curve.survival(left) / curve.survival(1000) == pytest.approx(
        alone.survival(left) / alone.survival(1000), rel=1e-9
    )


def test_all_aborted_never_ends_sooner_than_the_prior():
    history = LengthHistory(prior=Lognormal(6.0, 1.0))
    for family in range(50):
        history.observe(1000, family, finished=False)
    assert history.curve(24576).survival(900) > 0.9


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 5), st.booleans()), max_size=60),
    st.lists(st.integers(0, 30000), max_size=20),
    st.integers(1, 10**6),
)
def test_a_curve_is_a_survival_curve(responses, running, limit):
    history = LengthHistory(window=40)
    for response in responses:
        history.observe(*response)
    curve = history.curve(limit, np.array(running, dtype=np.int64))
    survival = curve.survival(np.linspace(0, 2 * limit, 100))
    assert np.isfinite(survival).all() and survival[0] == 1.0
    assert (np.diff(survival) <= 1e-15).all() and (survival >= 0).all()


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 9), st.booleans()), max_size=120), st.integers(1, 30))
def test_only_the_window_counts(responses, window):
    long, short = LengthHistory(window=window), LengthHistory(window=window)
    for response in responses:
        long.observe(*response)
    for response in responses[-window:]:
        short.observe(*response)
    assert len(long) == len(short)
    assert (long.curve(1000).hazards == short.curve(1000).hazards).all()


def test_written_and_read_it_is_the_same():
    history = LengthHistory(prior=Lognormal(7.0, 1.0), window=500)
    for family, length in enumerate(np.exp(np.random.default_rng(0).normal(7, 1, 800)).astype(int)):
        history.observe(length, family)
    again = LengthHistory.from_dict(json.loads(json.dumps(history.to_dict())))
    running = np.array([100, 200])
    assert (again.curve(8192, running).hazards == history.curve(8192, running).hazards).all()
    for other in (history, again):
        other.observe(50, 1000)
    assert again.to_dict() == history.to_dict()


def test_a_resumed_response_takes_the_place_of_its_first_piece():
    whole, pieces = LengthHistory(), LengthHistory()
    for family in range(20):
        pieces.observe(300, family, finished=False)
        pieces.observe(500, family, finished=False, since=300)
        for history in (whole, pieces):
            history.observe(1200, family, since=500)
    assert len(pieces) == len(whole)
    assert (pieces.curve(4096).hazards == whole.curve(4096).hazards).all()


def test_bad_parameters():
    with pytest.raises(ValueError, match="must be positive"):
        LengthHistory(window=0)
