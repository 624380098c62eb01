"""Rewards with limits in verl: its manager in a loop of the test's own, with a ledger that is no actor."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.reward_score import default_compute_score
from verl_grpo import run_cpu

from reward_sandbox import programs
from reward_sandbox.limits import CaseRun, LimitRules
from sglang_pat.integrations.verl import reward_ledger, rewards, trainers
from sglang_pat.integrations.verl.fields import MISSING
from sglang_pat.integrations.verl.missing_rewards import METRIC
from sglang_pat.integrations.verl.reward_ledger import RewardLedger, TrainerLedger, make_metrics
from sglang_pat.integrations.verl.reward_programs import ProgramScorer

from . import verl_reward_jobs, verl_rewards
from .jobs import ROOT, SWITCHING, Job
from .test_verl import GREEDY

pytestmark = pytest.mark.integration

RULES = LimitRules()
SETTING = "reward.reward_manager.name=sglang_pat"
STREAM = (
    "trainer.v1.trainer_mode=sglang_pat_stream", "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=on_cpu.verl_gloo",
    "ray_kwargs.ray_init.num_gpus=4",
)  # fmt: skip


def make_config(*words: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [SETTING, *words])


class Local:
    """A ledger's handle, as Ray gives one; its methods run in the test's loop.

    Attributes:
        actor: set anew, it has died.
        managers: that use it.
    """

    def __init__(self, rules: LimitRules = RULES) -> None:
        self.actor = RewardLedger(rules)
        self.managers: list[rewards.PooledRewardManager] = []

    def make_manager(self, function, *words: str, **named: Any) -> rewards.PooledRewardManager:
        self.managers.append(rewards.PooledRewardManager(make_config(*words), Texts(), function, **named))
        return self.managers[-1]

    async def close(self) -> None:
        for manager in self.managers:
            if manager._watch is not None:
                manager._watch.cancel()
            await manager._pool.close()

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self.actor, name)(*args)))


class Texts:
    """A tokenizer: a token is a letter."""

    def decode(self, tokens, **_) -> str:
        return "".join(map(chr, tokens.tolist()))


@pytest.fixture
async def ledger(monkeypatch) -> AsyncIterator[Local]:
    found = Local()
    monkeypatch.setattr(reward_ledger, "connect", lambda rules: found)
    yield found
    await found.close()


def make_sample(text: str, uid: str = "one", session: int = 0, source: str = "mine", truth: str = "", step=1, **fields):
    """A sample as verl's agent loop gives one to a reward worker."""
    response = torch.tensor([[ord(letter) for letter in text]])
    batch = TensorDict({"responses": response, "attention_mask": torch.ones_like(response)}, batch_size=1)
    values = {
        "uid": uid, "session_id": session, "global_steps": step, "data_source": source,
        "reward_model": {"ground_truth": truth}, "extra_info": {}, "tool_extra_fields": fields,
        "response_len": len(text), "__num_turns__": 2,
    }  # fmt: skip
    return DataProto(batch=batch, non_tensor_batch={name: np.array([value]) for name, value in values.items()})


def behave(data_source, solution_str, ground_truth, extra_info, **_):
    """A reward function that does what the response says."""
    match solution_str:
        case "hang":
            threading.Event().wait()
        case "raise":
            raise KeyError("x")
        case "more":
            return {"score": 0.5, "acc": True, "note": extra_info["num_turns"]}
    return float(solution_str)


async def test_scores_and_failures(ledger):
    manager = ledger.make_manager(behave, "+reward.sglang_pat={limit: 0.5, failed_reward: -1, processes: 2}")
    texts = ["0.25", "hang", "raise", "nan"]
    found = await asyncio.gather(*(manager.run_single(make_sample(text)) for text in texts))
    assert [one["reward_score"] for one in found] == [0.25, -1, -1, -1]
    assert found[0]["reward_extra_info"] == {"acc": 0.25}
    more = await manager.run_single(make_sample("more"))
    assert more == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "acc": True, "note": 2}}
    failed = await manager.run_single(make_sample("raise"))
    assert failed["reward_extra_info"] == {"score": -1, "acc": -1, "note": -1, MISSING: True}, "names as of the others"
    metrics = make_metrics(await ledger.actor.take_figures())
    assert {name: metrics[f"reward/{name}"] for name in ("responses", "failed/late", "failed/raised")} == {
        "responses": 6, "failed/late": 1, "failed/raised": 2
    }  # fmt: skip
    assert metrics["reward/failed/invalid"] == 1 and metrics["reward/failed/died"] == metrics["reward/stopped"] == 0
    assert metrics["reward/seconds/max"] >= 0.5 > metrics["reward/seconds/scoring"] > 0.08
    assert make_metrics(await ledger.actor.take_figures())["reward/responses"] == 0


