"""Samples whose reward is missing, in verl's own computation of a step; its queue is a mapping of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from reward_sandbox.limits import LimitRules
from sglang_pat.integrations.verl import missing_rewards, response_ends, reward_ledger
from sglang_pat.integrations.verl.fields import MISSING, STOPS
from sglang_pat.integrations.verl.missing_rewards import METRIC, choose_keys, judge_given, leave_out
from sglang_pat.integrations.verl.reward_ledger import RewardLedger

from .test_verl_tail_batching import BATCH, EVICTED, TEXTS, World

pytestmark = pytest.mark.integration

WORDS, END, N = 11, 1, 4


class Queue:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        for name in ("kv_batch_get", "kv_batch_put", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))

    def kv_batch_get(self, keys, partition_id, select_fields=None) -> TensorDict:
        names = select_fields or list(self.rows[keys[0]])
        rows = [{name: self.rows[key][name] for name in names if name in self.rows[key]} for key in keys]
        return tu.list_of_dict_to_tensordict(rows)

    def kv_batch_put(self, keys, partition_id, fields, tags=None) -> KVBatchMeta:
        for name in fields.keys():
            values = fields[name].unbind() if isinstance(fields[name], torch.Tensor) else fields.get(name).tolist()
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[{} for _ in keys])

    def kv_clear(self, keys, partition_id) -> None:
        for key in keys:
            del self.rows[key]

    def add(self, rewards: dict[str, Sequence[float | None]], seed: int = 0) -> KVBatchMeta:
        """A batch of responses, one a reward; None: it is missing, and says 0."""
        draw = torch.Generator().manual_seed(seed)
        keys, tags = [], []
        for uid, of_group in rewards.items():
            for session, reward in enumerate(of_group):
                prompt, response = (torch.randint(2, WORDS, (size,), generator=draw) for size in (3, 4 + session))
                mask = torch.ones_like(response)
                scores = torch.zeros(len(response))
                scores[-1] = reward or 0.0
                whole = torch.cat([prompt, response])
                keys.append(f"{uid}_{session}_0")
                self.rows[keys[-1]] = dict(
                    uid=uid, session_id=session, prompts=prompt, responses=response, input_ids=whole,
                    position_ids=torch.arange(len(whole)), response_mask=mask, loss_mask=mask, rm_scores=scores,
                    extra_fields={MISSING: True} if reward is None else {}, num_turns=2,
                )  # fmt: skip
                tags.append({"seq_len": len(whole), "prompt_len": 3, "response_len": len(response)})
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


@pytest.fixture
def queue(monkeypatch) -> Queue:
    return Queue(monkeypatch)


def test_what_is_left_out_and_what_is_told_of_it(queue):
    batch = queue.add({"one": [1, None, 0], "two": [1, 1, 1], "three": [None, 0.5, None], "four": [None] * 3})
    batch.extra_info["temperature"] = 1.0
    metrics: dict[str, Any] = {}
    kept = leave_out(batch, metrics, END)
    assert kept.keys == ["one_0_0", "one_2_0", "two_0_0", "two_1_0", "two_2_0"] == list(queue.rows)
    assert [tag["response_len"] for tag in kept.tags] == [4, 6, 4, 5, 6] and kept.extra_info == {"temperature": 1.0}
    assert metrics == {METRIC: 7}
    assert leave_out(kept, metrics, END) is kept and metrics == {METRIC: 0}


def test_all_parts_of_a_response_go_together():
    assert choose_keys(["a_0_0", "a_0_1", "a_1_0", "a_2_0"], {"a_0_0", "a_0_1"}) == {"a_1_0", "a_2_0"}
    assert choose_keys(["b_0_0", "b_0_1", "c_3_0"], set()) == {"b_0_0", "b_0_1", "c_3_0"}, "verl's own, as it is"


def test_a_batch_of_missing_rewards_alone_is_one_row_that_counts_nothing(queue):
    kept = leave_out(queue.add({"one": [None] * 3}), {}, END)
    assert len(kept) == 1 and kept.tags[0]["is_padding"] and not queue.rows[kept.keys[0]]["loss_mask"].any()
    with pytest.raises(RuntimeError, match="^no response of this step has a reward to train on: the reward function h"):
        missing_rewards.check_some_left([kept, kept])
    missing_rewards.check_some_left([kept, queue.add({"two": [1, 0]})])


# -- the gradient ----------------------------------------------------------------------------------------------

MODES = {
    "token-mean": "sum(mask)", "token-sum": "1", "seq-mean-token-sum": "8", "seq-mean-token-mean": "8",
    "seq-mean-token-sum-norm": "8",
}  # fmt: skip


def make_config(mode: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.actor.loss_agg_mode={mode}", "actor_rollout_ref.actor.entropy_coeff=0.1",
                "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.loss_scale_factor=16",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", f"actor_rollout_ref.rollout.n={N}",
                "algorithm.adv_estimator=grpo", "reward.reward_manager.name=sglang_pat",
            ],
        )  # fmt: skip


def compute_gradient(queue: Queue, batch: KVBatchMeta, mode: str) -> torch.Tensor:
    """The gradient of verl's loss with respect to a table of logits, after its own padding and advantages."""
    config = make_config(mode)
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7)).requires_grad_()
    batch = upsample_batch_to_divisible_size(batch, 2 * N, END)
    for key in batch.keys:
        row = queue.rows[key]
        row["old_log_probs"] = torch.full((len(row["responses"]),), -2.4)
        row["ref_log_prob"] = torch.full((len(row["responses"]),), -2.2)
    PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
    names = ["prompts", "responses", "input_ids", "response_mask", "old_log_probs", "ref_log_prob", "advantages"]
    data = TensorDict(
        {
            name: torch.nested.as_nested_tensor([queue.rows[key][name] for key in batch.keys], layout=torch.jagged)
            for name in names
        },
        batch_size=len(batch),
    )
    counted = sum(int(queue.rows[key]["loss_mask"].sum()) for key in batch.keys)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=counted, global_batch_size=2 * N)
    flat = data["input_ids"].values()
    logs = table[flat].log_softmax(-1)
    chosen = logs.gather(-1, flat.roll(-1).unsqueeze(-1)).squeeze(-1)
    offsets = data["input_ids"].offsets()
    output = {
        "log_probs": torch.nested.nested_tensor_from_jagged(chosen, offsets),
        "entropy": torch.nested.nested_tensor_from_jagged(-(logs.exp() * logs).sum(-1), offsets),
    }
    loss, _ = ppo_loss(omega_conf_to_dataclass(config.actor_rollout_ref.actor), output, data)
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient


