"""Schedules: what a file may say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator import decision_log
from sglang_pat.coordinator.schedule import check_degrees, parse, read
from sglang_pat.messages import ScheduleEntry
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Snapshot

from .schedule_world import BASE


def test_a_list_and_lines_are_the_same():
    entries = [{"tp": 2, "arrived": 4, "step": 10}, {"tp": 1, "left": 3}, {"tokens": 900, "hold": True}]
    wanted = [ScheduleEntry(**entry) for entry in entries]
    assert parse(json.dumps(entries)) == wanted
    assert parse("\n".join(json.dumps(entry) for entry in entries) + "\n\n") == wanted
    assert parse("[]") == parse("") == []


BAD = {
    "two points": ('[{"tp": 2, "step": 1, "left": 2}]', "step and left in one entry: give one of step, batch"),
    "two counts": ('[{"tp": 2, "step": 1, "came": 2}]', "came and step in one entry: give came alone or with left"),
    "negative": ('[{"tp": 2, "step": -1}]', "entry 1: step is -1, must be at least 0"),
    "tp 0": ('[{"step": 1}, {"tp": 0}]', "entry 2: tp is 0, must be at least 1"),
    "float": ('[{"tp": 2.5}]', "entry 1: Expected `int | null`, got `float`"),
    "unknown": ('[{"tp": 2, "at": 3}]', "unknown field `at`"),
    "not JSON": ("tp 2 at 40", "line 1 is not JSON"),
    "second line": ('{"tp": 2}\n{', "line 2 is not JSON"),
    "not a list": ("3", "entry 1: Expected `object`, got `int`"),
    "hold in the middle": ('[{"hold": true}, {"tp": 2}]', "hold: only the last entry may have it"),
    "deep": ("[" * 100_000, "is not JSON"),
    "not utf-8": (b"\xff\xfe", "line 1 is not JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_schedules_get_one_line(kind, tmp_path):
    text, says = BAD[kind]
    with pytest.raises(ValueError) as error:
        parse(text)
    assert says in str(error.value) and "\n" not in str(error.value)
    path = tmp_path / "schedule"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="--pat-schedule"):
        read(str(path))


def test_a_missing_file_and_an_impossible_degree_get_one_line():
    with pytest.raises(ValueError, match="--pat-schedule /nowhere: No such file"):
        read("/nowhere")
    layouts = AdaptiveConfig(base=BASE, policy="schedule").layouts
    with pytest.raises(ValueError, match=r"entry 2: tp=3 is not a candidate; choose one of \[1, 2, 4\]"):
        check_degrees(parse('[{"tp": 2}, {"tp": 3}]'), layouts)
    check_degrees(parse('[{"tp": 4}, {"step": 3}]'), layouts)
    with pytest.raises(ValueError, match="--pat-schedule x needs --pat-policy schedule, not manual"):
        AdaptiveConfig(base=BASE, policy="manual", schedule="x")


def test_a_decision_log_is_a_schedule():
    def decision(tp, to, outputs, requests=None, peak=9, arrived=9):
        load = Load(**dict.fromkeys(("prompt", "output", "limit", "family"), outputs), replica=0 * outputs)
        requests = len(outputs) if requests is None else requests
        snapshot = Snapshot(now=1.0, tp=tp, degrees=(1, 2), num_ranks=2, requests=requests, peak=peak, last_arrival=0.0)
        snapshot = replace(snapshot, load=load, arrived=arrived)
        return decision_log.dump_decision(snapshot, Decision(tp=to))

    none = np.array([], dtype=np.int64)
    events = [
        decision_log.dump_start("survival", switch_at=8, history=LengthHistory()),
        decision(1, 2, np.array([8])),  # of the warm-up
        decision_log.dump_length(8, 1, True),
        decision_log.dump_counting(),
        decision(1, 1, np.array([5, 6])),
        decision_log.dump_length(40, 1, True),
        decision(1, 2, np.array([50, 60])),
        decision(1, 2, np.array([51, 61])),  # taken again, as the first switch was aborted
        decision_log.dump_length(70, 1, True),
        decision(2, 1, none),
        decision(1, 2, none, requests=9, arrived=12),
        decision(2, 1, none, requests=1, arrived=12),
        decision(1, 2, np.array([0, 0]), requests=2, peak=0, arrived=12),  # ahead of a round
    ]
    text = "\n".join(json.dumps(event) for event in events)
    assert parse(text) == [
        ScheduleEntry(tp=2, tokens=40 + 110),
        ScheduleEntry(tp=1, came=9, left=0),
        ScheduleEntry(tp=2, came=12),
        ScheduleEntry(tp=1, came=12, left=1),
        ScheduleEntry(tp=2, came=13),
    ]
    del events[-3]["snapshot"]["arrived"]  # as older versions wrote it
    with pytest.raises(ValueError, match="how many requests had arrived, as in old logs"):
        parse("\n".join(json.dumps(event) for event in events))
