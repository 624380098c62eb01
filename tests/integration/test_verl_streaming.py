"""Streamed gradients under verl, in real jobs: ``trainer.v1.trainer_mode=sglang_pat_stream``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_pat.integrations.verl import stream_lent
from sglang_pat.integrations.verl.fields import was_stopped

from . import jobs, verl_rewards, verl_stream_jobs
from .jobs import SWITCHING
from .verl_stream_jobs import BATCH, ENGINE, FIRST, HYBRID, REF, ROLLOUT

pytestmark = pytest.mark.integration

SEPARATE = "actor_rollout_ref.hybrid_engine=false"
VALIDATED = "val-core/example/acc/mean@1"
COMMON = (
    "--batch", str(BATCH), "--samples", "4", "data.shuffle=false",
    "trainer.save_freq=3", "trainer.default_local_dir={out}",
    # With Adam's own, the sign of a rounding error moves a weight whose gradient is nearly 0.
    "actor_rollout_ref.actor.optim.override_optimizer_config={{eps:0.001}}",
)  # fmt: skip


def load_weights(job: jobs.Job) -> dict:
    (path,) = (job.out / "global_step_3" / "actor" / "huggingface").glob("*.safetensors")
    return load_file(path)


@pytest.fixture
def own_modules(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(jobs.ROOT), prepend=os.pathsep)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", verl_stream_jobs.__name__)
    monkeypatch.setenv("STREAM_SAMPLES", str(tmp_path))


STREAM = (
    "trainer.v1.trainer_mode=recorded_stream", "actor_rollout_ref.rollout.nnodes=1", f"{ENGINE}.backend=gloo",
    f"{ENGINE}.custom_backend_module=on_cpu.verl_gloo", "ray_kwargs.ray_init.num_gpus=4",
)  # fmt: skip
LEAVING = "trainer.v1.trainer_mode=leaving_lent"
HF_ONLY = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"
ACTOR = "actor_rollout_ref.actor"
CASES = {
    "separate": ((*STREAM, SEPARATE), (f"{ACTOR}.loss_agg_mode=token-mean",)),
    # And old log-probs are those of the pass that computes gradients.
    "shared": (
        (*STREAM, HYBRID),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "actor_rollout_ref.rollout.calculate_log_probs=false"),
    ),
    "lent": (
        ("trainer.v1.trainer_mode=recorded_stream_lent", f"{ACTOR}.fsdp_config.fsdp_size=1"),
        (f"{ACTOR}.loss_agg_mode=token-mean", "actor_rollout_ref.rollout.calculate_log_probs=false"),
    ),
}  # fmt: skip
"""What is set for the streamed job only, and for both."""


def run_gated(verl_job, tmp_path, case: str, agent: str, *more: str) -> tuple[jobs.Job, tuple[str, ...]]:
    """A streamed job, and what a job of verl's own has in common with it."""
    mode, settings = CASES[case]
    agents, name = tmp_path / "agents.yaml", f"trainer.experiment_name={tmp_path.name}"
    agents.write_text(f"- name: gated\n  _target_: {verl_stream_jobs.__name__}.{agent}\n")
    common = (*COMMON, HF_ONLY, *settings, name)
    streamed = verl_job(
        *SWITCHING, *common, *mode, *more,
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=gated",
    )  # fmt: skip
    return streamed, common


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_verls_own_update(verl_job, own_modules, flat, tmp_path, case):
    """Most prompts of a step begin when gradients of its first chunk are there: a trainer that waits for the batch
    would wait for ever.  verl's own trainer then gets the samples, all at once."""
    streamed, common = run_gated(verl_job, tmp_path, case, "GatedAgent")
    assert len(streamed.steps) == 3
    for step in streamed.steps:
        assert step["training/stream/chunks"] >= 2 and step["training/stream/hidden_seconds"] > 0
        assert step.get("training/rollout_probs_diff_max", 0) <= 1e-6
        assert step["training/off_policy/trajectory_spans/max"] == 1
        if case != "separate":
            assert 0.2 <= step["training/stream/switched_at"] <= FIRST / BATCH
    if case == "lent":  # one switch to lend, one to take back, and others of the policy's
        assert min(streamed.series("rollout/switches")) >= 2
    compare_with_verl(verl_job, flat, streamed, common)


