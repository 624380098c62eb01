"""Pictures: drawn from what benches and studies find, in one style; titles have the figures of what is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import _redraw
from sglang_pat.tools import pictures
from studies import policies_picture, tail_picture

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "profiler", "studies", "bench", "examples")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_colours_and_backend_stand_in_one_place():
    own = re.compile(r"#[0-9a-fA-F]{6}\b|matplotlib\.use\(")
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if own.search(path.read_text())]
    assert [path.relative_to(ROOT) for path in files] == [Path("python/sglang_pat/tools/pictures.py")]


def test_a_picture_is_written_whole(tmp_path):
    figure, _ = pictures.make_panels(1)
    assert is_png(pictures.save(figure, tmp_path / "a.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert pictures.format_span([1.178, 0.987]) == "0.99 to 1.18" and pictures.format_span([1.001, 1.002]) == "1.00"


def test_tail_batching(tmp_path):
    seconds = dict(zip(tail_picture.NAMES, (40.0, 30.0, 20.0, 10.0), strict=True))
    found = {(name, "14B, 16K", rho): {"seconds": s} for name, s in seconds.items() for rho in (0.0, 0.5)}
    drawn = tail_picture.make_found(found | {("prompts", 1.25, 0.5): {"seconds": 1.0}})
    assert "4.0 times" in tail_picture.format_title(drawn)
    assert is_png(tail_picture.draw(drawn, "", tmp_path / "a.png"))


@pytest.mark.long
def test_study(tmp_path):
    cell = {"static_over_oracle": 1.0, "static_over_survival": 0.9, "pat_decided": 0.02}
    ours, theirs = cell | {"profile": "a", "survival_decided": 0.01}, cell | {"profile": "a-pat-costs"}
    assert is_png(policies_picture.draw([ours, theirs], tmp_path / "a.png")), "PAT's switch costs are left out"
    only_theirs = [theirs | {"survival_decided": 0.01}]
    assert is_png(policies_picture.draw(only_theirs, tmp_path / "b.png")), "PAT's switch costs alone are drawn"
    assert "survival loses 1.00%" in policies_picture.format_title(
        [ours]
    ) and "pat 2.00%" in policies_picture.format_title([ours])


@pytest.mark.long
def test_pictures_of_pages_can_be_drawn_from_their_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(_redraw, "IMAGES", tmp_path)
    assert _redraw.main([]) == 0
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(_redraw.DRAWN)
    assert all(map(is_png, tmp_path.iterdir()))


def test_titles_say_what_is_drawn():
    shares = {"plain": ((0.1, 0.2), (0.5, 0.6)), "tail": ((0.1, 0.2), (0.6, 0.8))}
    assert _redraw.format_learning(shares) == (
        "After the same problems 0.55 to 0.70 of those held out are right, whichever way was used; 0.10 to 0.20 before"
    )
    steps = [{"step, s": "0.41", "fastest and slowest": "0.29 to 0.44"}, {"step, s": "0.35"}]
    title = _redraw.format_lending(steps).replace("\N{NO-BREAK SPACE}", " ")
    assert "saves 0.06 s of a step of 0.41 s: less than the 0.15 s" in title
    steps[0]["fastest and slowest"] = "0.40 to 0.44"
    assert "more than the 0.04 s" in _redraw.format_lending(steps).replace("\N{NO-BREAK SPACE}", " ")
