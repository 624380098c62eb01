"""Pictures: titles say what the data say, whichever way they turn out; one place for colours; files are written."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from sglang_pat.acceptance import picture as acceptance
from sglang_pat.integrations import picture as training
from sglang_pat.replay import picture as replay
from sglang_pat.replay.simulate import Run
from sglang_pat.tools import pictures

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
STYLE = ROOT / "python" / "sglang_pat" / "tools" / "pictures.py"


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of ``bench/``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_colours_and_backend_stand_in_one_place():
    files = [path for folder in ("python", "profiler", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    own = re.compile(r"#[0-9a-fA-F]{6}\b|matplotlib\.use\(")
    found = {str(path.relative_to(ROOT)) for path in files if own.search(path.read_text())}
    assert {name for name in found if "/demo/" not in name} == {str(STYLE.relative_to(ROOT))}


def test_span():
    assert pictures.span([1.178, 0.987]) == "0.99 to 1.18" and pictures.span([1.001, 1.002]) == "1.00"


def test_a_picture_is_written_whole(tmp_path):
    figure, _ = pictures.panels(1)
    assert is_png(pictures.save(figure, tmp_path / "a.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


# -- bench/rollout.py -----------------------------------------------------------------------------


def rollout_result(ours: float) -> dict:
    """As in the file of results; the better static layout takes 2 s."""
    seconds = {"static tp1×dp2": [3.0, 3.2], "static tp2×dp1": [2.0, 2.0], "survival": [ours, ours]}
    runs = {name: {"seconds": each, "median": each[0]} for name, each in seconds.items()}
    best = {"best_static": "static tp2×dp1", "work": {"batch": 8}}
    return {"model": "m", "link": "5:0.03", "runs": runs} | best


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1.6], "is 1.25 times as fast as the better static layout: ahead"),
        ([2.5], "is 0.80 times as fast as the better static layout: not ahead"),
        ([1.6, 1.0], "is 1.25 to 2.00 times as fast as the better static layout: ahead in all 2 cases"),
        ([1.6, 2.5], "is 0.80 to 1.25 times as fast as the better static layout: ahead in 1 of 2 cases"),
        ([4.0, 2.5], "is 0.50 to 0.80 times as fast as the better static layout: ahead in none of 2 cases"),
    ],
)
def test_rollout(bench, tmp_path, seconds, said):
    found = bench("_rollout_picture")
    cases = [found.Case.of(rollout_result(each)) for each in seconds]
    assert found.title(cases) == f"survival {said}"
    assert cases[0].rounds == pytest.approx([2.0 / seconds[0]] * 2)
    assert cases[0].name == "m, 8 requests\nemulated link: 5 µs, 0.03 GB/s"
    assert is_png(found.draw(cases, "here", tmp_path / "a.png"))


# -- bench/switch.py ------------------------------------------------------------------------------


def pauses(theirs: float | None) -> list[dict]:
    """Two directions; ours takes 10 ms without the drain, PAT's way so many seconds."""
    rows = []
    for to in ("tp2", "tp1"):
        point = {"tokens": 1024, "requests": 8, "to": to}
        rows.append(point | {"way": "ours", "own": 0.01, "pause": 0.03})
        if theirs:
            rows.append(point | {"way": "PAT's", "own": theirs, "pause": theirs + 0.02})
    return rows


@pytest.mark.parametrize(
    ("theirs", "said", "panel"),
    [
        (0.2, "; PAT's way takes 20.0 times as long", "PAT's way takes 20.0 times as long"),
        (
            0.005,
            "; PAT's way is faster at 2 of 2 points: it takes 0.5 times as long",
            "PAT's way is faster at 2 of 2 points",
        ),
        (None, "", "10 ms"),
    ],
)
def test_switch(bench, tmp_path, theirs, said, panel):
    found = bench("_switch_picture")
    rows = pauses(theirs)
    assert (
        found.title({"2 ranks": rows}) == "A switch stops decoding for 10 ms once the steps in flight are done" + said
    )
    assert found.panel_title(rows) == panel
    assert list(found.directions(rows)) == [("merge", "tp2"), ("split", "tp1")]
    assert is_png(found.draw({"2 ranks": rows}, "here", tmp_path / "a.png"))


# -- bench/tail_batching.py -----------------------------------------------------------------------


def tail_written(tail_seconds: float) -> dict:
    """What ``--json`` writes: a round takes 40 s without tail batching."""
    node = {"base on a node": 40.0, "base on a node, adaptive": 30.0, "strict on a node": 20.0}
    node["strict on a node, adaptive"] = 10.0
    seconds = {f"{name} / 14B, 16K / 0.5": value for name, value in node.items()}
    seconds |= {"base / 14B, 16K / 0.5": 100.0, "strict / 14B, 16K / 0.5": 50.0}
    seconds |= {"prompts / 1.25 / 0.5": 50.0, "responses / 1.25 / 0.5": 80.0, "both / 1.25 / 0.5": 25.0}
    real = {"without": 40.0, "tail batching": tail_seconds, "tail batching, adaptive": 30.0}
    return {
        "replay": {key: {"seconds": value} for key, value in seconds.items()},
        "real": {
            "machine": {"cpu": "C", "cores": 2},
            "models": {
                model: {name: [{"seconds": value}, {"seconds": value}] for name, value in real.items()}
                for model in ("large", "small")
            },
        },
    }


