"""The demonstration's work, records and verdict."""

import subprocess
import sys
import time

import psutil
import pytest

from sglang_pat.demo import cases, verdict
from sglang_pat.demo.records import (
    StepTime,
    name_of,
    switches_of,
)
from sglang_pat.tools.cpu_share import Meter
from sglang_pat.tools.prompts import PROMPTS
from tests.unit.demo_world import HIGH, LOW, WORK, result, run, switch

pytestmark = pytest.mark.unit


# -- the work -------------------------------------------------------------------------------------


def test_lengths_are_the_same_each_time_and_long_tailed():
    work = cases.LognormalBatch(128, 32, 1.0, 448)
    lengths = work.lengths()
    assert lengths == work.lengths() == sorted(lengths) and len(lengths) == 128
    assert max(lengths) <= 448 and min(lengths) >= 4
    assert 28 <= lengths[64] <= 36 and max(lengths) > 8 * lengths[64]


def test_a_share_runs_into_the_limit():
    lengths = cases.LognormalBatch(50, 16, 0.3, 200, capped=0.06).lengths()
    assert len(lengths) == 50 and lengths[-3:] == [200] * 3 and lengths[-4] < 60


def test_rounds_are_the_same_work_and_no_prompt_comes_twice():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
    rounds = [WORK.bodies(number) for number in range(3)]
    assert len({body["text"] for bodies in rounds for body in bodies}) == 12
    for bodies in rounds:
        params = [body["sampling_params"] for body in bodies]
        assert sorted(p["max_new_tokens"] for p in params) == WORK.lengths()
        assert all(p["temperature"] == 0 and p["ignore_eos"] for p in params)
        assert {p["custom_params"]["pat_limit"] for p in params} == {64}, "policies are not told the lengths"
    assert rounds[1] == WORK.bodies(1)


def test_a_round_that_does_not_count_tells_no_length():
    params = [body["sampling_params"] for body in WORK.bodies(0, tokens=4)]
    assert {(p["max_new_tokens"], p["custom_params"]["pat_limit"]) for p in params} == {(4, 4)}


def test_an_emulated_link_is_called_so():
    assert cases.CASES["real-link"].link_name == "real link"
    assert cases.CASES["slow-link"].link_name == "emulated link of 5 µs, 0.03 GB/s"


# -- records --------------------------------------------------------------------------------------


def test_gains_are_of_neighbours():
    one = result((10.0, 12.0, 8.0), (30.0, 36.0, 20.0), (10.0, 12.0, 20.0))
    assert one.best_static == f"static {LOW}" and one.worst_static == f"static {HIGH}"
    assert one.gains(one.adaptive) == [1.25, 1.5, 0.5] and one.gain == 1.25
    assert one.median(one.adaptive) == 20.0
    assert one.typical == one.rounds[0] and one.switched


def test_of_two_rounds_the_smaller_gain_is_drawn():
    one = result((10.0, 12.0, 8.0), (10.0, 12.0, 10.0))
    assert one.typical == one.rounds[1]


def test_differences_are_counted_by_response():
    one = result()
    one.rounds[0][1] = run(f"static {HIGH}", texts="abXY")
    assert (one.different(), one.responses()) == (2, 4)


def test_switches_of_a_status():
    record = {
        "started": 103.0, "phases": {"prepare": 0.5, "kv": 0.1}, "from_tp": 1, "to_tp": 2, "pause_seconds": 0.25,
        "requests": 3, "tokens": 70, "moved_bytes": 9, "error": "",
    }  # fmt: skip
    status = {"base": {"tp": 1, "dp": 2}, "switches": [record | {"started": 1.0}, record]}
    (found,) = switches_of(status, 100.0, 1)
    assert (found.before, found.after, found.at, found.pause, found.requests) == (LOW, HIGH, 3.5, 0.25, 3)
    assert switches_of(status, 100.0, 0) == []
    assert name_of({"tp": 2, "dp": 1}) == HIGH


def test_meter_tells_own_work_from_that_of_others():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(child.pid)
        mine, theirs = Meter([psutil.Process(), process]), Meter([psutil.Process()])
        before = process.cpu_times().user
        while process.cpu_times().user - before < 0.5:
            time.sleep(0.05)
        assert theirs.share() > mine.share()
    finally:
        child.kill()
        child.wait()


# -- the verdict ------------------------------------------------------------------------------------


def test_headline_says_where_it_is_ahead_and_where_not():
    ahead = result()
    behind = result((10.0, 12.0, 12.5), model="wide", link_name="emulated link 5:1")
    even = result((10.0, 12.0, 10.0))
    assert verdict.headline([ahead]) == "Adaptive is ahead of the better static layout: SmolLM2, real link (×1.25)"
    both = verdict.headline([ahead, behind])
    assert "ahead of the better static layout: SmolLM2, real link (×1.25); behind" in both
    assert "behind the better static layout: wide, emulated link 5:1 (×0.80)" in both
    assert verdict.headline([even]).startswith("Adaptive is level with")


def test_choice_of_the_static_layout():
    low, high = result((10.0, 12.0, 8.0)), result((15.0, 10.0, 8.0))
    assert verdict.choice([low, high]).startswith(
        "No static layout is best in all cases: the wrong one takes up to 50%"
    )
    assert (
        verdict.choice([low]) == f"static {LOW} is the better static layout here; the other one takes up to 20% longer."
    )


def test_reasons_name_measured_steps():
    flat = [StepTime(requests=n, seconds={LOW: 0.06, HIGH: 0.04}) for n in (1, 64)]
    high = result((12.0, 10.0, 10.0), steps=flat)
    assert f"{HIGH} is the faster layout for any number" in verdict.reason(high)
    assert "60 / 40 ms with 1, 60 / 40 ms with 64 requests" in verdict.reason(high)
    assert f"takes {HIGH} for the faster layout, but static {LOW} was" in verdict.reason(result(steps=flat))
    still = result()
    still.rounds[0][-1] = run("adaptive", switches=[])
    assert "expected no gain" in verdict.reason(still)
    crossing = verdict.reason(result((8.0, 9.0, 10.0)))
    assert f"the faster layout is {LOW} with 64 left and {HIGH} with 1" in crossing


@pytest.mark.parametrize(("adaptive", "said"), [(9.7, "ahead"), (10.0, "even"), (10.1, "even"), (11.0, "behind")])
def test_standing(adaptive, said):
    assert verdict.standing(result((10.0, 12.0, adaptive))) == said


def test_an_engine_that_stayed_in_the_better_layout_is_level_with_it():
    still = result((10.0, 12.0, 5.0))
    still.rounds[0][-1] = run("adaptive", 5.0, switches=[])
    assert verdict.standing(still) == "even"
    at_once = result((12.0, 10.0, 9.0))
    at_once.rounds[0][-1] = run("adaptive", 9.0, switches=[switch(at=0.1, pause=0.01, requests=0)])
    assert verdict.standing(at_once) == "even"
    astray = result((10.0, 12.0, 12.0))
    astray.rounds[0][-1] = run("adaptive", 12.0, switches=[switch(at=0.1, pause=0.01, requests=0)])
    assert verdict.standing(astray) == "behind"
    wrong = result((12.0, 10.0, 12.0))  # it should have switched
    wrong.rounds[0][-1] = run("adaptive", 12.0, switches=[])
    assert verdict.standing(wrong) == "behind"