async def test_what_runs_for_a_prompt_that_is_dropped_is_ended(ledger):
    manager = ledger.make_manager(behave, "+reward.sglang_pat={processes: 1, limit: 600}")
    dropped = [asyncio.create_task(manager.run_single(make_sample("hang", "left", session))) for session in range(2)]
    kept = asyncio.create_task(manager.run_single(make_sample("0.5", "kept")))
    await asyncio.sleep(0)
    await ledger.actor.drop([(1, "left")])
    assert [await one for one in dropped] == 2 * [{"reward_score": 0.0, "reward_extra_info": {MISSING: True}}]
    assert (await kept)["reward_score"] == 0.5, "a process is free again"
    assert (await manager.run_single(make_sample("hang", "left", 2)))["reward_score"] == 0.0, "one that ends later"
    assert (await manager.run_single(make_sample("0.5", "left", step=2)))["reward_score"] == 0.5, "in a later step"


async def test_ends_are_kept_for_the_step_that_asks():
    """Who tells of them: test_verl_missing_rewards.py."""
    ledger = RewardLedger(RULES)
    await ledger.note_end((2, "two"), 1, 3)  # nobody asks
    assert await ledger.take_ends(2) == {}
    await ledger.note_end((2, "two"), 1, 4)
    await ledger.note_end((1, "two"), 0, 4)
    assert await ledger.take_ends(2) == {"two": {1: 4}}
    assert await ledger.take_ends(2) == {}
    await ledger.note_end((2, "late"), 0, 4)
    assert await ledger.take_ends(3) == {}, "a prompt that was passed over is started again with its uid"


async def test_a_judge_gets_its_address_and_tokenizer(ledger):
    def judge(reward_router_address, reward_model_tokenizer, **_):
        return {"score": 1.0, "asked": f"{reward_router_address} {reward_model_tokenizer.decode(torch.tensor([104]))}"}

    config = make_config()
    manager = rewards.PooledRewardManager(
        config=config,
        tokenizer=Texts(),
        compute_score=judge,
        reward_router_address="here",
        reward_model_tokenizer=Texts(),
    )
    assert (await manager.run_single(make_sample("x")))["reward_extra_info"]["asked"] == "here h"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
async def test_a_function_of_a_file_as_verl_loads_it(ledger, tmp_path, start):
    (file := tmp_path / "mine.py").write_text(
        "def score(solution_str, more, **_):\n    return len(solution_str) + more\n"
    )
    config = make_config(
        f"reward.custom_reward_function.path={file}", "reward.custom_reward_function.name=score",
        "+reward.custom_reward_function.reward_kwargs={more: 0.5}", f"+reward.sglang_pat={{start: {start}}}",
    )  # fmt: skip
    manager = load_reward_manager(config, Texts())
    ledger.managers.append(manager)
    assert isinstance(manager, rewards.PooledRewardManager), "verl finds it by its name"
    assert (await manager.run_single(make_sample("four")))["reward_score"] == 4.5


# -- programs --------------------------------------------------------------------------------------------------


class Programs:
    """Stands in for a sandbox: a response says how long its cases take; one of 9 s and more is never right."""

    @staticmethod
    def get_keys(ground_truth):
        if not ground_truth:
            raise ValueError("these are no test cases")
        return ground_truth.split()

    @staticmethod
    def score_response(response, ground_truth, sandbox, time_limits, all_or_nothing, maximum):
        assert sandbox == "a sandbox" and maximum == 30 and not all_or_nothing
        runs = [
            CaseRun(key, "right" if float(seconds) < min(9, limit) else "cut", float(seconds), limit)
            for key, seconds, limit in zip(ground_truth.split(), response.split(), time_limits, strict=True)
        ]
        value = sum(run.outcome == "right" for run in runs) / len(runs)
        return programs.Score(value=value, outcome="", runs=tuple(runs))

    @staticmethod
    def run_again(response, ground_truth, index, sandbox, maximum):
        seconds = float(response.split()[index])
        outcome, seconds = ("right", seconds) if seconds < 9 else ("cut", maximum)
        return CaseRun(ground_truth.split()[index], outcome, seconds, maximum, rerun=True)


