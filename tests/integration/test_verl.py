"""verl's own trainer with ``rollout.name=sglang_pat``; 2 ranks, one engine, GRPO."""

from __future__ import annotations

import itertools
import json
import math
from importlib.metadata import version

import pytest

from . import verl_rewards, verl_routers
from .jobs import SWITCHING

pytestmark = pytest.mark.integration

GREEDY = ("--batch", "16", "--samples", "1", "actor_rollout_ref.rollout.top_k=1")
"""One greedy response a prompt: the loss of a group of equal ones would be 0."""


def test_each_step_switches_and_trainer_and_engine_agree(verl_job):
    job = verl_job(*GREEDY, *SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == 3 and job.switches("decisions.0.jsonl") >= 3
    assert min(job.series("response_length/max")) >= 160
    assert job.tells_of_the_engine()
    for step in job.steps:
        assert step["rollout/tokens/tp1"] > 0 and step["rollout/tokens/tp2"] > 0
        assert step["training/rollout_probs_diff_max"] <= 1e-6
        by_degree = [step[f"training/rollout_probs_diff_max/tp{tp}"] for tp in (1, 2)]
        assert max(by_degree) == pytest.approx(step["training/rollout_probs_diff_max"])
        tokens = step["rollout/tokens/tp1"] + step["rollout/tokens/tp2"]
        assert tokens == pytest.approx(16 * step["response_length/mean"])


@pytest.mark.long
@pytest.mark.skipif(version("sglang") == "0.5.23", reason="its ServerArgs is no dataclass: verl 0.9.1 cannot start it")
def test_reward_and_loss_are_those_of_stock_sglang(verl_job):
    """Greedy, same seed.  Losses are sums in the order in which responses ended: equal but for rounding.

    With Adam's own epsilon two jobs of stock SGLang part, too: where a gradient is nearly 0, the sign of its rounding
    error moves a weight by the whole learning rate, and by the second step other tokens come.
    """
    epsilon = "actor_rollout_ref.actor.optim.override_optimizer_config={{eps:0.001}}"  # a gradient's usual size
    ours = verl_job(*GREEDY, epsilon, *SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    stock = verl_job(*GREEDY, epsilon, "--rollout", "sglang")
    assert max(stock.series("training/rollout_probs_diff_max")) <= 1e-6
    for name in ("response_length/mean", "response_length/max", "response_length/min"):
        assert ours.series(name) == stock.series(name)
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert ours.series(name) == pytest.approx(stock.series(name), rel=1e-5), name
    assert len({*ours.series("actor/grad_norm")}) == 3, "something is learnt"


@pytest.mark.long
def test_the_trainer_gets_the_routed_experts_of_a_mixture(verl_mixture_job):
    """verl counts them: of all tokens of a response but the last.  Only its engines with Megatron and VeOmni, which
    need GPUs, replay them."""
    rollout = "actor_rollout_ref.rollout"
    job = verl_mixture_job(
        *GREEDY, *SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync",
        f"{rollout}.enable_rollout_routing_replay=true", f"{rollout}.moe_load_balance_metrics_interval=1",
    )  # fmt: skip
    assert len(job.steps) == 3
    for step in job.steps:
        assert step["rollout/switches"] > 0 and step["rollout/tokens/tp2"] > 0
        assert step["training/rollout_probs_diff_max"] <= 1e-6
        tokens = 16 * (step["response_length/mean"] - 1)
        assert step["rollout/moe/routed_expert_assignments"] == pytest.approx(tokens * 3 * 2)


@pytest.mark.long
def test_requests_cut_in_mid_decode_go_on_with_new_weights(verl_job):
    # verl looks every two seconds whether a batch is there.  The three others that it has sent take the engine longer:
    # a replica decodes four requests at once.  It waits for what is two steps old and trains on the oldest first, so
    # the four steps see every response that the first update cut.
    sampler = "trainer.v1.sampler.max_off_policy"
    job = verl_job(
        *SWITCHING, "--response", "320", "--steps", "4", "trainer.v1.trainer_mode=sglang_pat_colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=3", f"{sampler}_threshold=3", f"{sampler}_strategy=wait",
        "actor_rollout_ref.rollout.max_num_seqs=4",
    )  # fmt: skip
    assert len(job.steps) == 4
    spans = job.series("training/off_policy/trajectory_spans/max")
    assert max(spans) >= 2, "a response has tokens of two versions of the weights"
    assert all(math.isfinite(loss) for loss in job.series("actor/pg_loss"))


@pytest.mark.long
def test_engines_that_have_gpus_of_their_own(verl_job, monkeypatch):
    """``separate_async``: the trainer's weights come to the engine while it generates."""
    # At level INFO verl 0.9.1 dies of a line of its own log if hybrid_engine is false.
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    job = verl_job(
        *SWITCHING, "--response", "320", "trainer.v1.trainer_mode=sglang_pat_separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1", "trainer.v1.sampler.max_off_policy_threshold=4",
        "actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1", f"{engine}.backend=gloo",
        f"{engine}.custom_backend_module=on_cpu.verl_gloo", "ray_kwargs.ray_init.num_gpus=4",
    )  # fmt: skip
    assert len(job.steps) == 3 and job.switches("decisions.0.jsonl") >= 1
    assert max(job.series("training/off_policy/trajectory_spans/max")) >= 2
    assert all(math.isfinite(loss) for loss in job.series("actor/pg_loss"))


@pytest.mark.long
def test_the_name_sglang_with_settings_is_this_engine(verl_job):
    """The configuration says it: the variable ``SGLANG_PAT`` is not handed on to a Ray cluster that runs already."""
    settings = "{{base_tp:1,policy:threshold,switch_at:12,log:{out}/decisions.jsonl}}"
    own = f"+actor_rollout_ref.rollout.engine_kwargs.sglang_pat={settings}"
    job = verl_job(*GREEDY, "--rollout", "sglang", "--steps", "2", own)
    assert len(job.steps) == 2 and job.switches("decisions.0.jsonl") >= 2


@pytest.mark.long
def test_tail_batching(verl_job, tmp_path):
    """Prompts that would hold up a step are stopped and get a step of their own, here in a job that goes on from the
    checkpoint of another."""
    strict = (
        *SWITCHING, "--response", "512", "--steps", "4", "trainer.v1.trainer_mode=sglang_pat_sync",
        "data.gen_batch_size=1", "data.shuffle=false", "+trainer.v1.sglang_pat_sync.tail_batching=strict",
        "+trainer.v1.sglang_pat_sync.eta_prompts=1.5", f"trainer.default_local_dir={tmp_path}",
        "trainer.resume_mode=auto", "trainer.save_freq=1",
    )  # fmt: skip
    first, second = verl_job(*strict, "trainer.total_training_steps=2"), verl_job(*strict)
    assert len(first.steps) == len(second.steps) == 2
    name = "training/tail_batching/"
    assert first.series(f"{name}long_round") == [0, 0] and max(first.series(f"{name}stopped_prompts")) >= 1
    assert first.series(f"{name}waiting_prompts")[-1] == 4, "a batch of them"
    assert second.series(f"{name}long_round")[0] == 1 and second.series(f"{name}waiting_prompts")[0] == 0
    for job in (first, second):
        assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
        assert max(job.series("training/off_policy/trajectory_spans/max")) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "long_rounds", "waiting"),
    [({"tail_batching": "reorder"}, [0, 0, 0], [2, 2, 2]), ({"unbiased": "true"}, [0, 0, 1], [2, 4, 0])],
    ids=["reorder", "unbiased"],
)
def test_tail_batching_in_other_ways(verl_job, options, long_rounds, waiting):
    where = "+trainer.v1.sglang_pat_sync"
    given = {"tail_batching": "strict", "eta_prompts": "1.5"} | options
    job = verl_job(
        *SWITCHING, "--response", "512", "--steps", "5", "trainer.v1.trainer_mode=sglang_pat_sync",
        "trainer.total_training_steps=3", "data.gen_batch_size=1",
        *(f"{where}.{name}={value}" for name, value in given.items()),
    )  # fmt: skip
    name = "training/tail_batching/"
    assert job.series(f"{name}long_round") == long_rounds and job.series(f"{name}waiting_prompts") == waiting
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert max(job.series("training/off_policy/trajectory_spans/max")) == 1
    assert job.series(f"{name}mean_returned")[0] == pytest.approx(job.series("response_length/mean")[0])


