"""Pictures: drawn from what benches and studies find, in one style; titles have the figures of what is drawn."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from sglang_pat.tools import pictures
from studies import policies_picture, tail_picture

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "profiler", "studies", "bench", "examples")


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of ``bench/``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_colours_and_backend_stand_in_one_place():
    own = re.compile(r"#[0-9a-fA-F]{6}\b|matplotlib\.use\(")
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if own.search(path.read_text())]
    assert [path.relative_to(ROOT) for path in files] == [Path("python/sglang_pat/tools/pictures.py")]


def test_a_picture_is_written_whole(tmp_path):
    figure, _ = pictures.panels(1)
    assert is_png(pictures.save(figure, tmp_path / "a.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert pictures.span([1.178, 0.987]) == "0.99 to 1.18" and pictures.span([1.001, 1.002]) == "1.00"


@pytest.mark.parametrize(("seconds", "said"), [([1.6], "1.25"), ([1.6, 2.5], "0.80 to 1.25")])
def test_rollout(bench, tmp_path, seconds, said):
    found = bench("_rollout_picture")
    about = {"model": "m", "link": "5:0.03", "best_static": "static tp2×dp1", "work": {"batch": 8}}
    layouts = {"static tp1×dp2": 3.0, "static tp2×dp1": 2.0}
    runs = [layouts | {"survival": ours} for ours in seconds]
    each = [{name: {"seconds": [s, s], "median": s} for name, s in run.items()} for run in runs]
    cases = [found.Case.of(about | {"runs": run}) for run in each]
    assert said in found.title(cases)
    assert is_png(found.draw(cases, "here", tmp_path / "a.png"))


def test_tail_batching(tmp_path):
    seconds = dict(zip(tail_picture.NAMES, (40.0, 30.0, 20.0, 10.0), strict=True))
    found = {(name, "14B, 16K", rho): {"seconds": s} for name, s in seconds.items() for rho in (0.0, 0.5)}
    drawn = tail_picture.of(found | {("prompts", 1.25, 0.5): {"seconds": 1.0}})
    assert "4.0 times" in tail_picture.title(drawn)
    assert is_png(tail_picture.draw(drawn, "", tmp_path / "a.png"))


def test_study(tmp_path):
    cell = {"static_over_oracle": 1.0, "static_over_survival": 0.9, "pat_decided": 0.02}
    ours, theirs = cell | {"profile": "a", "survival_decided": 0.01}, cell | {"profile": "a-pat-costs"}
    assert is_png(policies_picture.draw([ours, theirs], tmp_path / "a.png")), "PAT's switch costs are left out"
    assert "survival loses 1.00%" in policies_picture.title([ours]) and "pat 2.00%" in policies_picture.title([ours])


def test_pictures_of_results_can_be_drawn_from_their_tables(bench, tmp_path, monkeypatch):
    module = bench("_redraw")
    monkeypatch.setattr(module, "IMAGES", tmp_path)
    assert module.main([]) == 0
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(module.DRAWN)
    assert all(map(is_png, tmp_path.iterdir()))