REWARDS: dict[str, list[float | None]] = {"one": [1.0, 0.0, 1.0, None], "two": [1.0, 1.0, 0.0, 1.0]}


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_has_nothing_of_a_sample_without_a_reward(queue, mode):
    """The gradient is that of the seven others, divided as for them alone."""
    batch = queue.add(REWARDS)
    before = {key: dict(row) for key, row in queue.rows.items()}
    trained_as_wrong = compute_gradient(queue, batch, mode)
    queue.rows = {key: dict(row) for key, row in before.items()}
    left = compute_gradient(queue, leave_out(batch, {}, END), mode)
    queue.rows = {key: dict(row) for key, row in before.items() if key != "one_3_0"}
    rows = [i for i, key in enumerate(batch.keys) if key != "one_3_0"]
    alone = KVBatchMeta(partition_id="train", keys=[batch.keys[i] for i in rows], tags=[batch.tags[i] for i in rows])
    torch.testing.assert_close(left, compute_gradient(queue, alone, mode))
    queue.rows = {key: dict(row) for key, row in before.items()}
    other = queue.rows["one_3_0"]
    other |= dict(rm_scores=torch.full((7,), 9.0), responses=torch.full((7,), 5), input_ids=torch.full((10,), 5))
    torch.testing.assert_close(left, compute_gradient(queue, leave_out(batch, {}, END), mode))
    assert (left - trained_as_wrong).norm() > 0.1 * left.norm(), "which the mend is about"