@pytest.mark.long
def test_an_engine_leaves_the_round_and_its_requests_go_on(verl_job, own_modules, flat, tmp_path):
    """Two engines; the first one leaves each round with what it has, as its ranks are to train, and the next update
    brings it back.  In the second step the other one then dies: the first goes on for it."""
    streamed, common = run_gated(verl_job, tmp_path, "lent", "GatedAgent", "--gpus", "4", "--tp", "2", LEAVING)
    assert len(streamed.steps) == 3 and min(streamed.series("test/moved")) > 0
    for step in streamed.steps:
        assert step["training/stream/chunks"] >= 2 and step["training/stream/hidden_seconds"] > 0
        assert step["training/off_policy/trajectory_spans/max"] == 1
    assert streamed.series("rollout/engine_deaths") == [0, 1, 0] and streamed.series("rollout/moved_requests")[1] > 0
    assert "requests ran on while memory was to be released" not in streamed.log
    compare_with_verl(verl_job, flat, streamed, common)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_tail_batching_chooses_the_prompts_that_are_streamed(verl_job, own_modules, flat, tmp_path, case):
    """Four of the 12 prompts that a step starts go on until they are stopped.  After two steps there are eight of them,
    for a step of their own.  In each step most prompts wait for its first chunk."""
    mode = "sglang_pat_stream_lent" if case == "lent" else "sglang_pat_stream"
    where = f"+trainer.v1.{mode}"
    streamed, common = run_gated(
        verl_job, tmp_path, case, "TailAgent", "data.gen_batch_size=1", f"{where}.tail_batching=strict",
        f"{where}.eta_prompts=1.5",
    )  # fmt: skip
    name = "training/tail_batching/"
    assert streamed.series(f"{name}long_round") == [0, 0, 1]
    assert streamed.series(f"{name}stopped_prompts") == [4, 4, 0]
    assert streamed.series(f"{name}waiting_prompts") == [4, 8, 0]
    trained = []
    for number, step in enumerate(streamed.steps, 1):
        assert step["training/stream/chunks"] >= 2 and step["training/stream/hidden_seconds"] > 0
        if case != "separate":
            assert 0.2 <= step["training/stream/switched_at"] <= FIRST / BATCH
        _, _, samples = torch.load(verl_stream_jobs.get_path(number), weights_only=False)
        assert not any(map(was_stopped, samples["extra_fields"])) and len(samples) == 4 * BATCH
        trained += sorted(samples["index"])[::4]
    long = [index for index in range(24) if verl_stream_jobs.TailAgent.takes_long(index)]
    assert trained == [index for index in range(24) if index not in long] + long
    compare_with_verl(verl_job, flat, streamed, common)


@pytest.mark.long
def test_all_of_it_goes_on_from_a_checkpoint(verl_job, own_modules, flat, tmp_path):
    """Tail batching, useless groups, a reference policy and lent ranks, whose first chunk of each step ends early: two
    steps and, from their checkpoint, a third."""
    reference = (
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1", f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{REF}.fsdp_config.model_dtype=fp32", f"{REF}.fsdp_config.fsdp_size=1",
        f"+{REF}.fsdp_config.mixed_precision={{{{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}}}",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]", f"{ROLLOUT}.calculate_log_probs=false",
        f"trainer.experiment_name={tmp_path.name}",
    )  # fmt: skip
    agents, where = tmp_path / "agents.yaml", f"+trainer.v1.{stream_lent.MODE}"
    agents.write_text(f"- name: gated\n  _target_: {verl_stream_jobs.__name__}.RareTailAgent\n")
    common = (
        *SWITCHING, "--steps", "12", *COMMON, *reference, "trainer.v1.trainer_mode=interrupted_lent",
        f"{ACTOR}.fsdp_config.fsdp_size=1", f"{where}.tail_batching=strict", f"{where}.eta_prompts=1.5",
        "algorithm.filter_groups.enable=true", f"reward.custom_reward_function.path={verl_rewards.__file__}",
        "reward.custom_reward_function.name=half", f"{ROLLOUT}.agent.agent_loop_config_path={agents}",
        f"{ROLLOUT}.agent.default_agent_loop=gated", f"{ROLLOUT}.engine_kwargs.sglang.max_total_tokens=40960",
    )  # fmt: skip
    begun = verl_job(*common, "trainer.total_training_steps=2", "trainer.save_freq=2")
    gone_on = verl_job(
        *common, "trainer.total_training_steps=3", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={begun.out}/global_step_2",
    )  # fmt: skip
    steps, trained = [*begun.steps, *gone_on.steps], list[int]()
    for number, step in enumerate(steps, 1):
        assert step["test/left"] > 0 and 0.2 <= step["training/stream/switched_at"] <= FIRST / BATCH
        if not step["training/tail_batching/long_round"]:
            assert step["training/tail_batching/stopped_prompts"] >= 1
        _, _, samples = torch.load(verl_stream_jobs.get_path(number), weights_only=False)
        assert len(samples) == 4 * BATCH and not any(map(was_stopped, samples["extra_fields"]))
        trained += sorted(samples["index"])[::4]
    assert len({*trained}) == 3 * BATCH, "none twice, also not after the restart"
    assert all(map(verl_stream_jobs.is_useful, trained))
    own = verl_job(*SWITCHING, *COMMON, *reference, "trainer.v1.trainer_mode=replayed_sync")
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        assert [step[name] for step in steps] == pytest.approx(own.series(name), rel=1e-4, abs=1e-6), name
    assert steps[0]["actor/kl_loss"] < 1e-6 < steps[2]["actor/kl_loss"]
    compare_weights(flat, gone_on, own)


