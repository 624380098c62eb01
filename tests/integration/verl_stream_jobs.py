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
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from sglang_pat.integrations.verl.lending import AdaptiveStreamLent
from sglang_pat.integrations.verl.streaming import AdaptiveStream, Stream

BATCH, FIRST = 8, 3
"""Prompts of a step, and those of them that begin before something was trained."""
COMPUTED = {"log_probs", "old_log_probs", "ref_log_prob", "entropy", "advantages", "returns"}
"""Fields of a sample that a trainer adds."""
GATE = "gate"


class Gate:
    """Opens at a step's first chunk, for the prompts that wait."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def open(self, step: int) -> None:
        self._steps[step].set()

    async def wait(self, step: int) -> None:
        await self._steps[step].wait()


class GatedAgent(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        step, number = divmod(int(kwargs["index"]), BATCH)
        if number >= FIRST:
            await ray.get_actor(GATE).wait.remote(step + 1)
        return await super().run(sampling_params, **kwargs)


def get_path(step: int) -> Path:
    """Of the samples of a step; both jobs have the same."""
    return Path(os.environ["STREAM_SAMPLES"]) / f"{step}.pt"


class _Recorded(Stream):
    """Opens the gate when gradients of a step's first chunk are there."""

    def _setup(self) -> None:
        self._gate = ray.remote(Gate).options(name=GATE, num_cpus=0, max_concurrency=1000).remote()
        super()._setup()

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._update_actor(batch, metrics)
        ray.get(self._gate.open.remote(self.global_steps))
        return batch

    def step(self, *args: Any) -> KVBatchMeta:
        batch = super().step(*args)
        rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        keys = [batch.keys[i] for i in rows]
        data = tq.kv_batch_get(keys=keys, partition_id="train")
        torch.save((keys, [batch.tags[i] for i in rows], data), get_path(self.global_steps))
        return batch


@register_trainer("recorded_stream")
class RecordedStream(_Recorded, AdaptiveStream):
    pass


@register_trainer("recorded_stream_lent")
class RecordedStreamLent(_Recorded, AdaptiveStreamLent):
    pass


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