@pytest.fixture
def sandboxed(monkeypatch):
    for name in ("get_keys", "score_response", "run_again"):
        monkeypatch.setattr(programs, name, getattr(Programs, name))
    monkeypatch.setattr(rewards, "make_sandbox", lambda setting, where: "a sandbox")


async def test_programs_go_to_the_sandbox(ledger, sandboxed):
    manager = ledger.make_manager(default_compute_score)
    found = await manager.run_single(make_sample("1 20", source="taco", truth="a b"))
    assert found == {"reward_score": 0.5, "reward_extra_info": {"acc": 0.5}}
    assert (await manager.run_single(make_sample("1", source="apps")))["reward_score"] == 0.0, "it has no test cases"
    metrics = make_metrics(await ledger.actor.take_figures())
    assert metrics["reward/responses"] == 2 and metrics["reward/failed/invalid"] == 1
    assert metrics["reward/cases/cases"] == 2 and metrics["reward/cases/cut"] == 1
    assert metrics["reward/seconds/sandbox"] > 0 and "reward/seconds/scoring" not in metrics


async def test_other_functions_get_their_programs_themselves(ledger, sandboxed, tmp_path):
    (file := tmp_path / "mine.py").write_text("def compute_score(**_):\n    return 0.75\n")
    manager = load_reward_manager(make_config(f"reward.custom_reward_function.path={file}"), Texts())
    ledger.managers.append(manager)
    assert (await manager.run_single(make_sample("1", source="taco", truth="a")))["reward_score"] == 0.75


async def test_limits_are_those_of_all_workers_and_outlive_their_owner(ledger, sandboxed):
    rules = LimitRules(rerun_share=1.0)
    ledger.actor = RewardLedger(rules)
    pool = {"processes": 1, "failed_reward": 0.0}
    one, other = (ProgramScorer("a sandbox", rules, False, ledger, pool) for _ in range(2))
    await one.score("4", "a")
    await other.score("5 1", "a b")
    assert (await ledger.actor.get_limits(["a", "b", "c"]))[1] == [7.5, 2.0, 30.0]
    assert (await one.score("9.5", "a")).value == 0.0, "cut by what the other has learnt"
    await asyncio.gather(*one._reruns)
    life, state = await ledger.actor.get_limits_state()
    assert (state["reruns"], state["right_reruns"]) == (1, 0)
    ledger.actor = RewardLedger(rules)  # it has died
    await one.score("1", "c")
    await other.score("1", "c")
    again = await ledger.actor.get_limits_state()
    assert again[0] != life and again[1]["anchors"] == {"a": 5.0, "b": 1.0, "c": 1.0}
    assert (again[1]["reruns"], again[1]["right_reruns"]) == (1, 0)


async def test_a_program_that_waits_gets_the_limits_of_its_turn(ledger, sandboxed):
    scorer = ProgramScorer("a sandbox", RULES, False, ledger, {"processes": 1, "failed_reward": 0.0})
    found = await asyncio.gather(*(scorer.score(seconds, "a") for seconds in ("4", "1", "8")))
    assert [reward.value for reward in found] == [1.0, 1.0, 0.0], "the last one had 6 s"


async def test_all_that_ask_a_new_ledger_at_once_get_what_was_learnt(ledger, sandboxed):
    ledger.actor = RewardLedger(rules := LimitRules(rerun_share=0))
    scorer = ProgramScorer("a sandbox", rules, False, ledger, {"processes": 1, "failed_reward": 0.0})
    await scorer.score("4", "a")
    ledger.actor = RewardLedger(rules)
    found = await asyncio.gather(*(scorer._get_limits(["a"]) for _ in range(3)))
    assert found == [{"time_limits": [6.0]}] * 3


