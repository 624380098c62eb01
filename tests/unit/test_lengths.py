"""Response lengths: the curve against textbook figures, the prior beyond the data."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from sglang_pat.policies import lengths
from sglang_pat.policies.lengths import EDGES, LengthHistory

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


@pytest.mark.parametrize("running", [False, True], ids=["cut", "still running"])
def test_kaplan_meier_textbook(monkeypatch, running):
    monkeypatch.setattr(lengths, "PRIOR_STRENGTH", 1e-9)
    history, censored = LengthHistory(), [tokens(week) for week in CENSORED_WEEKS]
    for week in WEEKS:
        history.observe(tokens(week), week)
    for length in () if running else censored:
        history.observe(length, length, finished=False)
    curve = history.make_curve(10**6, np.array(censored if running else []))
    for week, survival in TEXTBOOK.items():
        assert curve.survival(tokens(week)) == pytest.approx(survival, abs=6e-4)
    assert curve.survival(tokens(5)) == pytest.approx(1.0)


@pytest.mark.parametrize("limit", [1024, 24576])
def test_nothing_seen_is_the_prior(limit):
    """The prior's median is an eighth of the limit."""
    at = EDGES[40:130]
    wanted = ndtr(np.log(limit / 8 / at))
    assert LengthHistory().make_curve(limit).survival(at) == pytest.approx(wanted, rel=1e-6)


def test_beyond_what_was_seen_the_prior_rules():
    """All of 1,000 responses were short; one that got far is not taken to end at once."""
    history = LengthHistory()
    for family in range(1000):
        history.observe(100, family)
    curve, alone = history.make_curve(24576), LengthHistory().make_curve(24576)
    assert curve.survival(110) < 0.01
    left = np.array([2000, 4000, 8000])
    assert curve.survival(left) / curve.survival(1000) == pytest.approx(
        alone.survival(left) / alone.survival(1000), rel=1e-9
    )


def test_all_aborted_never_ends_sooner_than_the_prior():
    history = LengthHistory()
    for family in range(50):
        history.observe(1000, family, finished=False)
    assert history.make_curve(8192).survival(900) > 0.9


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 5), st.booleans()), max_size=60),
    st.lists(st.integers(0, 30000), max_size=20),
    st.integers(1, 10**6),
)
def test_a_curve_is_a_survival_curve(responses, running, limit):
    history = LengthHistory()
    for response in responses:
        history.observe(*response)
    curve = history.make_curve(limit, np.array(running, dtype=np.int64))
    survival = curve.survival(np.linspace(0, 2 * limit, 100))
    assert np.isfinite(survival).all() and survival[0] == 1.0
    assert (np.diff(survival) <= 1e-15).all() and (survival >= 0).all()


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 9), st.booleans()), max_size=120), st.integers(1, 30))
def test_only_the_window_counts(responses, window):
    long, short = LengthHistory(), LengthHistory()
    with patch.object(lengths, "WINDOW", window):
        for response in responses:
            long.observe(*response)
    for response in responses[-window:]:
        short.observe(*response)
    assert len(long) == len(short)
    assert (long.make_curve(1000).hazards == short.make_curve(1000).hazards).all()


def test_a_resumed_response_takes_the_place_of_its_first_piece():
    whole, pieces = LengthHistory(), LengthHistory()
    for family in range(20):
        pieces.observe(300, family, finished=False)
        pieces.observe(500, family, finished=False, since=300)
        for history in (whole, pieces):
            history.observe(1200, family, since=500)
    assert len(pieces) == len(whole)
    assert (pieces.make_curve(4096).hazards == whole.make_curve(4096).hazards).all()