@pytest.mark.parametrize(("seconds", "times"), [(50.0, "0.80"), (20.0, "2.00")])
def test_tail_batching(bench, tmp_path, seconds, times):
    module = bench("_tail_picture")
    found = module.of(tail_written(seconds))
    simulated = "Simulated, a round is 4.0 times as fast with tail batching and adaptive TP; with tail batching alone, "
    real = f"real rounds of large are {times} times as fast, small are {times} times as fast"
    assert module.title(found) == simulated + real
    assert module.best(found, 0.5) == "ρ = 0.5: best to start more of both, 4.00 times as fast (η = 1.25)"
    assert is_png(module.draw(found, tmp_path / "a.png"))


@pytest.mark.parametrize("part", ["replay", "real"])
def test_one_part_of_tail_batching(bench, tmp_path, part):
    module = bench("_tail_picture")
    found = module.of({part: tail_written(50.0)[part]})
    assert ("imulated" in module.title(found), "real rounds" in module.title(found).lower()) == (
        part == "replay",
        part == "real",
    )
    assert is_png(module.draw(found, tmp_path / "a.png"))


# -- bench/replay.py and sglang_pat.replay --------------------------------------------------------


@pytest.mark.parametrize(("survival", "told", "more"), [(0.01, "less", 0), (0.05, "no less", 2)])
def test_study(bench, tmp_path, survival, told, more):
    module = bench("_replay_picture")
    speeds = {"static_over_oracle": 1.0, "static_over_survival": 0.9}
    names = ("8xA40-llama", "8xA40-llama-pat-costs")
    cells = [{"profile": name, "pat_decided": 0.02, "survival_decided": survival} | speeds for name in names]
    said = f"survival loses {told} against the oracle than pat: {survival:.2%} of the time, pat 2.00%"
    assert module.title(cells) == f"{said} (decisions, 2 simulated cells)"
    assert module.more_regret(cells) == f"survival loses more than pat in {more} of 2 cells"
    assert module.within(cells).endswith("survival in 0 of 2 cells, the oracle in 2")
    assert is_png(module.draw(cells, tmp_path / "a.png"))


def runs(**seconds: float) -> dict[str, list[Run]]:
    names = {name.replace("_", ":"): each for name, each in seconds.items()}
    return {name: [Run(each, timeline=[(0.0, 1, 4), (each / 2, 2, 1)])] for name, each in names.items()}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            dict(pat=12.0, survival=11.0, static_1=22.0, static_2=13.2, oracle=10.0),
            "survival takes 10.0% more time than the oracle (pat 20.0% more), "
            "and is 1.20 times as fast as the best static layout shown (tp2)",
        ),
        (
            dict(survival=20.0, static_1=9.0, oracle=10.0),
            "survival takes 100.0% more time than the oracle, "
            "and is 0.45 times as fast as the best static layout shown (tp1)",
        ),
        (dict(static_1=9.0, oracle=10.0), "static:1 takes 10.0% less time than the oracle"),
        (dict(oracle=10.0), "What the oracle does"),
    ],
)
def test_replay(tmp_path, seconds, said):
    found = runs(**seconds)
    assert replay.title(found) == said
    replay.draw(found, "a profile", tmp_path / "a.png")
    assert is_png(tmp_path / "a.png")


# -- acceptance, training runs ----------------------------------------------------------


def test_acceptance_titles():
    points = [{"way": "ours", "up": 0.02}, {"way": "PAT's", "up": 0.18}, {"way": "ours", "up": 0.01}]
    assert acceptance.pause_title({"points": points}) == "A merge stops decoding for 20 ms at most, PAT's way for 180"
    assert acceptance.steps_title({"one": {"1": 0.01, "2": 0.02}}) == "A lone request decodes fastest in tp1"
    assert acceptance.steps_title({"one": {"1": 0.01, "2": 0.005}}).endswith("2.0 times as fast in tp2")


def test_training(tmp_path, monkeypatch):
    steps = [training.Step.of(0.5, 10.0, {"generation": 6.0}), training.Step.of(0.5, 10.0, {"generation": 6.0})]
    one, two = training.Visit(0.0, 1.0, 1), training.Visit(1.0, 2.0, 2)
    assert training.title(steps, [[one, two]]) == "2 steps: 60% of the time generates, the layout changed 1 time"
    assert training.title(steps[:1], [[one]]) == "1 step: 60% of the time generates, the layout never changed"
    monkeypatch.setattr(training, "visits", lambda log: [one, two])
    assert is_png(training.draw(tmp_path / "a.png", steps, [Path("log")]))


# -- docs/img -------------------------------------------------------------------------------------


def test_pages_can_be_drawn(bench, tmp_path, monkeypatch):
    """Their tables still have what the pictures are drawn from."""
    module = bench("_redraw")
    monkeypatch.setattr(module, "IMAGES", tmp_path)
    assert module.main([]) == 0
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(module.DRAWN)
    assert all(map(is_png, tmp_path.iterdir()))