@pytest.mark.long
@pytest.mark.parametrize("share", ["half", "most"])
def test_batches_are_full_however_many_groups_are_useless(verl_job, share):
    """All responses to half of the prompts, or to 80%, have the same reward (DAPO's filter)."""
    job = verl_job(
        *SWITCHING, "--steps", "60", "trainer.v1.trainer_mode=sglang_pat_sync", "trainer.total_training_steps=4",
        "data.shuffle=false", "+trainer.v1.sglang_pat_sync.tail_batching=strict",
        "+trainer.v1.sglang_pat_sync.eta_prompts=1.5", "algorithm.filter_groups.enable=true",
        "trainer.rollout_data_dir={out}/batches", f"reward.custom_reward_function.path={verl_rewards.__file__}",
        f"reward.custom_reward_function.name={share}",
    )  # fmt: skip
    trained: list[str] = []
    for step in range(1, 5):
        lines = (job.out / "batches" / f"{step}.jsonl").read_text().splitlines()
        rewards: dict[str, list[float]] = {}
        for line in map(json.loads, lines):
            rewards.setdefault(line["input"], []).append(line["score"])
        assert [len(group) for group in rewards.values()] == [4] * 4, "a full batch"
        assert all(len({*group}) > 1 for group in rewards.values()), "of use"
        trained += rewards
    assert len({*trained}) == 16, "each prompt once"
    useless = sum(step.get("training/filter_groups/evicted_samples", 0) for step in job.steps)
    assert useless >= {"half": 8, "most": 32}[share]
    name = "training/tail_batching/"
    assert max(job.series(f"{name}oldest_waiting")) <= 8 and 1 in job.series(f"{name}long_round")
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert max(job.series("training/off_policy/trajectory_spans/max")) == 1


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sglang_pat_colocate_async", "sglang_pat_sync"])
def test_the_step_after_one_with_retractions_starts_in_a_higher_degree(verl_job, monkeypatch, mode):
    """64 responses of up to 192 tokens find no room in 2 · 800."""
    monkeypatch.setenv("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", "1")  # after a retraction SGLang soon risks another one
    engine = "actor_rollout_ref.rollout.engine_kwargs.sglang"
    job = verl_job(
        "--batch", "16", "--settings", "{{base_tp:1,policy:threshold,switch_at:1}}", "--steps", "2",
        f"trainer.v1.trainer_mode={mode}", f"{engine}.max_total_tokens=800",
        f"+{engine}.schedule_conservativeness=0.05",
    )  # fmt: skip
    assert len(job.steps) == 2
    starts = [
        line["snapshot"]["start"]
        for line in map(json.loads, (job.out / "decisions.0.jsonl").read_text().splitlines())
        if line["event"] == "decision" and line["snapshot"]["requests"]
    ]
    assert [start for start, _ in itertools.groupby(starts)][:2] == [1, 2]
    (tp1, later_tp1), (_, later_tp2) = (job.series(f"rollout/seconds/tp{tp}") for tp in (1, 2))
    # An asynchronous job may still be at what it carries over when the engine switches.
    assert tp1 > 0 and later_tp1 < later_tp2


