"""What a job says of its engines is refused when it starts, in the words of the engine's own command."""

from __future__ import annotations

import pytest

from sglang_pat import job_settings, settings
from sglang_pat.layout import ParallelLayout

BAD = [
    ({"policy": "survivl"}, "--pat-policy 'survivl': choose one of survival, pat, "),
    ({"policy": "survival"}, "--pat-policy survival needs a profile: give --pat-profile FILE"),
    ({"kv": "x"}, "--pat-kv 'x': choose one of auto, "),
    ({"candidates": "many"}, "--pat-candidates 'many': give TP degrees separated by commas"),
    ({"candidates": "3"}, "candidate tp=3"),
    ({"switch_at": "0"}, "--pat-switch-at 0: must be at least 1"),
    ({"calibrate": -1}, "--pat-calibrate -1: must be 0 to"),
    ({"profile": "/nowhere"}, "profile /nowhere: No such file or directory; make one with"),
    ({"policy": "schedule", "schedule": "/nowhere"}, "--pat-schedule /nowhere: No such file or directory; give a file"),
    ({"log": "/nowhere/log"}, "--pat-log /nowhere/log: No such file or directory; give a file that can be written"),
    ({"base_tp": 3}, "base_tp is 3, must divide the engine's 8 GPUs: 1, 2, 4, 8"),
    ({"polcy": "pat"}, " has no setting 'polcy' (did you mean 'policy'?); choose from "),
]


@pytest.mark.parametrize("given, said", BAD)
def test_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as refused:
        job_settings.check(given, 8, "here")
    line = str(refused.value)
    assert line.removeprefix("here").removeprefix(": ").startswith(said) and "\n" not in line


@pytest.mark.parametrize("given, said", [(given, said) for given, said in BAD if said.startswith("--pat")])
def test_the_command_says_the_same(given, said):
    """It makes its configuration of the same fields, and reads files in the same way."""
    found = {
        f"pat_{name}": int(value) if name in ("switch_at", "calibrate") else value for name, value in given.items()
    }
    with pytest.raises(ValueError) as refused:
        job_settings.read_files(settings.configuration(found, ParallelLayout(1, 8)))
    assert str(refused.value).startswith(said)


def test_accepted(tmp_path):
    (tmp_path / "schedule").write_text('[{"tp": 8, "left": 3}]')
    job_settings.check({}, 8, "here")
    job_settings.check({"base_tp": 2, "candidates": [2, 8], "log": tmp_path / "log"}, 8, "here")
    job_settings.check({"policy": "schedule", "schedule": tmp_path / "schedule"}, 8, "here")
    with pytest.raises(ValueError, match="^here: --pat-schedule .*entry 1: tp=8 is not a candidate"):
        job_settings.check({"policy": "schedule", "schedule": tmp_path / "schedule"}, 4, "here")
