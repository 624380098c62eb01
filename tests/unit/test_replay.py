"""A decision log: written, read, decided again."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given

from sglang_pat import replay
from sglang_pat.coordinator.decision_log import EventLog, encode_event
from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.correction import StepFactor
from sglang_pat.predict.profile import save
from sglang_pat.tools import pictures
from studies.compare import Workload
from studies.shapes import parse_shape
from studies.simulate import Drain

from .drawn import examples
from .policy_world import crossing, machine, snapshot, snapshots

pytestmark = pytest.mark.unit


@examples(100)
@given(snapshots())
def test_snapshots_and_decisions_are_read_as_they_were(snap):
    factors = {1: StepFactor(), 2: StepFactor(1.5, 0.1, -0.1)}
    drafts = dict(chances=(0.7, 0.4), draft_seconds=0.1)
    snap = dataclasses.replace(snap, last_abort=float("-inf"), factors=factors, doubts={2: 0.1}, room={1: 9}, **drafts)
    decision = Decision(tp=2, estimates={1: 0.1 + 0.2, 2: 1e-9}, recompute_below=7)
    found, answer = replay.load_decision(json.loads(encode_event("decision", snapshot=snap, decision=decision)))
    assert answer == decision
    for load in ("load", "coming"):
        for name in ("prompt", "output", "limit", "family", "replica"):
            assert (getattr(getattr(found, load), name) == getattr(getattr(snap, load), name)).all()
    assert dataclasses.replace(found, load=None, coming=None) == dataclasses.replace(snap, load=None, coming=None)


@pytest.fixture
def profile_file(tmp_path) -> str:
    path = tmp_path / "profile.json"
    save(crossing(), path)
    return str(path)


def write_log(path: Path, profile_file: str, policy: str = "survival") -> int:
    """Write a log as a coordinator would over two rounds; returns how many decisions are in it."""
    text, decisions = make_log(policy)
    path.write_text(text.replace(PROFILE, profile_file))
    return decisions


PROFILE = "/the/profile"


@functools.cache
def make_log(policy_name: str) -> tuple[str, int]:
    found = crossing()
    predictor, costs = machine(found)
    policy = make_policy(policy_name, switch_at=4, predictor=predictor, costs=costs, max_running=16)
    file, decisions = tempfile.NamedTemporaryFile("r"), 0
    log = EventLog(file.name)
    log.write("start", policy=policy_name, switch_at=4, profile=PROFILE, max_running=16)

    def logged(snapshot, history):
        nonlocal decisions
        decision = policy(snapshot, history)
        log.write("decision", snapshot=snapshot, decision=decision)
        decisions += 1
        return decision

    class Logging(LengthHistory):
        def observe(self, length, family, finished=True, since=0):
            super().observe(length, family, finished, since)
            log.write("length", length=length, family=family, finished=finished)

    history = Logging()
    rounds = Workload(shape=parse_shape("lognormal:5,1,1000"), batch=24, rounds=2, correlation=0.5).make_batches()
    for number, drawn in enumerate(rounds):
        Drain(predictor, costs, found.fingerprint, drawn, 16).run_policy(logged, history, complete=number > 0)
    for step in (Figures(256, 2, 0, 0.04, {1: 3.0}), Figures(256, 4, 0, 0.06, {1: 3.0, 4: 4.0})):
        log.write("step", **dataclasses.asdict(step))
    with file:
        return file.read(), decisions


@pytest.mark.parametrize("policy", ["survival", "pat", "threshold"])
def test_a_log_is_decided_the_same(tmp_path, profile_file, capsys, policy):
    log = tmp_path / "decisions.jsonl"
    decisions = write_log(log, profile_file, policy)
    assert replay.main(["--log", str(log)]) == 0
    printed = capsys.readouterr().out
    assert f"{decisions} decisions" in printed
    assert "2 steps: 512 requests in 10.0 s (60% in tp1, 40% in tp4), 6 switches, 0.100 s paused by them" in printed
    log.write_text(log.read_text()[:-30])
    assert replay.main(["--log", str(log)]) == 0, "an engine that is killed cuts its last line short"


@pytest.mark.long
def test_the_last_step_is_drawn(tmp_path, profile_file, capsys, monkeypatch):
    log, path, titles = tmp_path / "decisions.jsonl", tmp_path / "step.png", []
    write_log(log, profile_file)
    monkeypatch.setattr(pictures, "set_figure_title", lambda figure, text: titles.append(text))
    assert replay.main(["--log", str(log), "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and f"picture: {path}" in capsys.readouterr().out
    assert re.fullmatch(r"24 requests in \d+\.\d s: begins in tp1×dp4, then \d+ changes, tp\d×dp\d at last", titles[0])
    # A step that ended is drawn until the next one has a request.
    with log.open("ab") as file:
        shown = [snapshot([5] * 3, tp=tp, requests=3) for tp in (1, 2, 2, 4)]
        for number, one in enumerate(shown):
            one = dataclasses.replace(one, now=1000.0 + number, chances=(0.7, 0.4))
            file.write(encode_event("decision", snapshot=one, decision=Decision(tp=one.tp)))
    replay.main(["--log", str(log), "--picture", str(path)])
    assert titles[1] == "3 requests in 3.0 s: begins in tp1×dp4, then tp2×dp2 with 3 left, then tp4×dp1 with 3 left"
    capsys.readouterr()
    for name, said in (("there/is/none.png", "No such file"), ("step.odd", "odd")):
        assert replay.main(["--log", str(log), "--picture", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    assert replay.main(["--log", str(log), "--schedule", "--picture", str(path)]) == 2
    assert "not allowed with" in capsys.readouterr().err
    log.write_text(START)
    assert replay.main(["--log", str(log), "--picture", str(path)]) == 2
    assert "no request" in capsys.readouterr().err


def test_an_engine_goes_on_with_the_log_of_one_that_was_killed(tmp_path, profile_file, capsys):
    log = tmp_path / "decisions.jsonl"
    decisions = write_log(log, profile_file)
    whole = log.read_text()
    for cut in (whole[:-30], whole[:30]):
        log.write_text(cut)
        EventLog(str(log)).write("start", policy="off", switch_at=8, profile=None, max_running=None)
        with log.open("a") as file:
            file.write(whole)
        assert replay.main(["--log", str(log)]) == 0
        assert f"{decisions + (decisions if cut != whole[:30] else 0)} decisions" in capsys.readouterr().out
    log.write_text(whole[:-30] + "\n" + whole.splitlines()[-1] + "\n")
    assert replay.main(["--log", str(log)]) == 2
    assert f"line {len(whole.splitlines())}: not JSON" in capsys.readouterr().err


def test_a_disk_that_takes_a_part_of_an_event_gets_the_rest(tmp_path):
    class Part(io.FileIO):
        def write(self, data) -> int:
            return super().write(data[:7])

    log = EventLog(str(tmp_path / "log"))
    log._file = Part(tmp_path / "log", "a")
    log.write("counting")
    assert (tmp_path / "log").read_bytes() == encode_event("counting")


def test_a_log_that_was_changed_is_noticed(tmp_path, profile_file, capsys):
    log = tmp_path / "decisions.jsonl"
    write_log(log, profile_file)
    events = list(map(json.loads, log.read_text().splitlines()))
    changed = next(event for event in events[len(events) // 2 :] if event["event"] == "decision")
    changed["decision"]["tp"] = 2 if changed["decision"]["tp"] != 2 else 1
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert replay.main(["--log", str(log)]) == 1
    assert f"line {events.index(changed) + 1}:" in capsys.readouterr().out


def test_a_log_whose_profile_is_gone(tmp_path, profile_file, capsys):
    log = tmp_path / "decisions.jsonl"
    write_log(log, str(tmp_path / "gone.json"))
    assert replay.main(["--log", str(log)]) == 2
    assert "gone.json" in capsys.readouterr().err
    assert replay.main(["--log", str(log), "--profile", profile_file]) == 0


START = encode_event("start", policy="threshold", switch_at=8, profile=None, max_running=None).decode()
BAD_LOGS = [
    ("", "empty"),
    ("x\n", "line 1: not JSON"),
    ("7\n", "line 1: expected object, got int"),
    ('{"event": "length"}\n', "line 1: no start event before it"),
    ('{"event": "start"}\n', "line 1"),
    (START + '{"event": "decision", "snapshot": 1, "decision": {}}\n', "line 2: snapshot is 1: expected object"),
]


@pytest.mark.parametrize(("text", "said"), BAD_LOGS, ids=[said for _, said in BAD_LOGS])
def test_bad_logs(tmp_path, capsys, text, said):
    log = tmp_path / "decisions.jsonl"
    log.write_text(text)
    assert replay.main(["--log", str(log)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"--log {log}" in printed and said in printed
