"""What goes wrong in a verl job ends it: with a line that says why, without a hang, and nothing of it stays."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from sglang_pat.checks import faults

from . import jobs, verl_routers
from .jobs import ROOT, SWITCHING, VerlJob

pytestmark = [pytest.mark.integration, pytest.mark.soak]


def nothing_left(job: VerlJob) -> bool:
    """Each process of a job has the place of its metrics in its environment."""
    return jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))


@pytest.fixture
def faulty(verl_job, monkeypatch):
    """Runs a job with a trainer of :mod:`tests.integration.verl_faults`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.integration.verl_faults")

    def run(fault: str) -> VerlJob:
        monkeypatch.setenv("PAT_TEST_FAULT", fault)
        return verl_job(*SWITCHING, f"+trainer.fault={fault.replace(':', '_')}", fails=True)

    return run


def test_trainer_dies_in_an_update(faulty):
    job = faulty("die:2")
    assert len(job.steps) <= 2 and "ActorDiedError" in job.log, job.tail
    assert nothing_left(job)


def test_update_with_an_unknown_name(faulty):
    job = faulty("name:2")
    line = "weight update refused, no tensor of this request was written; send the whole update again: the model has no"
    assert line in job.log, job.tail
    assert "model.layers.0.nonsense.weight" in job.log and len(job.steps) <= 2
    assert nothing_left(job)


def test_one_of_two_engines_dies(verl_job, tmp_path, monkeypatch):
    """The requests of the dead one go on at the other, and a new one has its place in the next step."""
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch)
    job = verl_job(*two, *SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == 3 and job.series("rollout/engine_deaths") == [0, 1, 0], job.tail
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert nothing_left(job)


def test_engine_dies_in_a_switch(verl_job, monkeypatch):
    monkeypatch.setenv(faults.ENV, "EXCHANGE:1:kill")
    job = verl_job(*SWITCHING, "+trainer.fault=engine", fails=True)
    assert "is gone (killed or exited) during" in job.log and not job.steps, job.tail
    assert nothing_left(job)


def test_refused_model(flat, tmp_path):
    model, out = shutil.copytree(flat, tmp_path / "model"), tmp_path / "out"
    config = json.loads((model / "config.json").read_text()) | {"attn_logit_softcapping": 50.0}
    (model / "config.json").write_text(json.dumps(config))
    out.mkdir()
    job = VerlJob(model, out, SWITCHING)
    assert job.code != 0 and not job.steps
    assert ": an adaptive engine does not support LlamaForCausalLM: its attention logits are" in job.log, job.tail
    assert "actor and ref model engine initialized" not in job.log, job.tail
    assert nothing_left(job)