def compare_with_verl(verl_job, first: Path, streamed: jobs.Job, common: tuple[str, ...]) -> None:
    """verl's own trainer gets the samples, all of a step at once."""
    own = verl_job(*SWITCHING, *common, "trainer.v1.trainer_mode=replayed_sync")
    # Advantages are about 1 and add up to 0, so that a loss is what rounding leaves of them.
    for name, rounding in {"actor/pg_loss": 1e-5, "actor/grad_norm": 1e-6, "critic/score/mean": 1e-6}.items():
        assert streamed.series(name) == pytest.approx(own.series(name), rel=1e-4, abs=rounding), name
    compare_weights(first, streamed, own)


@pytest.mark.long
def test_a_job_goes_on_from_its_checkpoint(verl_job, own_modules, flat, tmp_path):
    """Two steps and, from their checkpoint, a third, with useless groups, a reference policy and validation; verl's own
    trainer then makes the three in one go."""
    learning = (
        *COMMON, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=1",
        f"{REF}.log_prob_micro_batch_size_per_gpu=4", f"{REF}.fsdp_config.model_dtype=fp32",  # verl's is bfloat16
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"trainer.experiment_name={tmp_path.name}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )  # fmt: skip
    common = (
        *SWITCHING, "--steps", "12", *learning, *STREAM, "trainer.val_before_train=true", "trainer.test_freq=2",
        "algorithm.filter_groups.enable=true", f"reward.custom_reward_function.path={verl_rewards.__file__}",
        "reward.custom_reward_function.name=half",
    )  # fmt: skip
    begun = verl_job(*common, SEPARATE, "trainer.total_training_steps=2", "trainer.save_freq=2")
    gone_on = verl_job(
        *common, HYBRID, "trainer.total_training_steps=3", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={begun.out}/global_step_2",
    )  # fmt: skip
    own = verl_job(*SWITCHING, *learning, "trainer.v1.trainer_mode=replayed_sync")
    steps = [step for job in (begun, gone_on) for step in job.steps if "actor/grad_norm" in step]
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        assert [step[name] for step in steps] == pytest.approx(own.series(name), rel=1e-4, abs=1e-6), name
    assert steps[0]["actor/kl_loss"] < 1e-6 < steps[2]["actor/kl_loss"]
    compare_weights(flat, gone_on, own)
    trained: list[int] = []
    for step in (1, 2, 3):
        _, _, samples = torch.load(verl_stream_jobs.get_path(step), weights_only=False)
        trained += (prompts := sorted(samples["index"])[::4])
        assert len({*prompts}) == BATCH and len(samples) == 4 * BATCH
    # They go on in the order of the data, whatever was interrupted, and each useless one is replaced by the next.
    useful = [i for i in range(96) if verl_rewards.draw(f"prompt {i}") >= 0.5]
    assert trained == useful[: 3 * BATCH]
    useless = [step["training/filter_groups/evicted_samples"] for step in steps]
    assert sum(useless) == useful[3 * BATCH - 1] + 1 - 3 * BATCH
    before, after, resumed, last = (
        step[VALIDATED] for job in (begun, gone_on) for step in job.steps if VALIDATED in step
    )
    assert after == resumed and len({before, after, last}) == 3, "of the weights of their step"


def compare_weights(first: Path, job: jobs.Job, own: jobs.Job) -> None:
    """The third checkpoints of two jobs that began with ``first``."""
    (path,) = first.glob("*.safetensors")
    before, ours, theirs = load_file(path), load_weights(job), load_weights(own)
    for name, weight in theirs.items():
        moved = (weight - before[name]).norm()
        assert moved > 0 and (ours[name] - weight).norm() <= 1e-4 * moved, name