@pytest.mark.long
def test_a_mixture_of_experts_switches_in_each_step(verl_mixture_job):
    job = verl_mixture_job(*SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == 3 and min(job.series("rollout/switches")) >= 1
    for tp in (1, 2):
        assert min(job.series(f"rollout/tokens/tp{tp}")) > 0
        assert max(job.series(f"training/rollout_probs_diff_max/tp{tp}")) <= 1e-6


@pytest.mark.long
def test_mixtral_gets_its_weights_by_other_names_than_its_checkpoints(verl_mixtral_job):
    job = verl_mixtral_job(*SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == 3 and min(job.series("rollout/switches")) >= 1
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6


@pytest.mark.long
def test_two_engines_share_the_work(verl_job, tmp_path, monkeypatch):
    two = verl_routers.arguments(verl_routers.Noting, tmp_path, monkeypatch)
    job = verl_job(*two, *SWITCHING, "trainer.v1.trainer_mode=sglang_pat_sync")
    assert len(job.steps) == 3
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert all(job.switches(f"decisions.{engine}.jsonl") >= 1 for engine in range(2))
    statuses = verl_routers.statuses(job)
    assert "load of engine" not in job.log
    assert not any(status["lost"] for status in statuses if status["total_inflight"]), "only when the job ends"
    reports = [report for status in statuses[1:] for report in status["reports"].values()]
    assert {report["gpus"] for report in reports} == {2}, "of each engine, at each look"
    assert {(report["replicas"], report["slots"]) for report in reports} <= {(2, 128), (1, 64)}, "64 a replica"
    assert max(report["running"] for report in reports) > 0


def test_a_wrong_setting_ends_the_job_with_one_line(verl_job):
    job = verl_job("--settings", "{{base_tp:1,polcy:threshold}}", fails=True)
    line = "rollout.engine_kwargs.sglang_pat has no setting 'polcy' (did you mean 'policy'?); choose from"
    assert line in job.log and not job.steps