def test_the_trainer_tells_what_it_knows_to_a_ledger_that_is_new(tmp_path, monkeypatch):
    """What a checkpoint has, before the first reward; and in one that is made after a death, what was known before."""
    local = Local()
    monkeypatch.setattr(Local, "__getattr__", lambda self, name: SimpleNamespace(remote=getattr(self.actor, name)))
    monkeypatch.setattr(reward_ledger, "connect", lambda rules: local)
    monkeypatch.setattr(reward_ledger, "ray", SimpleNamespace(get=asyncio.run))
    trainer = TrainerLedger(RULES)
    asyncio.run(local.actor.record_runs([CaseRun("a", "right", 4.0, 30.0)]))
    assert trainer.take_metrics()["reward/incomplete"] == 0
    local.actor = RewardLedger(RULES)  # it has died
    asyncio.run(local.actor.record_runs([CaseRun("b", "right", 2.0, 30.0)]))
    trainer.save(tmp_path / "limits.json")
    assert [trainer.take_metrics()["reward/incomplete"] for _ in range(2)] == [1, 0]
    local.actor = RewardLedger(RULES)  # of another job
    TrainerLedger(RULES).load(tmp_path / "limits.json")
    assert asyncio.run(local.actor.get_limits(["a", "b", "c"]))[1] == [6.0, 3.0, 30.0]
    assert "reward/cases/cases" not in make_metrics(asyncio.run(local.actor.take_figures())), "nothing has run yet"


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("{limits: 3}", "reward.sglang_pat has no setting 'limits'; choose from limit, failed_reward, processes"),
        ("3", "reward.sglang_pat is 3, must be settings by name, e.g. {limit: 30}"),
        ("{limit: soon}", "reward.sglang_pat.limit is 'soon', must be a number"),
        ("{limit: -1}", "reward.sglang_pat: limit is -1, must be seconds above 0"),
        ("{processes: true}", "reward.sglang_pat.processes is True, must be a number"),
        ("{start: thread}", "reward.sglang_pat: start is 'thread', must be fork or spawn"),
        ("{all_or_nothing: 1}", "reward.sglang_pat.all_or_nothing is 1, must be true or false"),
        ("{time_limits: {max: 3}}", "reward.sglang_pat.time_limits has no setting 'max'; choose from minimum, maximum"),
        ("{time_limits: {maximum: 1}}", "reward.sglang_pat: limits of 2.0 to 1 seconds"),
    ],
)
def test_refused_in_one_line(setting, line):
    with pytest.raises(ValueError) as refused:
        rewards.check(make_config(f"+reward.sglang_pat={setting}"))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_settings_without_the_manager_are_refused():
    with pytest.raises(ValueError, match="^reward.sglang_pat is given and reward.reward_manager.name is 'naive', must"):
        rewards.check(make_config("reward.reward_manager.name=naive", "+reward.sglang_pat={limit: 3}"))
    rewards.check(make_config("reward.reward_manager.name=naive"))


def test_a_sandbox_that_does_not_work_ends_a_job_that_needs_one(monkeypatch):
    def make_sandbox(setting, where):
        raise ValueError(f"{where} is {setting}, which does not work here")

    monkeypatch.setattr(rewards, "make_sandbox", make_sandbox)
    config = make_config("+reward.sglang_pat={sandbox: bubblewrap}")
    with pytest.raises(ValueError, match="^reward.sglang_pat.sandbox is bubblewrap, which does not work here$"):
        rewards.check_sandbox(config, ["openai/gsm8k", "taco"])
    rewards.check_sandbox(config, ["openai/gsm8k"])
    rewards.check_sandbox(make_config("reward.custom_reward_function.path=mine.py"), ["taco"])
    rewards.check_sandbox(make_config("reward.sandbox_fusion.url=http://here"), ["taco"])
    rewards.check_sandbox(make_config("reward.reward_manager.name=naive"), ["taco"])


def test_it_ends_when_its_data_are_loaded(monkeypatch):
    """All of verl's trainers load their data before a model: test_verl_contract.py."""
    monkeypatch.setattr(rewards, "check_sandbox", lambda config, sources: asked.append((config, sources)))
    asked: list[tuple[Any, set[str]]] = []
    train = SimpleNamespace(dataframe=datasets.Dataset.from_dict({"data_source": ["taco", "taco", "mine"]}))
    monkeypatch.setattr(PPOTrainer, "_init_dataloader", lambda self: None)
    trainer: Any = object.__new__(trainers.AdaptiveSync)
    trainer.config, trainer.train_dataset, trainer.val_dataset = "its", train, object()
    trainer._init_dataloader()
    assert asked == [("its", {"taco", "mine"})]


