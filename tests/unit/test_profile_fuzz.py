"""Profiles gone wrong: refused in one line, or everything that takes a profile works with it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given

from profiler import accuracy, page, report
from profiler.figures import View
from profiler.maps import switch_groups
from profiler.store import Store, existing
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.decision_log import dump_decision
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import largest_batch, make_policy
from sglang_pat.predict.cost import fitted
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import LayoutSetup, Profile, ProfileError, load, save
from sglang_pat.replay.compare import Machine, Workload, compare
from sglang_pat.replay.log import load_decision
from sglang_pat.replay.shapes import parse_shape

from .drawn import examples
from .mutations import wrong_json
from .policy_world import crossing, snapshot
from .profiles_for_tests import decode_points, profile

pytestmark = [pytest.mark.unit, pytest.mark.slow]


def _good(**parts) -> Profile:
    """With something of everything that a sweep writes."""
    made = crossing(
        machine={"cores": 2, "temperature": 1.0, "spent_seconds": 60.5, "sessions": 1, "others_share": 0.1},
        sources=("somewhere",),
        grid={"batch": [1, 8], "context": [128, 1024], "switch_context": [128, 2048], "switch_requests": [2, 8]},
        setup=(LayoutSetup(tp=4, groups_seconds=1, build_seconds=2, graphs_seconds=0),),
        decode=decode_points(lambda tp, n, b, c: (8e-3 + 3e-4 * b * (tp - 1)) / tp + 1e-9 * b * c, (1, 8), (128, 1024)),
    )
    samples = tuple(msgspec.structs.replace(p, samples=(p.seconds, 1.1 * p.seconds)) for p in made.decode)
    return msgspec.structs.replace(made, decode=samples, **parts)


GOOD = json.loads(msgspec.json.encode(_good()))
BATCHES = np.array([0.0, 1.0, 3.0, 8.0, 65536.0])
TOKENS = np.array([0.0, 1.0, 500.0, 1e5, 1e12])


def change(*path, to) -> bytes:
    """``GOOD`` with another value at ``path``."""
    value = json.loads(json.dumps(GOOD))
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return json.dumps(value).encode()


def without(name: str, **fields) -> bytes:
    """``GOOD`` without those of a list that have these fields."""
    kept = [one for one in GOOD[name] if any(one[field] != value for field, value in fields.items())]
    return change(name, to=kept)


def refusal(data: bytes, tmp_path) -> str:
    """The line with which a file is refused; empty if it is not.  Then every consumer works."""
    path = tmp_path / "p.json"
    path.write_bytes(data)
    try:
        found = load(path)
    except ProfileError as error:
        said = str(error)
        assert said.startswith(f"profile {path}: ") and "\n" not in said and len(said) < 600
        return said.removeprefix(f"profile {path}: ")
    try:
        fitted(found)
    except ProfileError as error:
        assert not found.complete and "\n" not in str(error)
    else:
        predicts(found)
    is_reported(found)
    save(found, path)
    assert load(path) == found
    try:
        again = existing(path)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert again is not None
        Store(path, again).done()
    return ""


def predicts(found: Profile) -> None:
    predictor, costs = fitted(found)
    mark = found.fingerprint
    for tp in mark.degrees:
        dp = mark.num_ranks // tp
        for replicas in (None, 1, dp):
            seconds = predictor.step_seconds(tp, BATCHES[:, None], TOKENS, replicas)
            assert np.isfinite(seconds).all() and (seconds >= 0).all() and (seconds[1:, 1:] > 0).all()
        if predictor.has_prefill(tp):
            assert np.isfinite(predictor.prefill_uniform(tp, BATCHES[:, None], TOKENS)).all()
        config = AdaptiveConfig(base=ParallelLayout(mark.base_tp, mark.num_ranks // mark.base_tp),
                                degrees=mark.degrees, policy="survival", profile="p.json")  # fmt: skip
        assert largest_batch(config, tp, found) >= 1
    for low, high in itertools.permutations(mark.degrees, 2):
        for lengths in ((), (1,), (100, 100, 5000), (1 << 22,) * 40):
            assert 0 <= costs.estimate(low, high, np.array(lengths, dtype=float), 3).seconds < math.inf
    decides(found)
    runs = compare(
        Machine(found), Workload(shape=parse_shape("lognormal:3,1,64"), batch=6, rounds=2), ["pat", "survival"]
    )
    assert all(math.isfinite(run.seconds) for each in runs.values() for run in each)


def decides(found: Profile) -> None:
    predictor, costs = fitted(found)
    mark = found.fingerprint
    for tp in mark.degrees:
        shown = snapshot([5, 700, 700, 9000], limit=16384, degrees=mark.degrees, coming=0)
        replica = np.arange(4) % (mark.num_ranks // tp)
        shown = replace(shown, tp=tp, num_ranks=mark.num_ranks, load=replace(shown.load, replica=replica))
        coming = snapshot((), degrees=mark.degrees, coming=9)
        for one in (shown, replace(coming, tp=tp, num_ranks=mark.num_ranks)):
            for name in ("survival", "pat", "threshold"):
                decision = make_policy(name, predictor=predictor, costs=costs, max_running=mark.max_running)(
                    one, LengthHistory()
                )
                assert decision.tp in mark.degrees
                logged = json.loads(json.dumps(dump_decision(one, decision)))
                assert load_decision(logged)[1] == decision


def is_reported(found: Profile) -> None:
    """The figures' numbers; :func:`test_reports` draws them."""
    if not found.decode:
        return
    Predictor(found)
    view = View(found)
    for tp in view.degrees:
        assert np.isfinite(view.step(tp, np.arange(1, 9), 64)).all()
    rows = accuracy.summary(found, accuracy.leave_one_out(found))
    page.table(list(rows[0]) if rows else [], [row.values() for row in rows])
    switch_groups(found.switches)


