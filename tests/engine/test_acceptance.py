"""``python -m sglang_pat.acceptance`` on a CPU: every step, on a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .conftest import count_start

ROOT = Path(__file__).resolve().parents[2]
BARS = {"check-machine", "start", "endurance", "same-tokens", "steady", "likelihood", "sweep"}
"""Steps with a bar that holds on a CPU too; the others say what they measured."""


def test_on_a_cpu(servers, tmp_path):
    servers.make_room()
    for _ in range(6):  # ours, PAT's way, ours again, bfloat16, the profiler's, one with a policy
        count_start()
    command = [sys.executable, "-m", "sglang_pat.acceptance", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, env=os.environ)
    page = (tmp_path / "acceptance.md").read_text() if (tmp_path / "acceptance.md").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + page
    found = {result["name"]: result for result in json.loads((tmp_path / "acceptance.json").read_text())["results"]}
    assert {name for name, result in found.items() if result["verdict"] == "passed"} == BARS
    assert {result["verdict"] for name, result in found.items() if name not in BARS} == {"measured"}
    points = found["pause"]["figures"]["points"]
    assert {point["way"] for point in points} == {"ours", "PAT's"} and len(points) == 4
    assert all(record["migrated"] == point["requests"] for point in points for record in point["records"])
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
