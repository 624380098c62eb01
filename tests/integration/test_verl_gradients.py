"""Steps whose gradients are summed chunk by chunk, on two replicas of two ranks, and verl's own on the same samples."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .jobs import ROOT, SECONDS, cpu_jobs
from .verl_gradients import CASES, SEQUENCES, STEPS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(flat, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("gradients") / "found.json"
    environment = cpu_jobs.environment(
        VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="on_cpu.verl_cpu", VERL_ENGINE_DEVICE="cuda"
    )
    command = [sys.executable, "-m", "tests.integration.verl_gradients", str(flat), str(out)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_batch(found, case):
    assert len(found[case]["gradients"]) == STEPS and min(found[case]["norms"]) > 0.1
    assert max(found[case]["gradients"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_weights_after_three_steps_are_verls(found, case):
    assert found[case]["moved"] > 1e-4 and found[case]["weights"] < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_verls(found, case):
    for ours, theirs in found[case]["metrics"]:
        assert ours.keys() == theirs.keys()
        theirs = {name: value if isinstance(value, float) else value[0] for name, value in theirs.items()}
        for name in ours.keys() - {"mfu", "perf/cpu_memory_used_gb"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
        assert ours["mfu"] > 0


def test_wrong_calls_and_numbers_say_so(found):
    early, no_step, twice, others, many = found["errors"]
    assert early == "add_gradients() is for a step that has begun: begin_step() comes first"
    assert no_step == "finish_step() is for a step that has begun: begin_step() comes first"
    assert twice == "the gradients of a step are not finished: finish_step() comes before begin_step()"
    assert others == "4 sequences were given in this step, 3 were trained on"
    assert many.startswith(f"{SEQUENCES + 1} sequences were given in this step, at most {SEQUENCES} are one update")
