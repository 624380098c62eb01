"""``python -m sglang_pat.acceptance`` on a CPU: every step, on a real engine.

SmolLM2 takes half a minute to be made and one to answer, so it is asked in ``make soak``, and a stand-in otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pat.acceptance import answers, steps
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.cli import name_of

from .conftest import count_start, tell

ROOT = Path(__file__).resolve().parents[2]
BARS = {"check-machine", "start", "endurance", "same-tokens", "steady", "sweep"}
"""Steps with a bar that holds on a CPU too; the others say what they measured."""
MAY_FAIL = "likelihood"
"""Few bfloat16 tokens, and a switch at any of them: one run of a hundred is beyond its bar."""


def accept(out: Path, *names: str) -> tuple[dict[str, dict], str]:
    """Run these steps: what each found, and the report."""
    command = [sys.executable, "-m", "sglang_pat.acceptance", "--device", "cpu", "--out", str(out), "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, env=os.environ)
    page = (out / "acceptance.md").read_text() if (out / "acceptance.md").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + page
    return {found["name"]: found for found in json.loads((out / "acceptance.json").read_text())["results"]}, page


def test_on_a_cpu(servers, tmp_path):
    servers.make_room()
    for _ in range(7):  # ours twice, PAT's way, ours again, bfloat16, the profiler's, one with a policy
        count_start()
    found, _ = accept(tmp_path, *(name_of(step) for step in steps.STEPS if step is not answers.real_model))
    assert found.pop(MAY_FAIL)["verdict"] in ("passed", "failed")
    assert {name for name, result in found.items() if result["verdict"] == "passed"} == BARS
    assert {result["verdict"] for name, result in found.items() if name not in BARS} == {"measured"}
    points = found["pause"]["figures"]["points"]
    assert {point["way"] for point in points} == {"ours", "PAT's"} and len(points) == 4
    assert all(record["migrated"] == point["requests"] for point in points for record in point["records"])


def test_the_step_of_the_real_model_with_a_stand_in(servers, llama, tmp_path, monkeypatch):
    servers.make_room()
    count_start()
    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, lambda: llama)
    bench = Bench(device="cpu", ranks=2, folder=tmp_path, small=llama, large=llama, prefork=servers.prefork)
    try:
        senseless = answers.real_model(bench)
        monkeypatch.setattr(answers, "WORD", "")  # which is in every answer
        found = answers.real_model(bench)
    finally:
        bench.stop()
    assert senseless.verdict == "failed" and "all equal; no Paris in the answer" in senseless.line
    assert found.verdict == "passed", found.line
    assert [question for question, _ in found.rows[1:]] == list(answers.PROMPTS[: answers.QUESTIONS])
    assert f" {2 * answers.QUESTIONS} moved with their KV: all equal" in found.line


@pytest.mark.soak
def test_smollm2(servers, smollm2, tmp_path):
    servers.make_room()
    count_start()
    found, page = accept(tmp_path, "real-model")
    assert found["real-model"]["verdict"] == "passed"
    tell(page)
