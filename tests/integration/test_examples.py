"""What the examples read and write beside the frameworks."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
from types import ModuleType

import pytest
from on_cpu import cpu_jobs

from .jobs import EXAMPLES

pytestmark = pytest.mark.integration


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / "run_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_machine_that_is_too_busy_for_ray_is_told_in_one_line(capfd):
    """Nothing else fails with these words; any other end is told as it is."""
    from ray._private import node

    assert cpu_jobs.RAY_TOO_LATE in inspect.getsource(node)
    for said, code, told in (
        (f"Exception: The current node {cpu_jobs.RAY_TOO_LATE}. This could", 1, True),
        (f"INFO: The current node {cpu_jobs.RAY_TOO_LATE}. This could", 0, False),
        ("Exception: something else", 2, False),
    ):
        command = [sys.executable, "-c", f"print({said!r}); exit({code})"]
        assert cpu_jobs.run(command, os.environ) == (code, [f"{said}\n"])
        first, *more = capfd.readouterr().out.splitlines()
        assert first == said and [line.startswith("error: this machine is too busy") for line in more] == [True] * told


def test_openrlhfs_figures_may_be_no_numbers():
    """A run with such figures is the one to look at."""
    lines = ["(PPOTrainer) Global step 1: {'reward': nan, 'loss': inf, 'timing/step_total': 2.5}", "another line"]
    (found,) = example("openrlhf_grpo").metrics(lines)
    assert math.isnan(found["reward"]) and math.isinf(found["loss"]) and found["timing/step_total"] == 2.5


def test_verls_lines_of_a_validation_are_no_steps(tmp_path):
    (path := tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "data": {"val-core/reward": 0.5}}\n'
        '{"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0, "timing_s/gen": 1.5}}\n'
    )
    assert len(example("verl_grpo").steps(path)) == 1
