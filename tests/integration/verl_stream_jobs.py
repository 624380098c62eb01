"""Trainer modes and an agent for the tests of streamed gradients: what a step has trained on is kept, and given to
verl's own trainer."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from ray.actor import ActorHandle
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from sglang_pat.integrations.verl.fields import was_stopped
from sglang_pat.integrations.verl.stream_lent import AdaptiveStreamLent, LentRanks, LentWorker
from sglang_pat.integrations.verl.streaming import AdaptiveStream, StreamStep
from sglang_pat.integrations.verl.trainers import AdaptiveTrainer
from sglang_pat.policies.lending import Move
from sglang_pat.rollout.state import LONG

from . import verl_rewards

BATCH, FIRST = 8, 3
"""Prompts of a step, and those of them that begin before something was trained."""
COMPUTED = {"log_probs", "old_log_probs", "ref_log_prob", "entropy", "advantages", "returns"}
"""Fields of a sample that a trainer adds."""
GATE = "gate"
DIES_IN = 2
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
HYBRID = "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"


class Gate:
    """Opens at a step's first chunk, for the prompts that wait; the first ones of a step do not."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._first: defaultdict[int, set[str]] = defaultdict(set)
        self._long: dict[int, asyncio.Future[bool]] = {}

    async def open(self, step: int) -> None:
        self._steps[step].set()

    async def wait(self, step: int, uid: str) -> None:
        first = self._first[step]
        if len(first) < FIRST:
            first.add(uid)
        if uid not in first:
            await self._steps[step].wait()

    async def begin(self, step: int, is_long: bool) -> None:
        """A round, in which prompts that take long may end."""
        self._get_kind(step).set_result(is_long)

    async def is_long(self, step: int) -> bool:
        return await self._get_kind(step)

    def _get_kind(self, step: int) -> asyncio.Future[bool]:
        return self._long.setdefault(step, asyncio.get_running_loop().create_future())


