"""Time limits of test cases: the paper's rule, what is run again, and the estimate of wrong cuts against the truth."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_sandbox.limits import CaseRun, LimitRules, TimeLimits

from .drawn import examples

pytestmark = pytest.mark.unit

TIMES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["right", "wrong", "cut"]), st.floats(0, 40)))


def run(key: str, outcome: str, seconds: float = 1.0, limit: float = 2.0, rerun: bool = False) -> CaseRun:
    return CaseRun(key, outcome, seconds, limit, rerun)


@examples(100)
@given(TIMES)
def test_a_limit_is_the_papers(runs):
    limits = TimeLimits()
    limits.record([run(*entry) for entry in runs])
    for key, found in zip("abc", limits.get_limits("abc"), strict=True):
        right = [seconds for name, outcome, seconds in runs if name == key and outcome == "right"]
        assert found == (min(max(2.0, 1.5 * max(right)), 30.0) if right else 30.0)


@examples(100)
@given(TIMES)
def test_a_checkpoint_goes_on_as_the_job_would(runs):
    """The draws, too: the same runs after it are run again."""
    one = TimeLimits(LimitRules(rerun_share=0.5))
    one.record([run(*entry) for entry in runs])
    other = TimeLimits(one.rules)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    again = [run("a", "cut")] * 50 + [run("a", "right", rerun=True), run("b", "wrong", rerun=True)]
    assert one.record(again) == other.record(again)
    assert one.get_limits("abc") == other.get_limits("abc")
    assert one.estimate_wrong_cuts(10) == other.estimate_wrong_cuts(10)


@examples(100)
@given(TIMES, TIMES)
def test_whoever_is_told_twice_knows_no_more(runs, others):
    """The longest anchors; and of a rerun that both have seen no two."""
    both, one, other = (TimeLimits(LimitRules(rerun_share=0.5)) for _ in range(3))
    mine, theirs = ([run(*entry, rerun=True) for entry in entries] for entries in (runs, others))
    one.record(mine)
    other.record(mine + theirs)
    both.record(mine + theirs)
    for _ in range(2):
        one.merge(json.loads(json.dumps(other.state_dict())))
        assert one.state_dict() == both.state_dict()
    other.merge(TimeLimits().state_dict())
    assert other.state_dict() == both.state_dict()


def test_a_share_of_what_was_cut_is_run_again():
    limits = TimeLimits(LimitRules(rerun_share=0.02, seed=3))
    wanted = limits.record([run(str(number), "cut") for number in range(10_000)])
    assert 150 < sum(wanted) < 250  # 200, sd 14
    assert not any(limits.record([run("a", "wrong"), run("a", "right"), run("a", "error")] * 100))
    assert not any(limits.record([run("a", "cut", 30.0, limit=30.0)] * 1000)), "it had all the time there is"
    other = TimeLimits(LimitRules(rerun_share=0.02, seed=4))
    assert other.record([run(str(number), "cut") for number in range(10_000)]) != wanted


def test_a_wrong_cut_that_is_found_raises_the_limit():
    limits = TimeLimits()
    limits.record([run("a", "right", 0.1)])
    assert limits.get_limits("a") == [2.0]
    assert limits.record([run("a", "right", 4.0, limit=30.0, rerun=True)]) == [False]
    assert limits.get_limits("a") == [6.0]


def test_a_second_run_that_had_no_core_or_no_sandbox_says_nothing():
    limits = TimeLimits()
    limits.record([run("a", "cut", 3.0, limit=30.0, rerun=True), run("a", "lost", 0.0, limit=30.0, rerun=True)])
    assert math.isnan(limits.estimate_wrong_cuts(5).estimate)
    limits.record([run("a", "cut", 30.0, limit=30.0, rerun=True), run("a", "wrong", 3.0, limit=30.0, rerun=True)])
    assert limits.take_metrics()["rerun"] == 2


def test_a_step_in_numbers():
    limits = TimeLimits(LimitRules(rerun_share=0))
    limits.record([run("a", "right"), run("a", "wrong"), run("a", "cut"), run("b", "cut", 30.0, limit=30.0)])
    assert limits.take_metrics() == {
        "cases": 4, "right": 1, "wrong": 1, "cut": 2, "cut_at_maximum": 1, "wrong_cuts_low": 0, "wrong_cuts_high": 1,
    }  # fmt: skip
    limits.record([run("a", "cut")] * 8 + [run("a", "right", rerun=True)] + [run("a", "wrong", rerun=True)] * 3)
    found = limits.take_metrics()
    assert found["cut"] == 8 and found["rerun"] == 4 and found["wrong_cuts"] == 2
    assert 0 < found["wrong_cuts_low"] < 2 < found["wrong_cuts_high"] < 8
    assert limits.take_metrics() == {
        "wrong_cuts": 0, "wrong_cuts_low": 0, "wrong_cuts_high": 0,
    }  # fmt: skip


@pytest.mark.parametrize("truth", [0.0, 0.02, 0.1, 0.3])
def test_the_interval_holds_the_truth_as_often_as_it_says(truth):
    """400 jobs with 5,000 cuts each, 2% of them run again; Wilson's interval is a bit generous near 0."""
    held, jobs, cuts = 0, 400, 5000
    for job in range(jobs):
        draw = np.random.default_rng(job)
        limits = TimeLimits(LimitRules(rerun_share=1.0))
        reruns = draw.binomial(cuts, 0.02)
        limits.record([run("a", "right" if draw.random() < truth else "wrong", rerun=True) for _ in range(reruns)])
        found = limits.estimate_wrong_cuts(cuts)
        held += found.low <= truth * cuts <= found.high
    assert held / jobs >= 0.92


def test_no_rerun_says_nothing():
    found = TimeLimits().estimate_wrong_cuts(7)
    assert math.isnan(found.estimate) and (found.low, found.high) == (0, 7)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"minimum": 40.0}, "limits of 40.0 to 30.0 seconds"),
        ({"minimum": 0.0}, "must be above 0"),
        ({"factor": 0.5}, "limit factor is 0.5, must be 1 or more"),
        ({"rerun_share": 2.0}, "rerun_share is 2.0, must be from 0 to 1"),
    ],
)
def test_rules_that_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        LimitRules(**wrong)


@pytest.mark.parametrize(
    "damage", [{"anchors": None}, {"anchors": {"a": "x"}}, {"anchors": {"a": -1}}, {"draws": "x"}, {"right_reruns": 9},
               {"draws": math.inf}],
)  # fmt: skip
def test_a_damaged_checkpoint_changes_nothing(damage):
    limits = TimeLimits()
    limits.record([run("a", "right", 3.0)])
    with pytest.raises(ValueError, match="saved time limits of rewards cannot be read"):
        limits.load_state_dict(limits.state_dict() | damage)
    with pytest.raises(ValueError, match="cannot be read"):
        limits.load_state_dict({})
    assert limits.get_limits("a") == [4.5]
