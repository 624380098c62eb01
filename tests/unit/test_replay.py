"""The simulator by hand and step by step; shapes of lengths; the command; a log decided again."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from sglang_pat.coordinator import decision_log
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision
from sglang_pat.predict.profile import save
from sglang_pat.replay import cli
from sglang_pat.replay.compare import KNOWN, Machine, Work, compare
from sglang_pat.replay.shapes import NAMED, Shape, parse_shape
from sglang_pat.replay.simulate import Batch, Drain, crowded

from .drawn import examples
from .policy_world import crossing, machine, snapshots
from .policy_world import snapshot as make_snapshot
from .profiles_for_tests import profile as linear_profile

pytestmark = pytest.mark.unit


def batch(lengths, prompt=100) -> Batch:
    lengths = np.asarray(lengths, dtype=np.int64)
    return Batch(prompt=np.full(len(lengths), prompt), length=lengths, family=np.arange(len(lengths)), limit=8192)


def step_by_step(predictor, work: Batch, tp: int, start: int, end: int) -> float:
    """Seconds of tokens ``start`` to ``end`` in one layout, one step and one replica at a time."""
    replicas = 4 // tp
    seconds = np.zeros(replicas)
    for token in range(start, end):
        running = [np.flatnonzero((work.length > token) & (np.arange(len(work.length)) % replicas == r))
                   for r in range(replicas)]  # fmt: skip
        active = sum(len(on) > 0 for on in running)
        for r, on in enumerate(running):
            if len(on):
                tokens = float((work.prompt[on] + token).sum())
                seconds[r] += predictor.step_seconds(tp, len(on), tokens, active)
    return float(seconds.max())


@examples(30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sampled_from([1, 2, 4]))
def test_static_layouts_step_by_step(lengths, tp):
    """Exact where step times are linear in tokens."""
    found = linear_profile()
    predictor, costs = machine(found)
    case = Drain(predictor, costs, found.fingerprint, batch(lengths), 16)
    assert case.static(tp).seconds == pytest.approx(step_by_step(predictor, case.batch, tp, 0, max(lengths)), rel=1e-9)


def test_a_schedule_step_by_step():
    found = linear_profile()
    predictor, costs = machine(found)
    work = batch([20, 100, 100, 300, 400])
    case = Drain(predictor, costs, found.fingerprint, work, 1)
    at = int(np.flatnonzero(case.points == 100)[0])
    run = case.scheduled([(at, 4)])
    expected = step_by_step(predictor, work, 1, 0, 100) + step_by_step(predictor, work, 4, 100, 400)
    assert run.seconds == pytest.approx(expected + costs.estimate(1, 4, [200, 200]).seconds, rel=1e-9)
    assert [switch[:3] for switch in run.switches] == [(100, 1, 4)]


def test_what_a_policy_sees():
    """At each question: those that still run, their present lengths and replicas; finished ones are in the history."""
    found = linear_profile()
    case = Drain(*machine(found), found.fingerprint, batch([5, 40, 40, 90, 300, 300]), 16)
    seen, history = [], LengthHistory()

    def policy(snapshot, history):
        seen.append((snapshot, len(history)))
        return Decision(tp=2 if snapshot.load.output[0] >= 40 else 1)

    case.follow(policy, history, complete=True)
    for snapshot, finished in seen:
        assert snapshot.requests == len(snapshot.load) == 6 - finished
        assert snapshot.peak == 6 and snapshot.last_arrival == 0.0 and snapshot.complete
    tps = [snapshot.tp for snapshot, _ in seen]
    assert tps == sorted(tps) and set(tps) == {1, 2}
    after = next(s for s, _ in seen if s.tp == 2)
    assert after.load.replica.tolist() == [1, 0, 1] and after.last_switch > 0
    times = [snapshot.now for snapshot, _ in seen]
    assert times == sorted(times) and len(history) == 6


def test_crowded_batches_are_told():
    found = linear_profile().fingerprint
    assert crowded(found, batch([100] * 8)) is None
    assert "KV tokens" in crowded(found, batch([200_000] * 8))
    assert "a replica" in crowded(found, batch([10] * 80))


def test_rounds_are_the_same_for_every_policy_and_run():
    work = Work(shape=parse_shape("lognormal:5,1,2000"), batch=24, rounds=3, correlation=0.5)
    first, again = list(work.batches()), list(work.batches())
    assert all((a.length == b.length).all() for a, b in zip(first, again, strict=True))
    assert len(np.unique([b.family for b in first])) == 9
    runs = compare(Machine(crossing()), work, ["survival", "static:4", "threshold:4"])
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys(
        ["survival", "static:4", "threshold:4", "oracle"], 3
    )


def test_policies_learn_how_many_requests_come():
    """As an engine's, which waits in the first two rounds only; but one that is told does not even there."""
    asked: dict[str, list[list[bool]]] = {}

    class Watched(Machine):
        def policy(self, name):
            rounds = asked.setdefault(name, [])

            def decide(snapshot, history):
                if snapshot.now == 0.0:
                    rounds.append(set())
                rounds[-1].add(snapshot.complete)
                return Decision(tp=1)

            return decide

    work = Work(shape=parse_shape("lognormal:5,1,2000"), batch=24, rounds=4)
    compare(Watched(crossing()), work, ["pat", "survival" + KNOWN, "static:4"])
    assert asked == {"pat": [{False}, {False}, {True}, {True}], "survival": [{True}] * 4}


