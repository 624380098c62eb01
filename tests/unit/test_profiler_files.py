"""The profile while it grows, the report, and bad input to the three commands."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from profiler import accuracy, report
from profiler.grid import Grid
from profiler.points import Point
from profiler.store import Store, check_asked, check_same, existing
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import DecodePoint, PrefillPoint
from sglang_pat.tools import commands
from sglang_pat.tools.commands import UsageError

from .profiles_for_tests import FINGERPRINT, decode_points, profile, switch_sample

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
GRID = Grid(batch=(1, 2), context=(64, 128), switch_context=(128,))
ASKED = {"grid": "batch=1,2;context=64,128", "temperature": 1.0}


def decode(batch, context):
    return DecodePoint(tp=1, replicas=4, batch=batch, context=context, seconds=0.01, samples=(0.01,))


def fresh(path):
    return Store.fresh(path, FINGERPRINT, GRID, ASKED)


def test_a_store_knows_what_it_has(tmp_path):
    store = fresh(tmp_path / "p.json")
    assert store.done() == set()
    store.add(decode(1, 61), 5.0)  # a few tokens off the grid's 64
    store.add(PrefillPoint(tp=1, replicas=4, batch=2, length=256, seconds=0.1, samples=(0.1,)), 7.0)
    store.add([switch_sample(1, 2, 8, 8 * 150, kv=1e-3), switch_sample(2, 1, 8, 8 * 160, kv=1e-3)], 9.0)
    store.add([switch_sample(2, 4, 0, 0, install=1e-3)], 10.0)
    expected = {
        ("decode", 1, 0, 4, 1, 64), ("prefill", 1, 0, 4, 2, 256), ("switch", 1, 2, 4, 8, 128),
        ("switch", 2, 4, 2, 0, 0),
    }  # fmt: skip
    assert store.done() == expected
    again = existing(tmp_path / "p.json")
    assert Store(tmp_path / "p.json", again).done() == expected
    assert again.machine["spent_seconds"] == 10.0 and not again.complete


def test_the_median_over_all_visits_counts(tmp_path):
    store = fresh(tmp_path / "p.json")
    first = decode(2, 66)
    store.add(first, 1.0)
    store.add(decode(1, 66), 2.0)
    wanted = Point(kind="decode", tp=1, replicas=4, batch=2, context=64, level=0)
    absent = Point(kind="decode", tp=1, replicas=4, batch=2, context=128, level=0)
    assert store.decode_points([wanted, absent]) == {wanted: first}
    for seconds in (0.02, 0.008, 0.009):
        visit = msgspec.structs.replace(first, seconds=seconds, samples=(seconds,))
        store.again(store.decode_points([wanted])[wanted], visit, 3.0)
    kept = profiles.load(tmp_path / "p.json").decode
    assert [(p.batch, p.seconds) for p in kept] == [(2, 0.0095), (1, 0.01)]
    assert kept[0].samples == (0.01, 0.02, 0.008, 0.009)


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    store = fresh(path)
    store.add(decode(1, 64), 1.0)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left")

    for broken in ("os.replace", "os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, full_disk)
            with pytest.raises(OSError, match="no space"):
                store.add(decode(2, 64), 2.0)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["p.json"], "a temporary file was left"


def test_goes_on_only_with_the_same(tmp_path):
    path = tmp_path / "p.json"
    fresh(path).add(decode(1, 64), 1.0)
    before, found = path.read_bytes(), existing(path)
    check_asked(path, found, ASKED)
    check_same(path, found, FINGERPRINT)
    # Sizes of the pools may differ: they bound what is measured and do not change it.
    check_same(path, found, msgspec.structs.replace(FINGERPRINT, kv_tokens=1, max_running=1))
    for field, value, said in (("dtype", "bfloat16", "dtype='float32'.*'bfloat16'"), ("degrees", (1, 4), "degrees")):
        with pytest.raises(UsageError, match=said):
            check_same(path, found, msgspec.structs.replace(FINGERPRINT, **{field: value}))
    for change, said in (
        ({"temperature": 0.0}, "temperature=1.0"),
        ({"grid": "batch=1"}, "grid='batch=1,2;context=64,128'"),
    ):
        with pytest.raises(UsageError, match=said):
            check_asked(path, found, ASKED | change)
    assert path.read_bytes() == before


def test_leave_one_out_is_exact_on_straight_lines():
    points = decode_points(lambda tp, n, b, c: (1e-3 + 1e-4 * b + 1e-7 * b * c) / tp, (1, 2, 4, 8), (64, 128, 256))
    checks = accuracy.leave_one_out(profile(decode=points))
    assert len(checks) == len(points)
    inside = [check for check in checks if check.inside]
    assert {check.context for check in inside} == {128} and max(check.error for check in inside) < 1e-9
    rows = accuracy.summary(profile(decode=points), checks)
    assert [row["layout"] for row in rows] == ["tp1×dp4", "tp2×dp2", "tp4×dp1"]
    assert all(row["interpolated"] < 1e-9 for row in rows)


def made_up(**parts):
    """Measured, with samples, lone replicas and switches."""
    decode = decode_points(lambda tp, n, b, c: 4e-3 / tp + 2e-4 * b * tp + 1e-8 * b * c, (1, 2, 8, 32), (64, 512, 4096))
    decode += decode_points(lambda tp, n, b, c: 3e-3 / tp, (1, 2), (64, 512), layouts=((1, 1), (2, 1)))
    decode = tuple(msgspec.structs.replace(p, samples=(p.seconds, 1.1 * p.seconds)) for p in decode)
    switches = tuple(
        switch_sample(a, b, n, n * 128, kv=1e-3, install=1e-2, prepare=0.1 * (n == 0))
        for a, b in ((1, 4), (4, 1), (1, 2))
        for n in (0, 4)
    )
    return profile(**{"decode": decode, "switches": switches, "grid": {"batch": [1, 2]}} | parts)


REPORT = {"latency_by_layout.png", "latency_over_tokens.png", "latency_over_batch.png", "best_layout.png"}


def test_a_report_makes_all_its_files(tmp_path):
    path, folder = tmp_path / "p.json", tmp_path / "a" / "report"
    profiles.save(made_up(), path)
    assert report.main([str(path), "--out", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == REPORT | {"switch.png", "accuracy.png", "index.html"}
    assert all(file.stat().st_size > 5000 for file in folder.iterdir())
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 6 and 'src="data:' in page
    assert "LlamaForCausalLM" in page and "tp1 → tp4" in page and "heads4/4" in page
    assert 'src="http' not in page and "<link" not in page and "<script" not in page


@pytest.mark.parametrize(
    "parts",
    [
        {"decode": decode_points(lambda *_: 1e-3, (1,), (64,))},
        {"decode": decode_points(lambda *_: 1e-3, (2, 4), (64, 128), layouts=((2, 2),)), "switches": ()},
        {"kind": "modelled", "sources": ("somewhere <b>",), "prefill": (), "complete": False},
    ],
    ids=["one point", "one layout", "modelled, interrupted"],
)
def test_a_report_of_little(tmp_path, parts):
    files = report.write(made_up(**parts), tmp_path)
    assert all(file.stat().st_size for file in files) and files[-1].name == "index.html"
    assert (tmp_path / "best_layout.png").exists() == ("decode" not in parts or len(parts["decode"]) > 3)
    page = files[-1].read_text()
    assert "somewhere &lt;b&gt;" in page or "sources" not in parts
    assert ("interrupted sweep" in page) == (parts.get("complete") is False)


def test_a_report_of_a_reference_profile(tmp_path):
    assert report.main([str(ROOT / "studies" / "profiles" / "8xH100-qwen3-14b.json"), "--out", str(tmp_path)]) == 0
    assert REPORT < {made.name for made in tmp_path.iterdir()}


@pytest.fixture
def refused(capsys):
    """``refused(module, *arguments, said=...)``: exit code 2 and one line that says it."""

    def check(module, *arguments, said):
        code = commands.run(module, importlib.import_module(module).main, list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert code == 2 and not out
        assert len(err.splitlines()) == 1 and said in err

    return check


def test_the_command_ends_with_its_code():
    command = [sys.executable, "-m", "profiler.sweep", "--out", "x.json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_bad_input_to_the_sweep(refused, tmp_path):
    good = ["profiler.sweep", "--model-path", tmp_path, "--out", tmp_path / "p.json"]
    (tmp_path / "config.json").write_text("{}")
    other = tmp_path / "other.json"
    other.write_text("[]")
    modelled = tmp_path / "modelled.json"
    profiles.save(profile(kind="modelled"), modelled)
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}
    cases = [
        (["profiler.sweep", "--out", "x.json"], "--model-path"),
        ([*good, "--budget", "soon"], "--budget 'soon'"),
        ([*good, "--grid", "batch=1;height=3"], "axes are batch"),
        ([*good, "--temperature", "-1"], "--temperature -1"),
        ([*good[:3], "--out", tmp_path / "no" / "p.json"], "does not exist"),
        ([*good[:3], "--out", tmp_path], "is a folder"),
        ([*good[:3], "--out", other], "expected object, got array"),
        ([*good[:3], "--out", modelled], "modelled profile"),
        ([*good, "--pat-policy", "survival"], "--pat-policy: the profiler decides"),
        (["profiler.sweep", "--model-path", tmp_path / "none", "--out", "x.json"], "no such folder"),
    ]
    for arguments, said in cases:
        refused(*arguments, said=said)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == kept


def test_bad_input_to_the_report(refused, tmp_path):
    path = tmp_path / "p.json"
    refused("profiler.report", path, "--out", tmp_path / "r", said="No such file")
    path.write_text('{"version": 2}')
    refused("profiler.report", path, "--out", tmp_path / "r", said="missing required field fingerprint")
    profiles.save(profile(decode=()), path)
    refused("profiler.report", path, "--out", tmp_path / "r", said="no decode times")
    profiles.save(profile(), path)
    refused("profiler.report", path, said="--out")
    refused("profiler.report", path, "--out", path / "r", said="is not a folder")
    refused("profiler.report", path, "--out", tmp_path / "r", "--dpi", "3", said="--dpi")
    assert not (tmp_path / "r").exists()


def test_bad_input_to_the_validation(refused, tmp_path):
    path = tmp_path / "p.json"
    model = ["--model-path", tmp_path]
    refused("profiler.validate", path, *model, said="No such file")
    profiles.save(profile(kind="modelled"), path)
    refused("profiler.validate", path, *model, said="modelled profile")
    profiles.save(profile(), path)
    refused("profiler.validate", path, *model, said="no config.json")
    refused("profiler.validate", path, said="--model-path")
    refused("profiler.validate", path, *model, "--requests", "1", said="--requests 1")
    refused("profiler.validate", path, *model, "--out", path / "r", said="is not a folder")
