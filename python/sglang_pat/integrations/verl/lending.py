"""verl's trainer whose engines own its GPUs, and lend it ranks while the last responses are generated:
``trainer.v1.trainer_mode=sglang_pat_stream_lent``.

All ranks generate at first.  When it pays, or, without a profile, when KV fits (:mod:`sglang_pat.policies.lending`),
each engine lends every second rank.  Those of the trainer's replicas that have their GPUs train on the groups that are
complete.  The other ranks go on with all requests.  When the batch is complete, or earlier if that is faster, the ranks
go back.  Then the engines sleep, and all replicas train on the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import ray
import torch
from omegaconf import DictConfig
from ray.actor import ActorHandle
from torch.distributed.device_mesh import DeviceMesh
from transfer_queue import KVBatchMeta
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine.fsdp import transformer_impl

from sglang_pat.integrations.verl import stream_options
from sglang_pat.integrations.verl.bell import Bell
from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.streaming import SWITCHED_AT, Stream, check, count_least, set_mode
from sglang_pat.integrations.verl.tail_batching import ChunkedTailBatchingBuffer
from sglang_pat.integrations.verl.trainers import PREFIX, AdaptiveColocateAsync
from sglang_pat.policies.lending import STRIDE, Move, Training, TrainingPace

MODE = f"{PREFIX}stream_lent"
WHERE = f"trainer.v1.trainer_mode={MODE}"


def list_replicas(ranks: int, size: int, engine: int) -> list[list[int]]:
    """The trainer's ranks, one list a replica, such that a replica has lent ranks of one engine only, or none.

    Args:
        ranks: of the trainer.
        size: ranks of a replica.
        engine: ranks of an engine; every second one may be lent.
    """
    replicas = engine // size
    return [
        list(range(first + i, first + engine, replicas)) for first in range(0, ranks, engine) for i in range(replicas)
    ]


class LentWorker(SummingWorker):
    """Its replicas are strided.  Each does what a chunk needs without the others: the pass of the reference policy,
    and an early end."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        engine = self.config.rollout.tensor_model_parallel_size

        def make_mesh(world_size: int, fsdp_size: int) -> DeviceMesh:
            replicas = torch.tensor(list_replicas(world_size, fsdp_size, engine))
            return DeviceMesh(get_device_name(), replicas, mesh_dim_names=("ddp", "fsdp"))

        with patch.object(transformer_impl, "create_device_mesh", make_mesh):
            super().init_model()
        self.actor.reference = self.ref

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listen(self, bell: ActorHandle) -> None:
        """From now on a chunk ends early when the bell was rung."""
        self.actor.is_interrupted = lambda: ray.get(bell.is_rung.remote())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> None:
        """Of the allocator: what its GPU has free is the engine's."""
        aggressive_empty_cache(force_sync=True)


