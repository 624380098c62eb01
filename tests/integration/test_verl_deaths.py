"""Engines of a verl job that are killed, at any moment of a step: each step ends with all its samples, and another
engine has the place of the dead one in the next."""

from __future__ import annotations

import os
import random

import pytest

from . import jobs, verl_routers
from .jobs import SWITCHING

pytestmark = pytest.mark.integration

KILLS = "20:{0}:now:main 34:{1}:now:rank 50:{0}:sleep:coordinator 66:{1}:update:main 82:{0}:EXCHANGE:rank"
"""One in each step after the first, of sixteen requests."""
DEATHS, START = "rollout/engine_deaths", "rollout/engine_start_seconds"


def test_an_engine_dies_in_every_step(verl_job, tmp_path, monkeypatch):
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, KILLS.format(0, 1))
    job = verl_job(*two, *SWITCHING, "--steps", "6", "trainer.v1.trainer_mode=sglang_pat_sync")
    assert job.series(DEATHS) == [0, 1, 1, 1, 1, 1], job.tail
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6, "of what the weights of the step would generate"
    moved, kept = job.series("rollout/moved_requests"), job.series("rollout/tokens_of_dead_engines")
    assert moved[0] == 0 and min(moved[1], moved[2], moved[5]) > 0, moved
    assert kept[2] > 0, kept
    assert job.series("rollout/switches")[0] >= 1
    late = [step - start for step, start in zip(job.series("timing_s/update_weights"), job.series(START), strict=True)]
    assert max(late) < 5, "no call to a dead engine is tried for long"
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))


ROLLOUT = "actor_rollout_ref.rollout"
MODES = {
    "colocate_async": (0, ()),
    # Engines 0 are the trainer's own, and generate nothing.
    "stream": (1, (
        "--gpus", "2", f"{ROLLOUT}.nnodes=2", "ray_kwargs.ray_init.num_gpus=6",
        f"{ROLLOUT}.checkpoint_engine.backend=gloo",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=on_cpu.verl_gloo",
    )),
    "stream_lent": (0, ("actor_rollout_ref.actor.fsdp_config.fsdp_size=1", f"{ROLLOUT}.calculate_log_probs=false")),
}  # fmt: skip
"""First engine, and options, by trainer mode."""


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_engines_die_in_other_modes(verl_job, tmp_path, monkeypatch, mode):
    first, options = MODES[mode]
    kills = KILLS.format(first, first + 1)
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, kills)
    job = verl_job(*two, *SWITCHING, "--steps", "6", f"trainer.v1.trainer_mode=sglang_pat_{mode}", *options)
    assert len(job.steps) == 6 and sum(job.series(DEATHS)) >= 4, job.tail
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))


STEPS = int(os.environ.get("SGLANG_PAT_DEATHS", 100)) + 1
"""Steps of the soak run, an engine of which dies in all but the first."""


def draw_kills(seed: int, steps: int) -> str:
    rng, kills = random.Random(seed), []
    for step in range(1, steps):
        request, engine = 16 * step + rng.randint(2, 16), rng.randint(0, 1)
        moment = rng.choice(["now", "now", *verl_routers.MOMENTS, "PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME"])
        process = "rank" if moment.isupper() else rng.choice(["main", "rank", "coordinator"])
        kills.append(f"{request}:{engine}:{moment}:{process}")
    return " ".join(kills)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [int(os.environ.get("SGLANG_PAT_SEED", 0))])
def test_engines_die_at_drawn_moments(verl_job, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(jobs, "SECONDS", 120 * STEPS + 300)
    kills = draw_kills(seed, STEPS)
    print(kills)
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, kills)
    job = verl_job(*two, *SWITCHING, "--steps", str(STEPS), "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == STEPS, job.tail
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    names = DEATHS, "rollout/moved_requests", "rollout/tokens_of_dead_engines", START
    deaths, moved, tokens, seconds = (sum(job.series(name)) for name in names)
    print(
        f"{deaths:.0f} deaths, {moved:.0f} requests moved, with {tokens:.0f} tokens, {seconds / deaths:.1f} s a start"
    )
    late = [step - start for step, start in zip(job.series("timing_s/update_weights"), job.series(START), strict=True)]
    assert deaths >= 0.9 * (STEPS - 1), "a switch may not come any more after its fault was armed"
    assert max(late) < 5, late
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))
