"""What an engine did in a step: for the log of a job, and for its tracker."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from sglang_pat import figures
from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.figures import Figures
from sglang_pat.layout import ParallelLayout

from .coordinator_rig import Rig

pytestmark = pytest.mark.unit


def update(rig: Rig) -> None:
    """An update of the weights, which needs the base layout, answered by all leaders."""
    rig.control("update", needs_base=True)
    rig.settle()
    for rank in rig.world.layout.leaders:
        rig.world.answer(rank, "update")
    rig.settle()


def totals(rig: Rig) -> Figures:
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=0), 0.0)
    return Figures.from_status(rig.world.server[-1].answer)


def test_a_step_ends_with_the_update_of_the_weights():
    """The switch back to the base layout belongs to it; an update in many requests ends one step."""
    rig = Rig(1, 2)
    update(rig)
    assert rig.world.steps == [], "nothing has been generated yet"
    rig.reconfigure(2)
    rig.settle("abort")
    for step in (1, 2):
        rig.work(4)
        rig.settle()
        rig.reconfigure(2)
        rig.settle()
        rig.finish_all()
        for _ in range(3):
            update(rig)
        assert len(rig.world.steps) == step
        found = rig.world.steps[-1]
        assert (found.requests, found.switches, found.aborted_switches) == (4, 2, 2 - step)
    assert rig.world.steps[-1].pause_seconds == pytest.approx(2 * 0.21)
    assert totals(rig) == Figures(8, 4, 1, pytest.approx(5 * 0.21), {1: 0.0, 2: 0.0})


def test_seconds_are_of_the_layout_in_force_while_there_is_work():
    rig = Rig(1, 2)
    rig.coordinator.handle_timer(10.0)
    rig.work(2, now=11.0)
    rig.coordinator.handle_timer(14.0)
    assert totals(rig).seconds == {1: 3.0, 2: 0.0}
    paused = Rig(1, 2)
    paused.work(2)
    paused.control("pause", pauses=True)
    paused.coordinator.handle_timer(14.0)
    assert totals(paused).seconds == {1: 0.0, 2: 0.0}
    account = figures.Account([1, 2])
    for now, tp, works in ((0.0, 1, True), (2.0, 2, True), (7.0, 2, False), (100.0, 2, True), (101.0, 1, True)):
        account.record_state(now, tp, works)
    assert account.get_totals().seconds == {1: 2.0, 2: 6.0}


STEP = Figures(512, 2, 0, 0.0213, {1: 24.0, 2: 0.0, 8: 16.0})


def test_lines():
    assert STEP.format_line() == "512 requests in 40.0 s (60% in tp1, 40% in tp8), 2 switches, 0.021 s paused by them"
    assert "2 switches, 1 aborted, 0.021 s" in Figures(512, 2, 1, 0.0213, {1: 24.0}).format_line()
    assert STEP + STEP.subtract(STEP) == STEP
    drafted = Figures(512, 2, 0, 0.0213, {1: 24.0}, decode_steps=900, draft_steps=90, drafts=400, right_drafts=150)
    assert drafted.format_line().endswith(" s paused by them, 10% of steps with drafts, 150 of 400 right")
    assert replace(drafted, seconds_saved=1.25).format_line().endswith("right, which saved 1.2 s by the profile")
    assert (drafted + drafted).subtract(drafted) == drafted
    assert Figures(1).format_line().startswith("1 requests in 0.0 s"), "answered before anybody looked"


@pytest.mark.parametrize(
    ("ranks", "options", "line"),
    [
        (4, {}, "4 ranks: begins in tp1×dp4, may switch to tp4×dp1; policy threshold, merges when 8 requests"),
        (3, {"degrees": (1,)}, "3 ranks: begins in tp1×dp3, its only layout: nothing will switch; policy threshold"),
    ],
)
def test_the_line_at_the_start(ranks, options, line):
    assert line in figures.start_line(AdaptiveConfig(base=ParallelLayout(1, ranks), **options))


def test_figures_of_several_engines():
    other = Figures(512, 1, 1, 0.0, {1: 30.0})
    assert figures.compute_metrics([STEP, other]) == {
        "rollout/switches": 3.0, "rollout/aborted_switches": 1.0, "rollout/pause_seconds": pytest.approx(0.01065),
        "rollout/seconds/tp1": 27.0, "rollout/seconds/tp2": 0.0, "rollout/seconds/tp8": 8.0,
    }  # fmt: skip
    drafted = [
        STEP,
        Figures(decode_steps=900, draft_steps=90, drafts=400, right_drafts=150, seconds_saved=3.0),
        Figures(decode_steps=100, draft_steps=10, drafts=8, right_drafts=2),
    ]
    found = figures.compute_metrics(drafted)
    assert (found["rollout/drafts"], found["rollout/right_drafts"]) == (408.0, 152.0)
    assert (found["rollout/share_of_steps_with_drafts"], found["rollout/seconds_saved_by_drafts"]) == (0.1, 1.0)
    status = {
        "totals": {"requests": 1, "switches": 0, "aborted_switches": 0, "pause_seconds": 0.0, "seconds": {"2": 1.5}}
    }
    assert Figures.from_status(status).seconds == {2: 1.5}, "as JSON has it"


def test_a_job_sees_them_where_sglang_is_silent(monkeypatch):
    """verl and OpenRLHF give SGLang the log level ``error``."""
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    monkeypatch.setattr(figures.job_log, "level", logging.NOTSET)
    figures.job_log.manager._clear_cache()
    assert not figures.job_log.isEnabledFor(logging.WARNING)
    figures.enable_job_log()
    assert figures.job_log.isEnabledFor(logging.INFO)
