"""Replay: the command; a log decided again."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given

from sglang_pat.coordinator import decision_log
from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.correction import StepFactor
from sglang_pat.predict.profile import save
from sglang_pat.replay import cli
from sglang_pat.replay import log as logs
from sglang_pat.replay.compare import Workload
from sglang_pat.replay.measured import against_measured
from sglang_pat.replay.shapes import parse_shape
from sglang_pat.replay.simulate import Drain

from .drawn import examples
from .policy_world import crossing, machine, snapshots
from .policy_world import snapshot as make_snapshot

pytestmark = pytest.mark.unit


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "profile.json"
    save(crossing(), path)
    return str(path)


def test_command(tmp_path, profile_file, capsys):
    out = tmp_path / "out"
    words = f"--profile {profile_file} --lengths lognormal:5,1,1500 --batch 24 --rounds 2 --rho 0.5".split()
    assert cli.main([*words, "--policies", "pat,survival,threshold:4,static:1,static:4,oracle", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in ("pat", "survival", "first round", "threshold:4", "static:4", "oracle"):
        assert name in printed
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "replay.json").read_text())["policies"]
    assert figures["oracle"]["regret"] == 0 <= figures["survival"]["regret"]
    assert sorted(path.name for path in out.iterdir()) == ["replay.json", "replay.png"]


BAD_WORDS = [
    [],
    ["--lengths", "sft"],
    ["--lengths", "sft", "--profile", "/none"],
    ["--lengths", "nothing"],
    ["--lengths", "sft", "--batch", "0"],
    ["--lengths", "sft", "--rho", "1.5"],
    ["--lengths", "sft", "--rounds", "0"],
    ["--lengths", "sft", "--limit", "0"],
    ["--lengths", "sft", "--policies", "static:3"],
    ["--lengths", "sft", "--policies", "static:²"],
    ["--lengths", "sft", "--policies", "threshold:²"],
    ["--lengths", "sft", "--policies", "magic"],
    ["--lengths", "sft", "--policies", "threshold:x"],
    ["--lengths", "sft", "--policies", ","],
    ["--log", "/none"],
]


@pytest.mark.parametrize("words", BAD_WORDS, ids=" ".join)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, profile_file, capsys, words):
    out = tmp_path / "out"
    if words and "--profile" not in words and words != ["--lengths", "sft"] and "--log" not in words:
        words = ["--profile", profile_file, *words]
    assert cli.main([*words, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("error: ")
    assert not out.exists()


# -- a log ---------------------------------------------------------------------------------------------------


@examples(100)
@given(snapshots())
def test_snapshots_and_decisions_round_trip(snap):
    snap = dataclasses.replace(snap, last_abort=float("-inf"))
    decision = Decision(tp=2, estimates={1: 0.1 + 0.2, 2: 1e-9}, recompute_below=7)
    found, answer = logs.load_decision(json.loads(json.dumps(decision_log.dump_decision(snap, decision))))
    assert answer == decision
    for load in ("load", "coming"):
        for name in ("prompt", "output", "limit", "family", "replica"):
            assert (getattr(getattr(found, load), name) == getattr(getattr(snap, load), name)).all()
    assert dataclasses.replace(found, load=None, coming=None) == dataclasses.replace(snap, load=None, coming=None)


def test_a_snapshot_of_before_rounds_were_counted():
    values = decision_log.snapshot_to_dict(make_snapshot([5, 7], complete=True, in_round=True))
    found = logs.snapshot_from_dict(values)
    assert found.complete and found.in_round
    del values["complete"], values["coming"], values["in_round"]
    old = logs.snapshot_from_dict(values)
    assert not old.complete and not old.in_round and old.load.output.tolist() == [5, 7] and not len(old.coming)


def test_decisions_on_a_wrong_profile_against_those_on_measured_times(tmp_path, profile_file, capsys):
    """The log's factors say that tp=4 is slower than profiled; without them some decisions would be for it."""
    log = tmp_path / "decisions.jsonl"
    events = write_log(log, profile_file)
    assert cli.main(["--log", str(log), "--measured"]) == 2 and "no step factors" in capsys.readouterr().err
    for event in events:
        if event["event"] == "decision":
            event["snapshot"]["factors"] = {"1": [1.0, 0.0, 0.0], "2": [1.0, 0.0, 0.0], "4": [3.0, 0.0, 0.0]}
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = against_measured(log)
    assert found.factors == {1: StepFactor(), 2: StepFactor(), 4: StepFactor(3.0)}
    assert found.kept > 0 == found.corrected and found.kept_loss > 0.05
    assert cli.main(["--log", str(log), "--measured"]) == 0 and "tp4 3.000" in capsys.readouterr().out
    last = [event for event in events if event["event"] == "decision"][-1]
    for wrong in (3.0, [3.0, 0.0, 99.0]):  # a factor without its powers is from an older version
        last["snapshot"]["factors"]["4"] = wrong
        log.write_text("".join(json.dumps(event) + "\n" for event in events))
        said = cli.main(["--log", str(log)]), capsys.readouterr().err
        assert said[0] == 2 and "factors" in said[1] and "of this version" in said[1] and said[1].count("\n") == 1


