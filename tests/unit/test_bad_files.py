"""Commands with bad files: exit code 2, one line that names the file, and no output that was made or changed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given

from profiler import page, report, sweep, validate
from sglang_pat.launch import refusals
from sglang_pat.predict.profile import save
from sglang_pat.replay import cli
from sglang_pat.tools import commands

from .drawn import examples
from .mutations import ODD, wrong_json
from .policy_world import crossing
from .profiles_for_tests import profile
from .test_profile_fuzz import GOOD, change

pytestmark = pytest.mark.unit

BENCH = Path(__file__).resolve().parents[2] / "bench"
BAD_PROFILES = {
    "empty": b"",
    "array": b"[]",
    "truncated": json.dumps(GOOD).encode()[:-40],
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
    "format 1": b'{"version": 1}',
    "a validation": b'{"table": [], "figures": [], "throughput": {}}',
    "a log": b'{"event": "start"}\n{"event": "start"}\n',
    "negative": change("decode", 0, "seconds", to=-0.1),
    "NaN": change("decode", 0, "seconds", to=math.nan),
    "too many ranks": change("fingerprint", "num_ranks", to=1 << 40),
    "a degree without points": change("decode", to=[p for p in GOOD["decode"] if p["tp"] != 2]),
}


@pytest.fixture
def bad(tmp_path, request):
    path = tmp_path / "bad.json"
    path.write_bytes(BAD_PROFILES[request.param])
    return path


def bench_replay(argv) -> int:
    spec = importlib.util.spec_from_file_location("bench_replay_under_test", BENCH / "replay.py")
    sys.path.insert(0, str(BENCH))
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return commands.run("bench/replay.py", module.main, argv)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def refused(tmp_path, capsys):
    """``refused(command, *words, named=FILE)``: as the module says."""
    (tmp_path / "out").mkdir()
    for name in ("index.html", "replay.png", "replay.json"):
        (tmp_path / "out" / name).write_text("before")

    def check(command, *words, named) -> str:
        before = content(tmp_path)
        assert command([str(word) for word in words]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and str(named) in printed.err
        assert content(tmp_path) == before
        return printed.err

    return check


def of(name: str, module):
    return lambda words: commands.run(name, module.main, words)


@pytest.mark.parametrize("bad", BAD_PROFILES, indirect=True)
def test_a_bad_profile(bad, refused, tmp_path):
    model, out = tmp_path / "none", tmp_path / "out"
    said = {
        refused(of("profiler.report", report), bad, "--out", out, named=bad),
        refused(of("profiler.validate", validate), bad, "--model-path", model, "--out", out, named=bad),
        refused(of("profiler.sweep", sweep), "--model-path", model, "--out", bad, named=bad),
        refused(cli.main, "--profile", bad, "--lengths", "sft", "--out", out, named=bad),
        refused(bench_replay, "--quick", "--profiles", bad, named=bad),
    }
    lines = {line.partition("error: ")[2] for line in said}
    assert len(lines) == 1, "the same line, whoever says it"
    with pytest.raises(ValueError) as caught:
        refusals.check_command_line(["--port", "0", "--pat-profile", str(bad)])
    assert f"{caught.value}\n" in lines


def test_a_folder_in_place_of_a_profile(refused, tmp_path):
    assert "Is a directory" in refused(cli.main, "--profile", tmp_path, "--lengths", "sft", named=tmp_path)


def test_an_interrupted_profile(refused, tmp_path):
    path = tmp_path / "half.json"
    save(profile(complete=False), path)
    assert "interrupted" in refused(cli.main, "--profile", path, "--lengths", "sft", named=path)
    assert "interrupted" in refused(bench_replay, "--quick", "--profiles", path, named=path)
    refused(of("profiler.sweep", sweep), "--model-path", tmp_path, "--out", path, named=path)


BAD_GRIDS = [{}, {"batch": [1]}, {"batch": [1], "context": [1]}, {"batch": [1], "context": [64], "height": [1]}]


@pytest.mark.parametrize("grid", BAD_GRIDS, ids=str)
def test_a_profile_whose_grid_cannot_be_gone_on_with(refused, tmp_path, grid):
    path = tmp_path / "p.json"
    save(profile(grid=grid), path)
    said = refused(of("profiler.sweep", sweep), "--model-path", tmp_path, "--out", path, named=path)
    assert "no grid to go on with" in said


# -- what a validation left ------------------------------------------------------------------------------------

VALIDATION = {"table": [{"layout": "tp1×dp4", "steps": "9"}, {"layout": "tp4×dp1", "steps": "8"}], "figures": []}


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "empty"),
        (b"[]", "expected object, got array"),
        (b"{}", "missing required field table"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"table": 3}', "table is 3: expected array"),
        (b'{"table": [{"layout": 3}]}', "expected str"),
        (b'{"table": [{"a": "1"}, {"b": "1"}]}', "table[1]: expected the columns a"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_bad_validation(refused, tmp_path, data, said):
    path, found = tmp_path / "p.json", tmp_path / "out" / "validation.json"
    save(crossing(), path)
    found.write_bytes(data)
    assert said in refused(of("profiler.report", report), path, "--out", tmp_path / "out", named=found)


def test_folders_in_place_of_what_a_validation_left(refused, tmp_path):
    path, out = tmp_path / "p.json", tmp_path / "out"
    save(crossing(), path)
    for name in ("throughput_x.png", "validation.json"):
        (out / name).mkdir()
        refused(of("profiler.report", report), path, "--out", out, named=out / name)
        (out / name).rmdir()


@examples(400)
@given(wrong_json(VALIDATION))
def test_validations(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    (folder / "validation.json").write_bytes(data)
    try:
        rows = report.validation_rows(folder)
    except ValueError as error:
        assert "\n" not in str(error) and str(folder / "validation.json") in str(error)
    else:
        page.table(list(rows[0]) if rows else [], [row.values() for row in rows])


def test_odd_names_are_drawn(tmp_path):
    """What matplotlib would take for mathematics, what HTML would take for its own."""
    made = crossing()
    mark = msgspec.structs.replace(made.fingerprint, model="$a_{<b>&", device="\\frac{$", link="50:1 $x$")
    save(msgspec.structs.replace(made, fingerprint=mark, complete=False), tmp_path / "p.json")
    assert report.main([str(tmp_path / "p.json"), "--out", str(tmp_path / "out")]) == 0
    assert "$a_{&lt;b&gt;&amp;" in (tmp_path / "out" / "index.html").read_text()


def test_a_report_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    save(crossing(), tmp_path / "p.json")
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("before")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_pat.files.os.replace", full_disk)
    words = [str(tmp_path / "p.json"), "--out", str(out)]
    assert commands.run("profiler.report", report.main, words) == 2
    assert (
        capsys.readouterr().err == f"profiler.report: error: --out {out}: No space left on device; give another place\n"
    )
    assert content(out) == {str(out / "index.html"): b"before"}


def test_every_odd_value_as_a_profile(refused, tmp_path):
    path = tmp_path / "odd.json"
    for value in ODD:
        path.write_text(json.dumps(value))
        refused(cli.main, "--profile", path, "--lengths", "sft", named=path)
