"""Engines of a verl job that are killed, at any moment of a step: each step ends with all its samples, and another
engine has the place of the dead one in the next."""

from __future__ import annotations

import pytest

from . import jobs, verl_routers
from .jobs import SWITCHING

pytestmark = pytest.mark.integration

KILLS = "20:0:now:main 34:1:now:rank 50:0:sleep:coordinator 66:1:update:main 82:0:EXCHANGE:rank"
"""One in each step after the first, of sixteen requests."""
DEATHS = [0, 1, 1, 1, 1, 1]


def test_an_engine_dies_in_every_step(verl_job, tmp_path, monkeypatch):
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, KILLS)
    job = verl_job(*two, *SWITCHING, "--steps", "6", "trainer.v1.trainer_mode=sglang_pat_sync")
    assert job.series("rollout/engine_deaths") == DEATHS, job.tail
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6, "of what the weights of the step would generate"
    moved, kept = job.series("rollout/moved_requests"), job.series("rollout/tokens_of_dead_engines")
    assert moved[0] == 0 and min(moved[1], moved[2], moved[5]) > 0, moved
    assert kept[2] > 0, kept
    assert job.series("rollout/switches")[0] >= 1
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))
