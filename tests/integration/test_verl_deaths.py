"""Engines of a verl job that are killed, at any moment of a step: each step ends with all its samples, and another
engine has the place of the dead one in the next."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from statistics import median

import pytest

from . import jobs, verl_routers
from .jobs import SWITCHING
from .test_verl import GREEDY

pytestmark = pytest.mark.integration

ROLLOUT = "actor_rollout_ref.rollout"
KILLS = "20:{0}:now:main 34:{1}:now:rank 50:{0}:sleep:coordinator 66:{1}:update:main 82:{0}:EXCHANGE:rank"
"""One in each step after the first, of sixteen requests."""
FEW_KILLS = "20:{0}:now:rank 34:{1}:update:main 50:{0}:EXCHANGE:rank"
MODES = {
    "sync": (0, (f"{ROLLOUT}.free_cache_engine=true",)),  # verl's default
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
LEFT = ("torch_", "sglang_loads_")
"""What a killed engine may leave in shared memory: weights on their way to it from a trainer without a GPU, and a file
of SGLang 0.5.23's own (its ``stale_shm_cleanup.py`` says so)."""


def run(verl_job, tmp_path, monkeypatch, kills: str, mode: str = "sync", more: tuple[str, ...] = ()) -> jobs.Job:
    """A job with two engines, of which one dies in each step after the first; checked for what holds in every mode."""
    first, options = MODES[mode]
    kills = kills.format(first, first + 1)
    two = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, kills)
    steps, segments = len(kills.split()) + 1, list_segments()
    job = verl_job(
        *two, *SWITCHING, "--steps", str(steps), f"trainer.v1.trainer_mode=sglang_pat_{mode}", *options, *more
    )
    assert len(job.steps) == steps, job.tail
    assert "Failed to complete async request" not in job.log, "verl's client tries for long to reach a dead engine"
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))
    left = list_segments() - segments
    known = {name for name in left if name.startswith(LEFT)}
    for name in known:
        Path("/dev/shm", name).unlink()
    assert left == known
    return job


def list_segments() -> set[str]:
    """Files in shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def check_sync(job: jobs.Job) -> None:
    """Each token is one that the weights of its step generate: 1e-6 is rounding."""
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert job.series("rollout/engine_deaths")[0] == job.series("rollout/moved_requests")[0] == 0
    assert job.series("rollout/switches")[0] >= 1


def test_an_engine_dies_in_every_step(verl_job, tmp_path, monkeypatch):
    job = run(verl_job, tmp_path, monkeypatch, FEW_KILLS)
    check_sync(job)
    assert job.series("rollout/engine_deaths") == [0, 1, 1, 1], job.tail
    moved = job.series("rollout/moved_requests")
    assert min(moved[1], moved[3]) > 0 and sum(job.series("rollout/tokens_of_dead_engines")) > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_engines_die_in_all_modes(verl_job, tmp_path, monkeypatch, mode):
    job = run(verl_job, tmp_path, monkeypatch, KILLS, mode)
    assert sum(job.series("rollout/engine_deaths")) >= 4, job.tail
    if mode == "sync":
        check_sync(job)


@pytest.mark.long
def test_engines_come_and_go_until_none_is_left(verl_job, tmp_path, monkeypatch):
    """One engine with GPUs of its own.  Three are wanted, for two there is room.  The first one's node goes, another
    one is started.  Then one is wanted, and its node goes."""
    monkeypatch.setenv(verl_routers.RESIZES, "4:3 36:1")
    arguments = verl_routers.arguments(verl_routers.Killing, tmp_path, monkeypatch, "20:1:node:main 52:2:node:main")
    stream = [word.replace("nnodes=2", "nnodes=1") for word in MODES["stream"][1]]
    mode = "trainer.v1.trainer_mode=sglang_pat_stream"
    job = verl_job(*arguments, *SWITCHING, "--steps", "5", mode, *stream, fails=True)
    trainers = 1  # the engine on the trainer's GPUs, which generates nothing here
    assert job.series("rollout/engines") == [trainers + engines for engines in (2, 2, 1)], job.tail
    assert job.series("rollout/engine_deaths") == [0, 1, 0] and "no engine is left: all have died" in job.log, job.tail
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))
    first, second = (job.out / "resizes.txt").read_text().splitlines()
    assert first.endswith(": 1 engine, 3 from the next update of the weights")
    assert "2 engines, 1 from the next update of the weights; one more engine did not start: it needs 2 GPU" in second


def read_answers(job: jobs.Job) -> dict[tuple[int, str], str]:
    """Answers by step and prompt."""
    lines = [line for path in (job.out / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()]
    return {(row["step"], row["input"]): row["output"] for row in map(json.loads, lines)}


@pytest.mark.long
def test_greedy_answers_are_those_of_an_undisturbed_job(verl_job, tmp_path, monkeypatch):
    """The weights stay as they are, or rounding would grow from step to step."""
    common = (*GREEDY, "--lr", "0", "+trainer.rollout_data_dir={out}/rollouts")
    disturbed = run(verl_job, tmp_path, monkeypatch, KILLS, more=common)
    mode = "trainer.v1.trainer_mode=sglang_pat_sync"
    undisturbed = verl_job(*SWITCHING, "--steps", str(len(disturbed.steps)), mode, *common)
    assert min(disturbed.series("rollout/engine_deaths")[1:]) == 1
    assert len(read_answers(disturbed)) == 16 * len(disturbed.steps)
    assert read_answers(disturbed) == read_answers(undisturbed)


STEPS = int(os.environ.get("SGLANG_PAT_DEATHS", 100)) + 1
"""Steps of the soak run, an engine of which dies in all but the first; ``SOAK_SECONDS``: of its job, at most."""
SOAK_SECONDS = 120 * STEPS + 300


def draw_kills(seed: int, steps: int) -> str:
    rng, kills = random.Random(seed), []
    for step in range(1, steps):
        request, engine = 16 * step + rng.randint(2, 16), rng.randint(0, 1)
        moment = rng.choice(["now", "now", *verl_routers.MOMENTS, "PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME"])
        process = "rank" if moment.isupper() else rng.choice(["main", "rank", "coordinator"])
        kills.append(f"{request}:{engine}:{moment}:{process}")
    return " ".join(kills)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 300)
@pytest.mark.parametrize("seed", [int(os.environ.get("SGLANG_PAT_SEED", 0))])
def test_engines_die_at_drawn_moments(verl_job, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(jobs, "SECONDS", SOAK_SECONDS)
    kills = draw_kills(seed, STEPS)
    print(kills)
    job = run(verl_job, tmp_path, monkeypatch, kills)
    check_sync(job)
    names = ("engine_deaths", "moved_requests", "tokens_of_dead_engines")
    deaths, moved, tokens = (sum(job.series(f"rollout/{name}")) for name in names)
    starts, updates = job.series("rollout/engine_start_seconds"), job.series("timing_s/update_weights")
    # An engine that dies early is started, and waited for, before the update.
    late = [update - start for update, start in zip(updates, starts, strict=True) if update > start]
    print(
        f"{deaths:.0f} deaths, {moved:.0f} requests moved, with {tokens:.0f} tokens; a start takes {median(starts):.1f}"
    )
    print(f"({max(starts):.1f}) s, the rest of an update {median(late):.1f} ({max(late):.1f}); in brackets the longest")
    assert deaths >= 0.9 * (STEPS - 1), "a switch may not come any more after its fault was armed"
