"""Response lengths: the curve against textbook figures, the prior beyond the data, likeness within families."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import lognorm, norm

from sglang_pat.policies.families import MAX_CORRELATION, MIN_FAMILIES, expected_scores
from sglang_pat.policies.lengths import EDGES, REFRESH, LengthHistory, Lognormal

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
    assert long._families == short._families


def test_written_and_read_it_is_the_same():
    history = fill(LengthHistory(prior=Lognormal(7.0, 1.0), window=500), families=100, correlation=0.7)
    again = LengthHistory.from_dict(json.loads(json.dumps(history.to_dict())))
    running = np.array([100, 200])
    assert again.correlation == history.correlation > 0
    assert (again.curve(8192, running).hazards == history.curve(8192, running).hazards).all()
    for other in (history, again):
        fill(other, families=10, correlation=0.0, first=1000)
    assert again.to_dict() == history.to_dict()


def fill(history: LengthHistory, families: int, correlation: float, size: int = 8, first: int = 0, seed: int = 0):
    """Lognormal lengths whose logs are correlated within a family."""
    random = np.random.default_rng(seed)
    for family in range(families):
        common = random.normal()
        own = random.normal(size=size)
        for score in np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own:
            history.observe(round(np.exp(7 + score)), first + family)
    return history


@pytest.mark.parametrize("correlation", [0.0, 0.2, 0.5, 0.8])
def test_the_correlation_is_found(correlation):
    history = fill(LengthHistory(), families=REFRESH * 6, correlation=correlation)
    assert history.correlation == pytest.approx(correlation, abs=0.05)


def test_no_correlation_from_few_families_or_equal_lengths():
    assert fill(LengthHistory(), families=MIN_FAMILIES - 1, correlation=0.9, size=REFRESH).correlation == 0
    history = LengthHistory()
    for index in range(4 * REFRESH):
        history.observe(500, index // 8)
    assert history.correlation == 0


def test_short_responses_of_unfinished_families_do_not_pass_for_likeness():
    """Half-way through a batch without likeness: the short halves of many families are in, and whole older ones."""
    history = fill(LengthHistory(), families=100, correlation=0.0)
    random = np.random.default_rng(5)
    for family in range(1000, 1100):
        for score in random.normal(size=8):
            if score < 0:
                history.observe(round(np.exp(7 + score)), family)
    assert history.correlation < 0.08


def test_siblings_shift_the_expectation():
    """A family whose members ended early is expected to end early; one that outlived others, late."""
    history = fill(LengthHistory(), families=100, correlation=0.7)
    for _ in range(6):
        history.observe(150, 901)
        history.observe(8000, 902)
    mean, spread = history.expect(history.curve(16384), np.array([901, 902, 903]), np.array([140, 140, 140]))
    assert mean[0] < -1 < 1 < mean[1] and mean[2] == pytest.approx(0.0, abs=1e-9)
    assert spread[0] < spread[2] == pytest.approx(1.0)


def test_siblings_that_were_cut_are_not_taken_for_finished():
    """Six siblings aborted early say that the seventh gets further than they did, not that it ends there."""
    history = fill(LengthHistory(), families=100, correlation=0.7)
    for _ in range(6):
        history.observe(150, 901, finished=False)
        history.observe(8000, 902, finished=False)
    mean, _ = history.expect(history.curve(16384), np.array([901, 902, 903]), np.array([140, 140, 140]))
    assert 0 < mean[0] < 0.3 and mean[1] > 1


def test_the_correlation_is_found_where_half_was_cut():
    """Every response that would be longer than the median is cut at it, or somewhere below (aborted)."""
    random, history = np.random.default_rng(0), LengthHistory()
    for family in range(REFRESH * 6):
        scores = np.sqrt(0.6) * random.normal() + np.sqrt(0.4) * random.normal(size=8)
        for score, abort in zip(scores, random.uniform(-1, 1, size=8), strict=True):
            cut = min(abort, 0.0)
            history.observe(round(np.exp(7 + min(score, cut))), family, finished=score < cut)
    assert history.correlation == pytest.approx(0.6, abs=0.2)


def test_a_resumed_response_takes_the_place_of_its_first_piece():
    whole, pieces = LengthHistory(), LengthHistory()
    for family in range(20):
        pieces.observe(300, family, finished=False)
        pieces.observe(500, family, finished=False, since=300)
        for history in (whole, pieces):
            history.observe(1200, family, since=500)
    assert len(pieces) == len(whole) and pieces._families == whole._families
    assert (pieces.curve(4096).hazards == whole.curve(4096).hazards).all()


def test_expected_scores_by_hand():
    """Finished siblings only: the posterior of a normal mean."""
    correlation, scores = 0.5, np.array([1.0, 2.0])
    none = np.array([])
    mean, spread = expected_scores(correlation, [scores, none], [none, none], np.array([0, 1]), np.array([0.0, 0.0]))
    # g has prior N(0, 1) and two observations z = √.5 g + √.5 e: precision 3, mean √.5 / .5 * 3 / 3.
    assert mean == pytest.approx([1.0, 0.0])
    assert spread == pytest.approx([np.sqrt(0.5 / 3 + 0.5), 1.0])


@pytest.mark.parametrize(("correlation", "known", "present"), [
    (0.5, [], [1.0, 1.0]),
    (0.5, [0.3], [0.5, 1.5, 1.5]),
    (0.8, [-0.2, 0.1], [1.0] * 4),
    (MAX_CORRELATION, [0.5], [1.0, 1.2]),
])  # fmt: skip
def test_expected_scores_of_running_siblings_against_sampling(correlation, known, present):
    random = np.random.default_rng(0)
    g = random.normal(size=400_000)
    weights = np.ones_like(g)
    for z in known:
        weights *= norm.pdf(z, np.sqrt(correlation) * g, np.sqrt(1 - correlation))
    for z in present[1:]:  # those beside the first, of which we ask
        weights *= norm.sf(z, np.sqrt(correlation) * g, np.sqrt(1 - correlation))
    mean = np.average(g, weights=weights)
    variance = np.average((g - mean) ** 2, weights=weights)
    for cut in (0, len(present) - 1):  # the others run, or were cut there: it says the same
        means, spreads = expected_scores(
            correlation,
            [np.array(known)],
            [np.array(present[len(present) - cut :])],
            np.zeros(len(present) - cut, dtype=int),
            np.array(present[: len(present) - cut]),
        )
        assert means[0] == pytest.approx(np.sqrt(correlation) * mean, abs=0.03)
        assert spreads[0] == pytest.approx(np.sqrt(correlation * variance + 1 - correlation), abs=0.03)


def test_bad_parameters():
    with pytest.raises(ValueError, match="must be positive"):
        LengthHistory(window=0)