@register_trainer(MODE)
class AdaptiveStreamLent(Stream, AdaptiveColocateAsync):
    """verl's ``colocate_async``, whose engines sleep when the batch is complete, and of which half trains before."""

    _tail_batching_at = f"trainer.v1.{MODE}"
    _worker_class = LentWorker
    _training: Sequence[int] = ()
    """Data-parallel ranks that do not generate now."""

    def __init__(self, config: DictConfig) -> None:
        check(config, MODE)
        stream_options.check_lent(config, WHERE)
        super().__init__(set_mode(config, "colocate_async"))
        self._pace = TrainingPace()
        self._rung = False

    def _setup(self) -> None:
        super()._setup()
        self._bell = ray.remote(Bell).options(num_cpus=0).remote()
        self.actor_rollout_wg.listen(self._bell)

    def prepare_step(self) -> dict[str, Any]:
        self._training, self._asked_at, self._switched_at, self._generates = (), 0, 1.0, True
        self._lent: dict[int, list[int]] = {}
        """Ranks that an engine has lent; none: it lends no more in this step."""
        self._pace.begin_step(time.monotonic())
        return super().prepare_step()

    def _wait_for_groups(self, wanted: int) -> tuple[int, dict[str, Any]]:
        """Also, until there are ranks that train."""
        metrics: dict[str, Any] = {}
        last = time.time()
        while (groups := self._follow_round(wanted, metrics)) < count_least(wanted) or not self._training:
            last = self.replay_buffer._wait_for_next_poll("train", last)
        if groups >= wanted:
            metrics[SWITCHED_AT] = self._switched_at
        return groups, metrics

    def _follow_round(self, wanted: int, metrics: dict[str, Any]) -> int:
        """One look at the round: ranks are lent and taken back, and the engines sleep, if it is time.

        Args:
            wanted: groups that the batch has beside those that the trainer has had.

        Returns:
            of them, those that are complete.
        """
        there = self._look_for_groups(metrics)
        if self._generates:
            if len(there) >= wanted or self._is_generated():
                self._end_generation()
            else:
                self._follow_policy(self.config.data.train_batch_size - wanted + len(there), there)
        return len(there)

    def _follow_policy(self, complete: int, there: set[str]) -> None:
        """Lend ranks, or take them back, if it is time.

        Args:
            complete: groups of the batch.
            there: those of them that were not trained on.
        """
        engines, moves = self._list_engines(), self._ask_policy(complete, there)
        lend, back, never = (
            [engine for engine, move in moves.items() if move == wanted]
            for wanted in (Move.LEND, Move.TAKE_BACK, Move.NEVER)
        )
        self._lent |= {engine: [] for engine in never}
        if lend:
            with marked_timer("switch_to_trainer", self.timing_raw, color="cyan"):
                ranks = ray.get([engines[engine].lend_ranks.remote(STRIDE) for engine in lend])
            self._lent |= dict(zip(lend, ranks, strict=True))
            self._pace.lend(time.monotonic())
            self._switched_at = min(self._switched_at, complete / self.config.data.train_batch_size)
        if back:
            self._take_back(back)
        size = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self._training = [engine * size + rank for engine, ranks in sorted(self._lent.items()) for rank in ranks]

    def _ask_policy(self, complete: int, there: set[str]) -> dict[int, Move]:
        """What each engine is to do now; arguments as of :meth:`_follow_policy`."""
        engines, is_new = self._list_engines(), complete != self._asked_at
        self._asked_at = complete
        waiting = [engine for engine in range(len(engines)) if engine not in self._lent and is_new]
        asked = waiting + [engine for engine, ranks in self._lent.items() if ranks]
        if not asked:
            return {}
        training = self._describe_training(complete, there, len(engines))
        said = ray.get([engines[engine].decide_lending.remote(training) for engine in asked])
        return dict(zip(asked, said, strict=True))

    def _describe_training(self, complete: int, there: set[str], engines: int) -> Training:
        """An engine's part: it lends for as much of the batch as the others."""
        n, buffer = self.config.actor_rollout_ref.rollout.n, self.replay_buffer
        measured = self._pace.describe(time.monotonic())
        measured["seconds_per_token"] *= engines
        measured["trained"] = measured.get("trained", 0) // engines

        def count_tokens(groups: set[str]) -> int:
            tags = (tag for key, tag in buffer.partitions["train"].items() if key.partition("_")[0] in groups)
            return _sum_tokens(tag for tag in tags if "response_len" in tag)

        spare = buffer.count_spare() if isinstance(buffer, ChunkedTailBatchingBuffer) else 0
        return Training(
            samples=self.config.data.train_batch_size * n // engines, complete=complete * n // engines,
            ready=count_tokens(there) // engines, pending=count_tokens(buffer.running_keys["train"]) // engines,
            spare=spare // engines, **measured,
        )  # fmt: skip

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], groups: int) -> KVBatchMeta:
        start, training = time.perf_counter(), self._training
        chunk = super()._step_once(metrics, timing_raw, groups)
        if self._training == training:  # all of it on the same ranks
            tokens = _sum_tokens(tag for tag in chunk.tags if not tag.get("is_padding"))
            self._pace.add(time.perf_counter() - start, tokens, lent=len(training) < self._count_trainer_ranks())
        return chunk

    def _take_back(self, engines: Sequence[int]) -> None:
        with marked_timer("take_back_ranks", self.timing_raw, color="cyan"):
            self.actor_rollout_wg.empty_cache()
            actors = self._list_engines()
            ray.get([actors[engine].lend_ranks.remote(1) for engine in engines])
        self._lent |= {engine: [] for engine in engines}
        if not any(self._lent.values()):
            self._pace.take_back()

    def _end_generation(self) -> None:
        self._take_back(range(len(self._list_engines())))
        AdaptiveColocateAsync.on_sample_end(self)  # verl's: the engines sleep
        self._training, self._generates = range(self._count_trainer_ranks()), False

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Nothing: verl's is a pass of all ranks.  Here it is a part of the one that trains."""
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The gradients of a chunk.  When the batch is complete, all ranks go on with what is left of it."""
        rest, last = batch, time.time()
        while left := self._add_gradients(rest, metrics):
            self._follow_round(self._left, metrics)
            while not self._training:  # the engines have taken the ranks back
                last = self.replay_buffer._wait_for_next_poll("train", last)
                self._follow_round(self._left, metrics)
            rest = _deal(rest, left, len(self._training))
        return batch

    def _add_gradients(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> set[str]:
        self._ring(False)  # the ranks may have been done when it was rung
        return super()._add_gradients(batch, metrics)

    def _ring(self, rung: bool) -> None:
        if rung != self._rung:
            ray.get(self._bell.set.remote(rung))
            self._rung = rung

    def _look_while_training(self, metrics: dict[str, Any]) -> set[str]:
        """Also, the ranks are interrupted if others are to train."""
        there = super()._look_while_training(metrics)
        if self._generates:
            over = len(there) >= self._left or self._is_generated()
            complete = self.config.data.train_batch_size - self._left + len(there)
            if over or {Move.LEND, Move.TAKE_BACK} & set(self._ask_policy(complete, there).values()):
                self._asked_at = 0  # they are asked again, when it is done
                self._ring(True)
        return there

    def _list_training_ranks(self) -> Sequence[int]:
        return self._training


def _deal(batch: KVBatchMeta, keys: set[str], ranks: int) -> KVBatchMeta:
    """Some samples of a batch, in an order in which equal parts are for ranks with about the same work."""
    rows = sorted((i for i, key in enumerate(batch.keys) if key in keys), key=lambda i: -batch.tags[i]["seq_len"])
    rows = [i for rank in range(ranks) for i in rows[rank::ranks]]
    return KVBatchMeta(
        partition_id=batch.partition_id, keys=[batch.keys[i] for i in rows], tags=[batch.tags[i] for i in rows],
        extra_info=dict(batch.extra_info),
    )  # fmt: skip


def _sum_tokens(tags: Iterable[Mapping[str, Any]]) -> int:
    """Of prompts and responses, by verl's tags."""
    return sum(tag["prompt_len"] + tag["response_len"] for tag in tags)