@pytest.mark.parametrize("mode", MODES)
def test_it_is_that_of_plain_formulas(queue, mode):
    """GRPO over the rewards that were given, entropy and KL, written down here; the ratio is not clipped."""
    batch = leave_out(queue.add(REWARDS), {}, END)
    rows = [(key, dict(queue.rows[key])) for key in batch.keys]
    ours = compute_gradient(queue, batch, mode)
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7)).requires_grad_()
    total = torch.zeros(())
    tokens = sum(len(row["responses"]) for _, row in rows)
    for key, row in rows:
        given = torch.tensor([reward for reward in REWARDS[key.partition("_")[0]] if reward is not None])
        advantage = (row["rm_scores"].sum() - given.mean()) / (given.std() + 1e-6)
        logs = table[row["input_ids"]].log_softmax(-1)[2:-1]
        chosen = logs.gather(-1, row["responses"].unsqueeze(-1)).squeeze(-1)
        ratio = (chosen + 2.4).exp()
        gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        gained = torch.where(advantage < 0, torch.maximum(gained, 3 * advantage), gained)  # verl's dual clip
        kl = ((-2.2 - chosen).exp() - (-2.2 - chosen) - 1).clamp(-10, 10)  # as verl's
        loss = -gained - 0.1 * -(logs.exp() * logs).sum(-1) + 0.2 * kl
        match mode:
            case "token-mean":
                total = total + loss.sum() / tokens
            case "token-sum":
                total = total + loss.sum()
            case "seq-mean-token-sum":
                total = total + loss.sum() / 8
            case "seq-mean-token-mean":
                total = total + loss.mean() / 8
            case _:
                total = total + loss.sum() / 8 / 16
    (expected,) = torch.autograd.grad(total, table)
    torch.testing.assert_close(ours, expected)


# -- which groups are of use -----------------------------------------------------------------------------------


def make_buffer(kind: type[ReplayBuffer], queue: Queue, batch: KVBatchMeta) -> ReplayBuffer:
    buffer = kind(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=None, max_off_policy_strategy="drop",
        sampler_kwargs={}, refill_fn=print, filter_groups_metric="reward", train_batch_size=2, gen_batch_size=1,
    )  # fmt: skip
    buffer.partitions["train"] = dict(zip(batch.keys, batch.tags, strict=True))
    buffer.finished_keys["train"] = {key.partition("_")[0] for key in batch.keys}
    return buffer


GROUPS: dict[str, list[float | None]] = {
    "equal": [1, 1, 1], "differ": [1, 0, 1], "by a failure": [1, None, 1], "alone": [None, None, 1],
    "none": [None] * 3, "differ beside one": [1, 0, None],
}  # fmt: skip


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_a_filter_sees_only_rewards_that_were_given(queue, kind):
    buffer = make_buffer(kind, queue, queue.add(GROUPS))
    assert buffer._terminal_eviction_reasons(1, "train")[1] == {"equal", "none"}, "verl's own: failures are of use"
    buffer = make_buffer(kind, queue, queue.add(GROUPS))
    judge_given(buffer)
    for _ in range(2):  # at each look
        stale, equal, failed, counts = buffer._terminal_eviction_reasons(1, "train")
        assert (stale, equal, failed) == (set(), {"equal", "by a failure"}, {"alone", "none"})
        assert counts == {1.0: 2}
        assert len(buffer.partitions["train"]) == 3 * len(GROUPS)
    assert buffer._sampleable_terminal_keys("train", (stale, equal, failed, counts)) == {"differ", "differ beside one"}