REVIEW = [
    (b"", "empty"),
    (b" \n", "empty"),
    (b"[]", "expected object, got array"),
    (b"[0]", "expected object, got array"),
    (b"3", "expected object, got int"),
    (b"null", "expected object, got null"),
    (b'{"version": 2', "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b'{"version": 1}', "has format version 1, this package reads 2"),
    (b'{"table": []}', "version is null: expected 2"),
    (b'{"event": "start"}\n{"event": "length"}\n', "not JSON: trailing characters"),
    (change("version", to="2"), 'version is "2": expected 2'),
    (change("decode", 3, "seconds", to=-1.0), "decode[3].seconds is -1.0: expected float >= 1e-09"),
    (change("decode", 3, "seconds", to=0), "decode[3].seconds is 0: expected float >= 1e-09"),
    (change("decode", 3, "seconds", to=1e9), "decode[3].seconds is 1000000000.0: expected float <= 3600.0"),
    (change("decode", 3, "seconds", to=math.nan), "not JSON"),
    (change("decode", 3, "seconds", to=math.inf), "not JSON"),
    (change("decode", 3, "seconds", to="1"), 'decode[3].seconds is "1": expected float, got str'),
    (change("decode", 3, "samples", to=[-1.0]), "decode[3].samples[0] is -1.0"),
    (change("decode", 3, "batch", to=0), "decode[3].batch is 0: expected int >= 1"),
    (change("decode", 3, "context", to=0), "decode[3].context is 0: expected int >= 1"),
    (change("decode", 3, "tp", to=3), "decode[3].tp is 3: expected one of the degrees 1, 2, 4"),
    (change("decode", 3, "replicas", to=5), "decode[3].replicas is 5: expected at most 4"),
    (change("decode", 1, to=GOOD["decode"][0]), "decode[1]: the same point as decode[0]"),
    (change("prefill", 1, to=GOOD["prefill"][0]), "prefill[1]: the same point as prefill[0]"),
    (change("decode", to=[]), "no decode times of tp=1, with all 4 replicas at work"),
    (without("decode", tp=4), "no decode times of tp=4, with all 1 replicas at work"),
    (change("switches", to=[]), "no switches"),
    (change("switches", 0, "to_tp", to=8), "switches[0].to_tp is 8: expected one of the degrees"),
    (change("switches", 0, "to_tp", to=1), "switches[0].to_tp is 1: expected another degree than from_tp"),
    (change("switches", 0, "pause_seconds", to=-1), "switches[0].pause_seconds is -1"),
    (change("switches", 0, "phases", "kv", to=-1), "switches[0].phases[...]: expected float >= 0.0"),
    (change("switches", 0, "mode", to="fly"), 'switches[0].mode is "fly": invalid enum value'),
    (change("fingerprint", "num_ranks", to=1 << 40), "fingerprint.num_ranks is 1099511627776: expected int <= 1024"),
    (change("fingerprint", "num_ranks", to=6), "fingerprint.degrees: candidate tp=4 does not divide the 6 ranks"),
    (change("fingerprint", "base_tp", to=0), "fingerprint.base_tp is 0: expected int >= 1"),
    (change("fingerprint", "base_tp", to=3), "fingerprint.base_tp is 3: expected a divisor of the 4 ranks"),
    (change("fingerprint", "base_tp", to=2), "fingerprint.degrees: candidate tp=1 is below the base tp=2"),
    (change("fingerprint", "degrees", to=[1, 4, 2]), "given are 1, 4, 2"),
    (change("fingerprint", "degrees", to=[1, 2, 2, 4]), "given are 1, 2, 2, 4"),
    (change("fingerprint", "degrees", to=[2, 4]), "given are 2, 4"),
    (change("fingerprint", "degrees", to=[]), "given are none"),
    (change("fingerprint", "model", to="a\nb"), "fingerprint.model is"),
    (change("setup", 0, "tp", to=3), "setup[0].tp is 3: expected one of the degrees"),
    (change("machine", "spent_seconds", to="long"), 'machine.spent_seconds is "long": expected a number'),
    (change("grid", "batch", to=[2, 1]), "grid.batch: expected ascending numbers"),
    (b"[" + b" " * (17 << 20), "larger than 16 MiB"),
]  # fmt: skip


@pytest.mark.parametrize("data, said", REVIEW, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_the_review_found_and_more(tmp_path, data, said):
    assert said in refusal(data, tmp_path)


def test_other_files(tmp_path):
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), ("a\0b", "null byte")):
        with pytest.raises(ProfileError, match=said):
            load(path)


def test_the_good_one_works(tmp_path):
    assert refusal(json.dumps(GOOD).encode(), tmp_path) == ""


def test_an_interrupted_one_is_no_profile_to_decide_by(tmp_path):
    path = tmp_path / "p.json"
    save(profile(complete=False), path)
    assert not load(path).complete
    with pytest.raises(ProfileError, match="interrupted"):
        load(path, complete=True)


def test_switches_that_took_no_time(tmp_path):
    """Nothing is divided by it."""
    parts = {"pause_seconds": 0.0, "prepare_seconds": 0.0, "phases": {}, "tokens": 1 << 50}
    switches = [sample | parts for sample in GOOD["switches"]]
    switches[0]["tokens"] = 1
    assert refusal(change("switches", to=switches), tmp_path) == ""


@examples(800)
@given(wrong_json(GOOD))
@example(without("decode", tp=2))
def test_refused_in_one_line_or_everything_works(tmp_path_factory, data):
    refusal(data, tmp_path_factory.getbasetemp())


@examples(24)
@given(wrong_json(GOOD | {"complete": False}, most=2))
def test_reports(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "p.json"
    path.write_bytes(data)
    try:
        assert report.main([str(path), "--out", str(folder / "report")]) == 0
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
