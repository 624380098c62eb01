"""What goes wrong in an OpenRLHF job ends it: with a line that says why, without a hang.

In the mode ``async`` trainer and engine wait for each other in collectives; collocated they share memory.
"""

from __future__ import annotations

import os

import pytest

from sglang_pat.checks import faults

from .jobs import ROOT, OpenRlhfJob, nothing_left

pytestmark = [pytest.mark.integration, pytest.mark.soak]

FAULTY = ("--reward.remote_url", str(ROOT / "tests" / "integration" / "openrlhf_faults.py"))
TENSORS = 30
"""Number of the model's tensors: one call each."""


@pytest.fixture(params=["async", "collocated"])
def mode(request) -> str:
    return request.param


@pytest.fixture
def failed(mode, flat, tmp_path, monkeypatch):
    """Runs a job that fails; nothing of it stays."""
    monkeypatch.setenv("PAT_TEST_JOB", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)

    def run(*args: str) -> OpenRlhfJob:
        (out := tmp_path / "out").mkdir()
        job = OpenRlhfJob(flat, out, ("--mode", mode, *args))
        assert job.code != 0
        assert nothing_left("PAT_TEST_JOB", str(tmp_path))
        return job

    return run


def test_update_with_an_unknown_name(failed, monkeypatch):
    monkeypatch.setenv("PAT_TEST_FAULT", f"name:{TENSORS + 5}")
    job = failed(*FAULTY)
    line = "weight update refused, no tensor of this request was written; send the whole update again: the model has no"
    assert line in job.log and len(job.steps) <= 2, job.tail


def test_trainer_dies_in_an_update(failed, monkeypatch):
    monkeypatch.setenv("PAT_TEST_FAULT", f"die:{TENSORS + 5}")
    job = failed(*FAULTY)
    assert "ActorDiedError" in job.log and len(job.steps) <= 2, job.tail


def test_engine_dies_in_a_switch(failed, monkeypatch):
    monkeypatch.setenv(faults.ENV, "EXCHANGE:1:kill")
    job = failed()
    assert "is gone (killed or exited) during" in job.log and not job.steps, job.tail