class Failing(World):
    """One of the two rewards of each third prompt is missing; :class:`World` has its own rewards."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        judge_given(self)

    def missing(self, keys, partition_id) -> set[str]:
        return {key for key in keys if TEXTS[key.split("_")[0]] % 3 == 0 and key.split("_")[1] == "1"}


def test_tail_batching_takes_no_group_that_differs_by_a_failure_only(monkeypatch):
    world = Failing(1, useless=lambda text: text % 5 == 0)
    monkeypatch.setattr(missing_rewards, "find_missing", world.missing)
    trained: list[int] = []
    for number in range(1, 6):
        texts, metrics = world.step(number)
        assert len(texts) == BATCH and all(text % 5 and text % 3 for text in texts)
        trained += texts
        assert metrics["training/rollout_failure/evicted_samples"] > 0
        if EVICTED in metrics:
            assert metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] == {1.0: metrics[EVICTED]}
    assert len(trained) == len(set(trained))


# -- an agent worker -------------------------------------------------------------------------------------------


class Worker:
    """What ``AgentLoopWorker._compute_score`` needs of a worker; ``gives``: what a reward worker answers."""

    _compute_multi_modal_inputs = staticmethod(lambda output, input_ids: {})
    _get_mm_processor_kwargs = staticmethod(lambda audios: {})
    _compute_position_ids = staticmethod(lambda ids, mask, inputs, named: torch.arange(ids.shape[1]).unsqueeze(0))

    def __init__(self, config, gives: dict[str, Any]) -> None:
        self.config, self.asked = config, 0
        self.gives = gives
        self.reward_loop_worker_handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=self.compute))]

    async def compute(self, data) -> dict[str, Any]:
        self.asked += 1
        return self.gives | {"reward_extra_info": dict(self.gives["reward_extra_info"])}

    async def ask(self, session: int = 0, tokens: int = 3, **fields: Any) -> AgentLoopOutput:
        output = AgentLoopOutput(
            prompt_ids=[5, 6], response_ids=[7] * tokens, response_mask=[1] * tokens, extra_fields=fields,
            metrics=AgentLoopMetrics(), num_turns=2,
        )  # fmt: skip
        about = {"uid": "one", "session_id": session, "global_steps": 3}
        await AgentLoopWorker._compute_score(self, [output], about)
        return output


TAIL = ("trainer.v1.trainer_mode=sglang_pat_sync", "+trainer.v1.sglang_pat_sync.tail_batching=strict")


@pytest.fixture
def ledger(monkeypatch) -> RewardLedger:
    """One that is no actor."""
    found = RewardLedger(LimitRules())
    remote = lambda method: SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))  # noqa: E731
    handle = SimpleNamespace(note_end=remote(found.note_end), add_figures=remote(found.add_figures))
    monkeypatch.setattr(reward_ledger, "connect", lambda rules: handle)
    return found


def compose_job(*words: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", list(words))


@pytest.mark.parametrize("manager", ["naive", "sglang_pat"])
async def test_under_any_manager_an_end_is_told_and_a_stopped_response_is_not_scored(ledger, manager):
    """The end is told before the reward is there."""
    words = (*TAIL, f"reward.reward_manager.name={manager}", "algorithm.filter_groups={enable: true, metric: acc}")
    worker = Worker(compose_job(*words), {"reward_score": 0.5, "reward_extra_info": {"acc": 0.5}})
    reward = asyncio.Event()
    compute = worker.compute

    async def late(data) -> dict[str, Any]:
        await reward.wait()
        return await compute(data)

    worker.reward_loop_worker_handles[0].compute_score.remote = late
    assert await ledger.take_ends(3) == {}
    running = asyncio.create_task(worker.ask(session=2, tokens=4, **{STOPS: ["stop"]}))
    stopped = await worker.ask(**{STOPS: ["stop", "abort"]})
    while not (ends := await ledger.take_ends(3)):
        await asyncio.sleep(0)
    assert ends == {"one": {2: 4}} and not running.done()
    assert (stopped.reward_score, stopped.extra_fields["reward_extra_info"]) == (0.0, {"acc": 0.0})
    assert stopped.extra_fields[MISSING] and (await ledger.take_figures())["stopped"] == 1
    reward.set()
    assert (await running).reward_score == 0.5 and worker.asked == 1 and MISSING not in running.result().extra_fields


def test_the_actor_has_no_older_copy_of_it():
    """Ray copies what a class inherits."""
    actor = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert actor._compute_score is AgentLoopWorker._compute_score is response_ends.compute_score


async def test_a_sample_says_that_its_reward_is_missing(ledger):
    worker = Worker(
        compose_job("reward.reward_manager.name=sglang_pat"),
        {"reward_score": 0.0, "reward_extra_info": {"acc": 0.0, MISSING: True}},
    )
    output = await worker.ask()
    assert output.extra_fields[MISSING] is True and output.extra_fields["reward_extra_info"] == {"acc": 0.0}


async def test_other_jobs_are_verls_own():
    worker = Worker(compose_job(), {"reward_score": 0.5, "reward_extra_info": {}})
    assert (await worker.ask(**{STOPS: ["abort"]})).reward_score == 0.5 and worker.asked == 1