# -- jobs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewarded(verl_job, monkeypatch):
    """Runs a job with a reward function of :mod:`tests.integration.verl_reward_jobs`; gives what it noted, too."""

    def run(function: str, what: str, *words: str) -> tuple[Job, list[dict[str, Any]]]:
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", verl_reward_jobs.__name__)
        monkeypatch.setenv("PAT_TEST_REWARDS", what)
        job = verl_job(
            *SWITCHING, SETTING, "trainer.v1.trainer_mode=sglang_pat_sync",
            f"reward.custom_reward_function.path={verl_reward_jobs.__file__}",
            f"reward.custom_reward_function.name={function}", *words,
        )  # fmt: skip
        return job, [json.loads(line) for line in (job.out / "rewards.jsonl").read_text().splitlines()]

    return run


@pytest.mark.long
def test_a_step_waits_only_for_rewards_that_it_keeps(rewarded):
    """A reward takes 5 s: it is computed for kept responses alone, and then the step goes on at once."""
    job, noted = rewarded(
        "sleep", "noted", "--batch", "8", "--samples", "1", "--response", "512", "--steps", "6",
        "data.gen_batch_size=1", "trainer.total_training_steps=3", "+reward.sglang_pat={{processes:16}}",
        "+trainer.v1.sglang_pat_sync.tail_batching=strict", "+trainer.v1.sglang_pat_sync.eta_prompts=1.5",
    )  # fmt: skip
    assert len(job.steps) == 3
    begun: list[int] = []
    ends: list[float] = []
    for line in noted:
        if line["what"] == "begun":
            begun.append(line["prompt"])
        elif line["what"] == "ended":
            ends.append(line["time"])
        else:
            # More may end by themselves before they would be stopped, most of all where the trainer has to wait for a
            # core: their rewards are given up then.
            assert len(ends) == 8 <= len(begun) < 12
            assert line["time"] - max(ends) <= 1.0
            begun, ends = [], []
    assert not begun and sum(job.series("reward/stopped")) == 8
    assert max(job.series("training/tail_batching/reward_seconds")) <= verl_reward_jobs.SECONDS + 1.0


@pytest.mark.long
def test_under_verls_own_manager_a_step_is_decided_when_responses_end(rewarded):
    """The step waits for rewards then, which take 5 s, and no stopped response is scored."""
    job, noted = rewarded(
        "sleep", "noted", "--batch", "8", "--samples", "1", "--response", "512", "--steps", "6",
        "data.gen_batch_size=1", "trainer.total_training_steps=2", "reward.reward_manager.name=naive",
        "+trainer.v1.sglang_pat_sync.tail_batching=strict", "+trainer.v1.sglang_pat_sync.eta_prompts=1.5",
    )  # fmt: skip
    assert min(job.series("training/tail_batching/reward_seconds")) >= verl_reward_jobs.SECONDS / 2
    # 12 are started in each step, and some more than 8 may end before the others are stopped.
    assert 16 <= sum(line["what"] == "begun" for line in noted) < 24
    assert not any(name.startswith("reward/") for name in job.steps[0]), "it has no limits to tell of"


def read_trained(job: Job) -> list[dict[str, list[dict[str, Any]]]]:
    """What each step was trained on: lines of its dump, by group."""
    steps = []
    for path in sorted((job.out / "batches").glob("*.jsonl")):
        groups: dict[str, list[dict[str, Any]]] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            if not (uid := line["uid"].partition("_")[0]).startswith("pad"):
                groups.setdefault(uid, []).append(line)
        steps.append(groups)
    return steps