def write_log(path, profile_file, policy_name="survival") -> list[dict]:
    """As a coordinator would over two rounds."""
    found = crossing()
    predictor, costs = machine(found)
    policy = make_policy(policy_name, switch_at=4, predictor=predictor, costs=costs, max_running=16)
    history = LengthHistory()
    events = [decision_log.dump_start(policy_name, switch_at=4, history=history, profile=profile_file, max_running=16)]

    def logged(snapshot, history):
        decision = policy(snapshot, history)
        events.append(decision_log.dump_decision(snapshot, decision))
        return decision

    class Logging(LengthHistory):
        def observe(self, length, family, finished=True, since=0):
            events.append(decision_log.dump_length(length, family, finished))
            super().observe(length, family, finished)

    history = Logging()
    rounds = Workload(shape=parse_shape("lognormal:5,1,1500"), batch=40, rounds=3, correlation=0.5).batches()
    for number, drawn in enumerate(rounds):
        Drain(predictor, costs, found.fingerprint, drawn, 16).follow(logged, history, complete=number > 0)
    for step in (Figures(256, 2, 0, 0.04, {1: 3.0}), Figures(256, 4, 0, 0.06, {1: 3.0, 4: 4.0})):
        events.append(json.loads(json.dumps(decision_log.dump_step(step))))
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return events


@pytest.mark.parametrize("policy", ["survival", "pat", "threshold"])
def test_a_log_is_decided_the_same(tmp_path, profile_file, capsys, policy):
    log = tmp_path / "decisions.jsonl"
    events = write_log(log, profile_file, policy)
    assert cli.main(["--log", str(log)]) == 0
    decisions = sum(event["event"] == "decision" for event in events)
    printed = capsys.readouterr().out
    assert f"{decisions} decisions" in printed
    assert "2 steps: 512 requests in 10.0 s (60% in tp1, 40% in tp4), 6 switches, 0.100 s paused by them" in printed


def test_a_log_that_was_changed_is_noticed(tmp_path, profile_file, capsys):
    log = tmp_path / "decisions.jsonl"
    events = write_log(log, profile_file)
    changed = next(event for event in events[len(events) // 2 :] if event["event"] == "decision")
    changed["decision"]["tp"] = 2 if changed["decision"]["tp"] != 2 else 1
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert cli.main(["--log", str(log)]) == 1
    assert f"line {events.index(changed) + 1}:" in capsys.readouterr().out


def test_a_log_whose_last_line_was_cut_short(tmp_path, profile_file):
    log = tmp_path / "decisions.jsonl"
    write_log(log, profile_file)
    log.write_text(log.read_text()[:-30])
    assert cli.main(["--log", str(log)]) == 0


@pytest.mark.parametrize("text", ["", "x\n", "[]\n", '{"event": "length"}\n', '{"event": "start"}\n', "\xff\n",
                                  '{"event": "decision", "snapshot": {}}\n'])  # fmt: skip
def test_bad_logs(tmp_path, capsys, text):
    log = tmp_path / "decisions.jsonl"
    log.write_text(text, encoding="latin-1")
    assert cli.main(["--log", str(log)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and str(log) in printed.err


def test_a_log_whose_profile_is_gone(tmp_path, profile_file, capsys):
    log = tmp_path / "decisions.jsonl"
    write_log(log, str(tmp_path / "gone.json"))
    assert cli.main(["--log", str(log)]) == 2
    assert "gone.json" in capsys.readouterr().err
    assert cli.main(["--log", str(log), "--profile", profile_file]) == 0
