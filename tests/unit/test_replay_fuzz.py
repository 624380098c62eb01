"""Decision logs, lengths and arguments gone wrong: one line and exit code 2, or a replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.predict.profile import save
from sglang_pat.replay import cli
from sglang_pat.replay.compare import Workload
from sglang_pat.replay.log import replay_log
from sglang_pat.replay.shapes import LONGEST, parse_shape

from .drawn import examples
from .mutations import ODD, wrong_json, wrong_lines
from .policy_world import crossing
from .test_replay_command import write_log

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("replay")
    save(crossing(), found / "profile.json")
    return found


@pytest.fixture(scope="module")
def logs(folder) -> dict[str, list[dict]]:
    """Of a policy: the start, and some decisions with what ended between them."""
    made = {}
    for name in ("survival", "pat", "threshold"):
        events = write_log(folder / "good.jsonl", str(folder / "profile.json"), name)
        some = [event for event in events if event["event"] == "decision"][::9][:4]
        lengths = [event for event in events if event["event"] == "length"][:20]
        made[name] = [events[0], *lengths[:10], *some[:2], *lengths[10:], *some[2:]]
        made[name][0]["history"]["responses"] = [[700, 3, True], [9, 3, False]]
    return made


@examples(800)
@given(st.data())
def test_logs(folder, logs, data):
    path = folder / "log.jsonl"
    path.write_bytes(data.draw(wrong_lines(logs[data.draw(st.sampled_from(sorted(logs)))])))
    try:
        for result in replay_log(path):
            assert 0 <= result.switches <= result.decisions
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        assert str(path) in str(error) or "profile" in str(error)


COLUMNS = ("prompt", "output", "limit", "family", "replica")


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_of_unequal_length(folder, logs, capsys, column):
    path = folder / "uneven.jsonl"
    events = json.loads(json.dumps(logs["survival"]))
    events[11]["snapshot"]["load"][column].append(0)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert cli.main(["--log", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path}, line 12: snapshot.load." in err and "as many numbers" in err


@pytest.mark.parametrize(
    "line, said",
    [
        ("[" * 100_000, "not JSON: nested too deeply"),
        ('{"event": "length", "length": -1, "family": 0, "finished": true}', "length is -1: expected int >= 0"),
        ('{"event": "length", "length": 1e99, "family": 0, "finished": true}', "length is 1e99: expected int"),
        ('{"event": "length", "length": 1, "family": 0}', "object missing required field finished"),
        ('{"event": "decision", "snapshot": 1, "decision": {}}', "snapshot is 1: expected object"),
        ("7", "expected object, got int"),
    ],
    ids=lambda text: text[:40],
)
def test_a_bad_line_of_a_log(folder, logs, capsys, line, said):
    path = folder / "bad.jsonl"
    last = json.dumps(logs["survival"][1])
    path.write_text(f"{json.dumps(logs['survival'][0])}\n{line}\n{last}\n")
    assert cli.main(["--log", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path}, line 2: {said}" in err


def test_a_log_of_another_engine(folder, logs, capsys):
    path = folder / "other.jsonl"
    for change, said in (
        ({"num_ranks": 8}, "expected 4"),
        ({"degrees": [1]}, ""),
        ({"degrees": [1, 2, 4, 8]}, "ranks"),
    ):
        events = json.loads(json.dumps(logs["survival"]))
        for event in events:
            if event["event"] == "decision":
                event["snapshot"] |= change
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert cli.main(["--log", str(path)]) in (1, 2)
        assert said in capsys.readouterr().err


# -- lengths and arguments -------------------------------------------------------------------------------------


@examples(400)
@given(st.one_of(wrong_json([5, 700, {"length": 30}, 9000]), wrong_lines([5, 700, {"length": 30}, 9000])))
def test_files_of_lengths(folder, data):
    path = folder / "lengths"
    path.write_bytes(data)
    try:
        shape = parse_shape(str(path))
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
    else:
        assert 1 <= shape.limit <= LONGEST


NUMBERS = [
    "0",
    "1",
    "3",
    "-1",
    "65536",
    "65537",
    "10000000",
    "1e12",
    str(1 << 39),
    str(1 << 40),
    "9" * 5000,
    "x",
    "",
    "nan",
]
SHAPES = [
    "sft", "partial-rollout", "lognormal:5,1,1500", "lognormal:5,1,549755813888", "lognormal:5,-1,15", "lognormal:5,1",
    "lognormal:nan,1,5", "body-atom:5,1,1500,0.5", "body-atom:5,1,1500,1", "lognormal:1e308,1e308,99", "none", "",
]  # fmt: skip
FLAGS = {
    "--lengths": SHAPES,
    "--limit": [*NUMBERS, "200"],
    "--batch": NUMBERS,
    "--prompt": NUMBERS,
    "--group": NUMBERS,
    "--rounds": [number for number in NUMBERS if number != "65536"],
    "--seed": NUMBERS,
    "--rho": ["0", "1", "0.5", "-1", "1.5", "nan", "inf", "x"],
    "--policies": [
        "pat",
        "oracle",
        "static:4",
        "static:3",
        "threshold:0",
        "threshold:²",
        f"threshold:{'9' * 5000}",
        ",",
    ],
}


@examples(200)
@given(st.dictionaries(st.sampled_from(sorted(FLAGS)), st.integers(0, 30), max_size=3))
def test_arguments(folder, given_flags):
    """What would be simulated is small enough; the simulation itself is tested elsewhere."""
    simulated: list[Workload] = []
    out, err = StringIO(), StringIO()
    words = ["--profile", str(folder / "profile.json"), "--lengths", "sft"]
    for flag, place in given_flags.items():
        words += [f"{flag}={FLAGS[flag][place % len(FLAGS[flag])]}"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(cli, "compare", lambda machine, workload, policies: simulated.append(workload) or {})
        patch.setattr(cli, "crowded", lambda mark, batch: None)
        patch.setattr(cli, "table", lambda runs, title: title)
        code = cli.main(words)
    said = err.getvalue()
    if code == 0:
        (workload,) = simulated
        assert workload.batch <= 1 << 16 and workload.shape.limit <= LONGEST
    else:
        assert code == 2 and not out.getvalue() and said.count("\n") == 1 and len(said) < 600


@pytest.mark.parametrize(
    "words, said",
    [
        (["--batch", "1e12"], "argument --batch: invalid int value: '1e12'"),
        (["--batch", "10000000"], "--batch 10000000: must be from 1 to 65536"),
        (["--limit", str(1 << 39)], f"--limit {1 << 39}: must be from 1 to {LONGEST}"),
        (["--lengths", "lognormal:5,1,549755813888"], f"cap from 1 to {LONGEST}"),
        (
            ["--lengths", "partial-rollout", "--batch", "65536", "--rounds", "100000"],
            "GiB of memory, 2 GiB are allowed",
        ),
        (["--height", "3"], "unrecognized arguments: --height 3"),
    ],
)
def test_what_is_too_much(folder, capsys, words, said):
    assert cli.main(["--profile", str(folder / "profile.json"), "--lengths", "sft", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err


def test_long_work_says_how_far_it_is(folder, monkeypatch):
    lines: list[Callable[[], str]] = []

    @contextmanager
    def showing(self, line):
        lines.append(line)
        yield

    monkeypatch.setattr(cli.Speaker, "showing", showing)
    monkeypatch.setattr(cli, "crowded", lambda mark, batch: said.append(lines[0]()))
    monkeypatch.setattr(
        cli, "compare", lambda machine, workload, _: said.extend(lines[0]() for _ in workload.batches()) or {}
    )
    monkeypatch.setattr(cli, "table", lambda runs, title: title)
    said: list[str] = []
    words = ["--profile", str(folder / "profile.json"), "--lengths", "lognormal:5,1,1500", "--rounds", "2"]
    assert cli.main(words) == 0
    assert said == [f"{doing} round {number} of 2" for doing in ("checking", "simulating") for number in (1, 2)]


def test_a_long_log_says_how_far_it_is(folder, logs, monkeypatch):
    path, said = folder / "long.jsonl", []
    path.write_text("".join(json.dumps(event) + "\n" for event in logs["pat"]))

    @contextmanager
    def showing(self, line):
        yield
        said.append(line())

    monkeypatch.setattr(cli.Speaker, "showing", showing)
    cli.main(["--log", str(path)])
    assert said == ["4 decisions taken again"]


def test_every_odd_value_as_a_line_of_a_log(folder, capsys):
    path = folder / "odd.jsonl"
    for value in ODD:
        path.write_text(json.dumps(value) + "\n")
        assert cli.main(["--log", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