FILTERED = (
    "trainer.v1.trainer_mode=sglang_pat_sync", "+trainer.v1.sglang_pat_sync.tail_batching=strict",
    "+trainer.v1.sglang_pat_sync.eta_prompts=1.25", "algorithm.filter_groups.enable=true", "data.gen_batch_size=1",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("words", [FILTERED, STREAM], ids=["a filter", "streamed, without a filter"])
def test_nothing_is_trained_on_without_a_reward(verl_job, words):
    """One of five rewards fails.  With the filter no group of a batch differs by that only."""
    job = verl_job(
        *SWITCHING, SETTING, f"reward.custom_reward_function.path={verl_rewards.__file__}", "--steps", "12",
        "reward.custom_reward_function.name=half_of_most", "trainer.total_training_steps=3",
        "trainer.rollout_data_dir={out}/batches", "+reward.sglang_pat={{processes:4}}", *words,
    )  # fmt: skip
    assert len(job.steps) == 3 and sum(job.series("reward/failed/raised")) > 0
    for step, groups in zip(job.steps, read_trained(job), strict=True):
        trained = [line for lines in groups.values() for line in lines]
        assert not any(verl_rewards.fails(line["output"]) for line in trained)
        assert step[METRIC] == 16 - len(trained) and min(map(len, groups.values())) >= 2
        differ = [len({line["score"] for line in lines}) > 1 for lines in groups.values()]
        assert math.isfinite(step["actor/grad_norm"]) and (step["actor/grad_norm"] > 0) == any(differ)
        if words is FILTERED:
            assert len(groups) == 4 and all(differ)
    assert sum(job.series(METRIC)) > 0


@pytest.mark.long
def test_processes_that_are_killed_change_no_reward(rewarded, tmp_path, monkeypatch):
    """One that computes a reward, and the ledger's; TensorBoard has the parts of the time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    job, noted = rewarded(
        "count_vowels", "killed", *GREEDY, "trainer.logger=[console,file,tensorboard]",
        "trainer.rollout_data_dir={out}/batches",
    )  # fmt: skip
    assert [line["what"] for line in noted if line["what"] != "batch"] == [
        "a process is killed", "the ledger is killed"
    ]  # fmt: skip
    for step in (1, 2, 3):
        lines = [json.loads(line) for line in (job.out / "batches" / f"{step}.jsonl").read_text().splitlines()]
        assert len(lines) == 16
        for line in lines:
            assert line["score"] == pytest.approx(verl_reward_jobs.share_of_vowels(line["output"]))
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("responses", "stopped", "seconds/waiting", "seconds/scoring", "seconds/max", "failed/died"):
        found = [event.value for event in events.Scalars(f"reward/{name}")]
        assert len(found) == 3 and found == pytest.approx(job.series(f"reward/{name}"))
    assert job.series("reward/responses")[0] == job.series("reward/responses")[2] == 16
    assert sum(job.series("reward/failed/died")) == 0
    assert 0 < job.series("reward/seconds/scoring")[0] <= job.series("reward/seconds/max")[0]


@pytest.mark.long
def test_a_job_goes_on_with_the_limits_that_another_has_learnt(rewarded, tmp_path):
    """Programs in the sandbox, whose limits outlive two deaths of the ledger, and then the job."""
    rows = [row | {"data_source": "codecontests"} for row in run_cpu.rows([f"Write program {n}." for n in range(48)])]
    for row in rows:
        row["reward_model"]["ground_truth"] = json.dumps(verl_reward_jobs.TASK)
    pandas.DataFrame(rows).to_parquet(data := tmp_path / "programs.parquet")
    sizes = "--batch", "16", "--samples", "1", "--steps", "3"
    limits = "{{time_limits:{{minimum:0.5,maximum:4,rerun_share:0}},processes:4}}"
    words = (
        *sizes, "reward.custom_reward_function.path=null", f"+reward.sglang_pat={limits}", f"data.train_files={data}",
        f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto", "trainer.save_freq=1",
    )  # fmt: skip
    first, noted = rewarded("none", "programs", *words, "trainer.total_training_steps=2")
    whats = [line["what"] for line in noted]
    assert [what for what in whats if what.endswith("killed")] == [
        "a sandbox is killed", "the ledger is killed", "the ledger is killed"
    ]  # fmt: skip
    saved = json.loads((tmp_path / "global_step_2" / trainers.LIMITS_FILE).read_text())
    assert len(saved["anchors"]) == 2
    second, noted_later = rewarded("none", "programs", *words)
    assert (len(first.steps), len(second.steps)) == (2, 1)
    begin, after_a_death, resumed = first.steps + second.steps
    for step in (begin, after_a_death, resumed):
        assert step["critic/score/mean"] == 0.875
    learnt = noted[whats.index("batch") :] + noted_later
    limits = [line["limit"] for line in learnt if line["what"] == "second case"]
    assert len(limits) >= 2 * 16
    assert 1.5 <= min(limits) <= max(limits) < 4, "also for the first program after a death, and of the second job"
    assert [step["reward/incomplete"] for step in (begin, after_a_death, resumed)] == [0, 1, 0]
    for step in (begin, resumed):
        assert (step["reward/responses"], step["reward/cases/right"], step["reward/cases/cut"]) == (16, 28, 4)
        assert "reward/cases/wrong_cuts" not in step, "nothing was run again"
    assert begin["reward/cases/cut_at_maximum"] >= 1 and "reward/cases/cut_at_maximum" not in resumed
    assert resumed["reward/cases/wrong_cuts_high"] == 4