class GatedAgent(SingleTurnAgentLoop):
    """All prompts of a step but the first wait for its first chunk."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await ray.get_actor(GATE).wait.remote(int(kwargs["global_steps"]), kwargs["uid"])
        return await super().run(sampling_params, **kwargs)


class TailAgent(GatedAgent):
    """An agent of whose prompts each third goes on until it is stopped, but in a round for such prompts."""

    takes_long = staticmethod(lambda index: index % 3 == 2)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        step = int(kwargs["global_steps"])
        if self.takes_long(int(kwargs["index"])) and not await ray.get_actor(GATE).is_long.remote(step):
            while True:
                output = await SingleTurnAgentLoop.run(self, sampling_params, **kwargs)
                if was_stopped(output.extra_fields):
                    return output
        return await super().run(sampling_params, **kwargs)


class RareTailAgent(TailAgent):
    """Fewer prompts go on, and useless ones wait for nothing."""

    takes_long = staticmethod(lambda index: index % 12 == 5)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if is_useful(index := int(kwargs["index"])) or self.takes_long(index):
            return await super().run(sampling_params, **kwargs)
        return await SingleTurnAgentLoop.run(self, sampling_params, **kwargs)


def is_useful(index: int) -> bool:
    """Whether the reward function ``half`` finds a prompt useful."""
    return verl_rewards.draw(f"prompt {index}") >= 0.5


def get_path(step: int) -> Path:
    """The file of the samples of a step; both jobs have the same."""
    return Path(os.environ["STREAM_SAMPLES"]) / f"{step}.pt"


class RecordedStep(StreamStep):
    """Opens the gate when gradients of its first chunk are there, and keeps what it has trained on."""

    def add_gradients(self, batch: KVBatchMeta) -> None:
        super().add_gradients(batch)
        self.open_gate()

    def open_gate(self) -> None:
        ray.get(ray.get_actor(GATE).open.remote(self.trainer.global_steps))

    def run(self, *args: Any) -> KVBatchMeta:
        batch = super().run(*args)
        rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        keys = [batch.keys[i] for i in rows]
        data = tq.kv_batch_get(keys=keys, partition_id="train")
        torch.save((keys, [batch.tags[i] for i in rows], data), get_path(self.trainer.global_steps))
        return batch


class _Gated(AdaptiveTrainer):
    """Has the gate."""

    step_class = RecordedStep

    def _setup(self) -> None:
        self._gate = ray.remote(Gate).options(name=GATE, num_cpus=0, max_concurrency=1000).remote()
        super()._setup()

    def _add_batch_to_generate(self) -> None:
        super()._add_batch_to_generate()
        if self.tail_batching:
            under_way = self.tail_batching._admitter.state.round
            assert under_way is not None
            ray.get(self._gate.begin.remote(self.global_steps, under_way.kind == LONG))


@register_trainer("recorded_stream")
class RecordedStream(_Gated, AdaptiveStream):
    pass


@register_trainer("recorded_stream_lent")
class RecordedStreamLent(_Gated, AdaptiveStreamLent):
    pass


class LeavingRanks(LentRanks):
    """The first engine leaves each round as soon as something was trained, with what it has.  Then the other dies in
    step :data:`DIES_IN`.

    Attributes:
        moved: requests that it had.
    """

    moved, dies_in = 0, DIES_IN

    def begin_step(self) -> None:
        super().begin_step()
        self.moved = 0

    def ask_policy(self, step: StreamStep, complete: int, groups: set[str]) -> dict[int, Move]:
        moves = super().ask_policy(step, complete, groups)
        first, second = self._trainer.engines.list_actors()
        if step.left < step.batch and not self.moved:
            self.moved = ray.get(first.load.remote()).running
            if self.moved:
                return moves | {0: Move.LEAVE}
        elif 0 in self._left and self._trainer.global_steps == self.dies_in:
            self.dies_in = 0
            ray.kill(second)
        return moves


class LeavingStep(RecordedStep):
    """Says how many requests were moved."""

    gpus: LeavingRanks

    def run(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        batch = super().run(metrics, timing_raw)
        metrics["test/moved"] = self.gpus.moved
        return batch


@register_trainer("leaving_lent")
class LeavingLent(RecordedStreamLent):
    step_class, gpus_class = LeavingStep, LeavingRanks


class WaitingBell:
    """Armed for a step, it is asked once: it answers when it is rung."""

    def __init__(self) -> None:
        self._rung, self._set = False, asyncio.Event()

    async def arm(self) -> None:
        self._set.clear()

    async def set(self, rung: bool) -> None:
        self._rung = rung
        self._set.set()

    async def wait(self) -> bool:
        await self._set.wait()
        return self._rung


class InterruptedRanks(LentRanks):
    def listen(self) -> None:
        self.bell = ray.remote(WaitingBell).options(num_cpus=0).remote()
        self._trainer.actor_rollout_wg.listen(self.bell)


class InterruptedWorker(LentWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listen(self, bell: ActorHandle) -> None:
        self.actor.is_interrupted = lambda: ray.get(bell.wait.remote())


class InterruptedStep(RecordedStep):
    """A step whose first chunk is not over before the batch is complete."""

    gpus: LentRanks
    left_over = 0

    def add_gradients(self, batch: KVBatchMeta) -> None:
        self.open_gate()
        if not self.gpus.generates:  # no rank was lent
            ray.get(self.gpus.bell.set.remote(False))
        super().add_gradients(batch)

    def try_gradients(self, batch: KVBatchMeta) -> set[str]:
        left = super().try_gradients(batch)
        self.left_over += len(left)
        return left

    def run(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        batch = super().run(metrics, timing_raw)
        metrics["test/left"] = self.left_over
        return batch


@register_trainer("interrupted_lent")
class InterruptedLent(RecordedStreamLent):
    step_class, gpus_class, worker_class = InterruptedStep, InterruptedRanks, InterruptedWorker

    def _add_batch_to_generate(self) -> None:
        ray.get(self.gpus.bell.arm.remote())
        super()._add_batch_to_generate()


@register_trainer("replayed_sync")
class ReplayedSync(PPOTrainerSync):
    """verl's own trainer, of samples that are there."""

    def __init__(self, config: Any) -> None:
        config = deepcopy(config)
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        self.replay_buffer.sample = self._load

    def _add_batch_to_generate(self) -> None:
        pass

    def _load(self, global_steps: int, **_: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        keys, tags, data = torch.load(get_path(global_steps), weights_only=False)
        data = data.select(*(name for name in data.keys() if name not in COMPUTED))
        tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags), {}
