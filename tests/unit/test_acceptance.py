"""The acceptance without its engines: what it prints and leaves, what it refuses, and what a failing step does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pat.acceptance import cli, steps
from sglang_pat.acceptance.results import Result

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    """To make one takes seconds, and no step here asks for it."""
    monkeypatch.setattr("sglang_pat.testing.models.make_random", lambda arch, folder, **_: folder)


def fine(bench) -> Result:
    """All is well."""
    return Result(verdict="passed", line="as it should be", rows=[["a", "b"], ["1", "2|3"]])


def broken(bench) -> Result:
    """Nothing is."""
    raise RuntimeError("first line\nwhat went wrong")


def below(bench) -> Result:
    """A bar is missed."""
    return Result(verdict="failed", line="39% (bar 80%)")


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(steps, "STEPS", (fine, broken, below, fine))


def test_a_step_that_fails_stops_nothing_and_its_traceback_is_kept(made_up, tmp_path, capsys):
    assert cli.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert [result["verdict"] for result in found["results"]] == ["passed", "failed", "failed", "passed"]
    assert found["results"][1]["line"] == "what went wrong" and "in broken" in found["results"][1]["traceback"]
    page = (tmp_path / "acceptance.md").read_text()
    assert "| below | failed | 39% (bar 80%) |" in page and "in broken" in page and "cores" in page
    printed = capsys.readouterr().out
    assert "broken: Nothing is." in printed and "failed: below: 39% (bar 80%)" in printed


def test_what_cannot_be_run_is_left_out_and_fails_nothing(monkeypatch, tmp_path, capsys):
    def absent(bench) -> Result:
        """Something is not there."""
        return Result(verdict="left out", line="install it")

    monkeypatch.setattr(steps, "STEPS", (fine, absent))
    assert cli.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("1 passed, 1 left out\nleft out: absent: install it\n")
    assert "| absent | left out | install it |" in (tmp_path / "acceptance.md").read_text()


def test_steps_are_chosen_by_name(made_up, tmp_path):
    assert cli.main(["--device", "cpu", "--out", str(tmp_path), "--only", "fine"]) == 0
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert [result["name"] for result in found["results"]] == ["fine", "fine"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nonsense"], "--only nonsense: choose from check-machine, move-kv"),
        (["--ranks", "3"], "--ranks 3: give a power of two from 2 on"),
        (["--ranks", "1"], "--ranks 1: give a power of two from 2 on"),
        (["--device", "cuda"], "--device cuda: there is no GPU here"),
    ],
)
def test_refused_in_one_line(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_step_says_what_it_shows():
    assert all(step.__doc__ and step.__doc__.splitlines()[0].endswith(".") for step in steps.STEPS)
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    assert all(f"| `{cli.name_of(step)}` |" in page for step in steps.STEPS)