def test_a_complete_batch_is_not_waited_for():
    """Two requests, best at tp 4: at once, or after the time of which a switch in vain would cost more."""
    found = crossing()
    predictor, costs = machine(found)
    case = Drain(predictor, costs, found.fingerprint, batch([3000, 3000]), 16)
    for name in ("survival", "pat"):
        policy = make_policy(name, predictor=predictor, costs=costs)
        waits, knows = (case.follow(policy, LengthHistory(), complete) for complete in (False, True))
        assert knows.switches[0][0] == 0 < waits.switches[0][0] and knows.seconds < waits.seconds, name


# -- shapes ---------------------------------------------------------------------------------------


def test_reported_shapes():
    shares = (np.arange(100_000) + 0.5) / 100_000
    deep = parse_shape("deepscaler").quantile(shares)
    assert (deep > 8192).mean() == pytest.approx(0.1085, abs=0.002)
    assert (deep > 16384).mean() == pytest.approx(0.0218, abs=0.001)
    roll = parse_shape("rollpacker").quantile(shares)
    assert 755 <= np.quantile(roll, 0.75) <= 1100 and 512 <= np.median(roll) <= 655
    assert (roll == 16384).mean() == pytest.approx(0.01, abs=1e-3) and (np.diff(roll) >= 0).all()
    sft = parse_shape("sft").quantile(shares)
    assert np.median(sft) == pytest.approx(680, rel=0.01) and sft.mean() == pytest.approx(2806, rel=0.15)
    assert (parse_shape("partial-rollout").quantile(shares) < 80_000).mean() == pytest.approx(0.97, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 1.0])
def test_correlation_within_groups(correlation):
    lengths = parse_shape("deepscaler").draw(8 * 3000, correlation, 8, np.random.default_rng(0)).reshape(-1, 8)
    found = spearmanr(lengths[:, 0], lengths[:, 1]).statistic
    assert found == pytest.approx(6 / np.pi * np.arcsin(correlation / 2), abs=0.04)


@pytest.mark.parametrize("text", ["5\n7\n\n9\n", "[5, 7, 9]", '{"length": 5}\n{"length": 7}\n{"length": 9}\n',
                                  '[{"length": 9}, {"length": 5}, 7]'])  # fmt: skip
def test_files_of_lengths(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    shape = parse_shape(str(path))
    assert shape.samples.tolist() == [5, 7, 9] and shape.limit == 9
    assert set(shape.draw(100, 0.0, 8, np.random.default_rng(0)).tolist()) == {5, 7, 9}
    assert parse_shape(str(path), limit=6).draw(100, 0.0, 8, np.random.default_rng(0)).max() == 6


BAD_SHAPES = ["lognormal:1,2", "lognormal:a,b,c", "lognormal:1,-1,5", "lognormal:1,1,0", "body-atom:1,1,9,1", "/none"]


@pytest.mark.parametrize("text", BAD_SHAPES)
def test_bad_shapes(text):
    with pytest.raises(ValueError, match="--lengths") as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)


BAD_FILES = ["", "[]", "5\nx\n", "-1\n", "[1.5]", "[true]", '{"len": 5}\n', "[1,", "[null]", "\xff"]


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="--lengths") as caught:
        parse_shape(str(path))
    assert "\n" not in str(caught.value)


def test_every_named_shape_parses():
    assert all(isinstance(parse_shape(name), Shape) for name in NAMED)


# -- the command ----------------------------------------------------------------------------------


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


# -- a log ----------------------------------------------------------------------------------------


@examples(100)
@given(snapshots())
def test_snapshots_and_decisions_round_trip(snap):
    snap = dataclasses.replace(snap, last_abort=float("-inf"))
    decision = Decision(tp=2, estimates={1: 0.1 + 0.2, 2: 1e-9}, recompute_below=7)
    found, answer = decision_log.load_decision(json.loads(json.dumps(decision_log.dump_decision(snap, decision))))
    assert answer == decision
    for load in ("load", "coming"):
        for name in ("prompt", "output", "limit", "family", "replica"):
            assert (getattr(getattr(found, load), name) == getattr(getattr(snap, load), name)).all()
    assert dataclasses.replace(found, load=None, coming=None) == dataclasses.replace(snap, load=None, coming=None)


def test_a_snapshot_of_before_rounds_were_counted():
    values = decision_log.snapshot_to_dict(make_snapshot([5, 7], complete=True))
    assert decision_log.snapshot_from_dict(values).complete
    del values["complete"], values["coming"]
    old = decision_log.snapshot_from_dict(values)
    assert not old.complete and old.load.output.tolist() == [5, 7] and not len(old.coming)


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
        def observe(self, length, family, finished=True):
            events.append(decision_log.dump_length(length, family, finished))
            super().observe(length, family, finished)

    history = Logging()
    rounds = Work(shape=parse_shape("lognormal:5,1,1500"), batch=40, rounds=3, correlation=0.5).batches()
    for number, work in enumerate(rounds):
        Drain(predictor, costs, found.fingerprint, work, 16).follow(logged, history, complete=number > 0)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return events


@pytest.mark.parametrize("policy", ["survival", "pat", "threshold"])
def test_a_log_is_decided_the_same(tmp_path, profile_file, capsys, policy):
    log = tmp_path / "decisions.jsonl"
    events = write_log(log, profile_file, policy)
    assert cli.main(["--log", str(log)]) == 0
    decisions = sum(event["event"] == "decision" for event in events)
    assert f"{decisions} decisions" in capsys.readouterr().out


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
