"""``python -m sglang_pat.acceptance`` on a CPU: every step, on a real engine.

SmolLM2 takes half a minute to be made and one to answer, so it is asked in ``make soak``, and a stand-in otherwise.
"""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest

from sglang_pat.acceptance import __main__ as cli
from sglang_pat.acceptance import answers, bench, steps

from .conftest import count_start, tell

BARS = {
    "check-machine", "judge", "start", "endurance", "same-tokens-of-experts", "same-tokens", "steady", "drafts",
    "lent-ranks",
    "real-model", "sweep",
}  # fmt: skip
"""Steps with a bar that holds on a CPU too; the others say what they measured."""
MAY_FAIL = "likelihood"
"""Few bfloat16 tokens, and a switch at any of them: one run of a hundred is beyond its bar."""


@pytest.fixture
def accept(servers, tmp_path, monkeypatch):
    """Run these steps in this process, with engines that ``servers`` forks: what each found, and the report."""

    def run(*names: str) -> tuple[dict[str, dict], str]:
        servers.make_room()
        monkeypatch.setattr(bench, "Prefork", lambda: servers.prefork)
        monkeypatch.setattr(servers.prefork, "stop", lambda: None)
        with mock.patch.dict(os.environ):
            code = cli.main(["--device", "cpu", "--out", str(tmp_path), "--only", *names])
        page = (tmp_path / "acceptance.md").read_text()
        found = {found["name"]: found for found in json.loads((tmp_path / "acceptance.json").read_text())["results"]}
        assert code == (1 if found.get(MAY_FAIL, {}).get("verdict") == "failed" else 0), page
        return found, page

    return run


@pytest.mark.long
def test_on_a_cpu(accept, llama, monkeypatch):
    # Ours twice, PAT's way, a mixture, ours again, with drafts, ours, bfloat16, the real model, the profiler's, and one
    # with a policy.
    for _ in range(11):
        count_start()
    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, lambda: llama)
    monkeypatch.setattr(answers, "WORD", "")  # which is in every answer
    found, _ = accept(*map(cli.format_step_name, steps.STEPS))
    assert found.pop(MAY_FAIL)["verdict"] in ("passed", "failed")
    assert {name for name, result in found.items() if result["verdict"] == "passed"} == BARS
    assert found["same-tokens-of-experts"]["line"].endswith("all equal; routed experts: all equal")
    for name in ("experts", "likelihood-of-experts"):  # they need a GPU
        assert found.pop(name)["verdict"] == "left out"
    assert {result["verdict"] for name, result in found.items() if name not in BARS} == {"measured"}
    points = found["pause"]["figures"]["points"]
    assert {point["way"] for point in points} == {"ours", "PAT's"} and len(points) == 4
    assert all(record["migrated"] == point["requests"] for point in points for record in point["records"])
    questions = [question for question, _ in found["real-model"]["rows"][1:]]
    assert questions == list(answers.PROMPTS[: answers.QUESTIONS])
    assert f" {2 * answers.QUESTIONS} moved with their KV: all equal" in found["real-model"]["line"]


@pytest.mark.soak
def test_smollm2(accept):
    count_start()
    found, page = accept("real-model")
    assert found["real-model"]["verdict"] == "passed"
    tell(page)
