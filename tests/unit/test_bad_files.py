"""Files gone wrong: each is refused in one line that names the file and what is wrong in it."""

from __future__ import annotations

import json

import pytest

from profiler import report, sweep, validate
from profiler.store import Store, load_existing
from sglang_pat import job_settings
from sglang_pat.launch import refusals
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import ProfileError, save
from sglang_pat.tools import commands
from studies import compare

from .policy_world import crossing
from .profiles_for_tests import profile

pytestmark = pytest.mark.unit

GOOD = json.loads(profiles.msgspec.json.encode(crossing()))


def change_profile(*path, to) -> bytes:
    """A good profile with another value at ``path``."""
    value = json.loads(json.dumps(GOOD))
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    return json.dumps(value).encode()


def without(tp: int) -> bytes:
    return change_profile("decode", to=[point for point in GOOD["decode"] if point["tp"] != tp])


PROFILES = [
    (b" \n", "empty"),
    (json.dumps(GOOD).encode()[:-40], "not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"version": 1}', "has format version 1, this package reads 2"),
    (change_profile("decode", 3, "seconds", to=-1.0), "decode[3].seconds is -1.0: expected float >= 1e-09"),
    (change_profile("decode", 1, to=GOOD["decode"][0]), "decode[1]: the same point as decode[0]"),
    (
        change_profile("fingerprint", "num_ranks", to=1 << 40),
        "fingerprint.num_ranks is 1099511627776: expected int <= 1024",
    ),
    (change_profile("fingerprint", "degrees", to=[1, 4, 2]), "given are 1, 4, 2"),
    (change_profile("switches", to=[]), "no switches"),
    (change_profile("machine", to={"points": "many"}), 'machine.points is "many": expected a number'),
    (without(tp=4), "no decode times of tp=4, with all 1 replicas at work"),
]
OTHERS = [(lambda path: job_settings.check({"profile": path}, 4, "settings"), b"{}", "settings: profile ")]


CASES = [(profiles.load, *case) for case in PROFILES] + OTHERS


@pytest.mark.parametrize("read, data, said", CASES, ids=[said for *_, said in CASES])
def test_refused_in_one_line(tmp_path, read, data, said):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read(str(path))
    message = str(caught.value)
    assert said in message and "\n" not in message and len(message) < 600 and str(path) in message


def test_whoever_reads_a_profile_says_the_same(tmp_path, capsys):
    """Exit code 2, one line, nothing written."""
    path, out, model = tmp_path / "bad.json", tmp_path / "out", str(tmp_path / "none")
    path.write_bytes(without(tp=2))
    words = {
        report: [str(path), "--out", str(out)],
        validate: [str(path), "--model-path", model, "--out", str(out)],
        sweep: ["--model-path", model, "--out", str(path)],
        compare: ["--profile", str(path), "--lengths", "sft"],
    }
    said = set()
    for module, argv in words.items():
        assert commands.run("command", module.main, argv) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        said.add(printed.err.partition("error: ")[2])
    with pytest.raises(ProfileError) as caught:
        refusals.check_command_line(["--port", "0", "--pat-profile", str(path)])
    assert said == {f"{caught.value}\n"}
    assert not out.exists() and path.read_bytes() == without(tp=2)


def test_an_interrupted_profile_predicts_nothing(tmp_path, capsys):
    path = tmp_path / "half.json"
    save(profile(complete=False), path)
    assert commands.run("compare", compare.main, ["--profile", str(path), "--lengths", "sft"]) == 2
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{}, {"switch_context": []}])
def test_a_sweep_goes_on_with_a_profile_whose_grid_lacks_an_axis(tmp_path, more):
    path = tmp_path / "p.json"
    save(profile(grid={"batch": [1], "context": [64]} | more), path)
    kept = Store(path, load_existing(path))
    assert {point.kind for point in kept.list_done()} >= {"decode", "switch"}


@pytest.mark.parametrize("grid", [{}, {"batch": [1], "context": [1]}, {"batch": [1], "context": [64], "height": [1]}])
def test_a_profile_whose_grid_cannot_be_gone_on_with(tmp_path, capsys, grid):
    path = tmp_path / "p.json"
    save(profile(grid=grid), path)
    assert commands.run("sweep", sweep.main, ["--model-path", str(tmp_path), "--out", str(path)]) == 2
    assert "no grid to go on with" in capsys.readouterr().err
