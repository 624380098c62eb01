"""verl's trainer whose engines own its GPUs, and lend it ranks while the last responses are generated:
``trainer.v1.trainer_mode=sglang_pat_stream_lent``.

Its step is :class:`~sglang_pat.integrations.verl.streaming.StreamStep`; :class:`LentRanks` says who has the GPUs.

All ranks generate at first.  Then each engine lends every second rank (:mod:`sglang_pat.policies.lending` says when),
and replicas of the trainer there train on complete groups.  When the batch is complete, or earlier if that is faster,
the ranks go back.  Then the engines sleep, and all replicas train on the rest.  Of several engines the one with the
fewest requests may sleep before: the trainer has all its ranks then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import ray
import torch
from msgspec.structs import replace
from ray.actor import ActorHandle
from torch.distributed.device_mesh import DeviceMesh
from transfer_queue import KVBatchMeta
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine.fsdp import transformer_impl

from sglang_pat.integrations.verl import options
from sglang_pat.integrations.verl.fleet import ask_each, gather
from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.streaming import Gpus, StreamStep, StreamTrainer, list_samples, sum_tokens
from sglang_pat.integrations.verl.tail_batching import ChunkedTailBatchingBuffer
from sglang_pat.policies.lending import MOST_COUNT, STRIDE, Move, Others, Training, TrainingPace

MODE = f"{options.PREFIX}stream_lent"
RETRY_SECONDS = 1.0
"""Seconds that verl's client waits before it sends a request that was aborted elsewhere."""


def list_replicas(ranks: int, size: int, engine: int) -> list[list[int]]:
    """The trainer's ranks, one list a replica, such that a replica has lent ranks of one engine only, or none.

    Args:
        ranks: number of the trainer's ranks.
        size: number of a replica's ranks.
        engine: number of an engine's ranks; every second one may be lent.
    """
    replicas = engine // size
    return [
        list(range(first + i, first + engine, replicas)) for first in range(0, ranks, engine) for i in range(replicas)
    ]


class LentWorker(SummingWorker):
    """A worker whose replicas are strided.  Each does what a chunk needs without the others: the pass of the reference
    policy, and an early end."""

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
        """Have chunks end early from now on when the bell was rung."""
        self.actor.is_interrupted = lambda: ray.get(bell.is_rung.remote())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> None:
        """Empty the allocator's cache: what its GPU has free is the engine's."""
        aggressive_empty_cache(force_sync=True)


class LentRanks(Gpus):
    """GPUs that are the engines', of which the trainer gets those that are lent until the engines sleep."""

    train_alone = True
    bell: Any = None

    def __init__(self, trainer: AdaptiveStreamLent) -> None:
        self._trainer = trainer
        self._pace = TrainingPace()
        self._lent: dict[int, list[int]] = {}
        """Ranks that an engine has lent, by the engine's number; none: it lends no more in this step."""
        self._left: set[int] = set()
        """Numbers of the engines that have left the round: all their ranks are the trainer's."""
        self._asked_at = 0  # groups were complete when engines that have lent nothing were last asked
        self.generates = False  # the engines are awake
        self._rung = False

    def listen(self) -> None:
        """Have the trainer's ranks hear a bell from now on: an actor that says between two passes whether to stop."""

        # Here, so that Ray sends the class itself: of another one it would import the module, and verl with it.
        class Bell:
            def __init__(self) -> None:
                self.rung = False

            async def set(self, rung: bool) -> None:
                self.rung = rung

            async def is_rung(self) -> bool:
                return self.rung

        self.bell = ray.remote(num_cpus=0)(Bell).remote()
        self._trainer.actor_rollout_wg.listen(self.bell)

    def begin_step(self) -> None:
        if self.bell is None:
            self.listen()
        self.ranks, self.left_at, self.generates = (), 1.0, True
        self._lent, self._left, self._asked_at = {}, set(), 0
        self._pace.begin_step(time.monotonic())

    def follow(self, step: StreamStep, groups: set[str], is_training: bool) -> None:
        """Lend ranks, take them back, have the engines sleep.  Ranks that are training are interrupted for it."""
        if not self.generates:
            return
        if self._left and not self._trainer.checkpoint_manager.count_awake():
            return self._ring(True) if is_training else self._wake()
        complete, over = step.count_complete(groups), len(groups) >= step.left or step.is_generated()
        moves = {} if over else self.ask_policy(step, complete, groups)
        if is_training:
            if over or not {Move.WAIT, Move.NEVER}.issuperset(moves.values()):
                self._asked_at = 0  # they are asked again, when it is done
                self._ring(True)
        elif over:
            self._end_generation()
        else:
            self._make_moves(moves, complete / step.batch)

    def ask_policy(self, step: StreamStep, complete: int, groups: set[str]) -> dict[int, Move]:
        """Ask what each engine is to do now.

        Args:
            complete: number of the batch's complete groups.
            groups: uids of those that were not trained on.
        """
        engines, is_new = self._trainer.engines.list_actors(), complete != self._asked_at
        self._asked_at = complete
        awake = [engine for engine in range(len(engines)) if engine not in self._left]
        candidates = [engine for engine in awake if self._lent.get(engine) or (engine not in self._lent and is_new)]
        # Where useless groups are replaced, nobody knows what is still to come.
        may_leave = is_new and not step.buffer.filter_groups_metric
        last, others = self._describe_others(awake) if may_leave else (None, None)
        if not candidates and last is None:
            return {}
        training = self._describe_training(step, complete, groups, len(engines))
        # One that has not lent expects all others to do as it does; one that has sees what ranks the trainer has.
        halves = STRIDE * self._get_lent_share() or 1.0
        as_lent = replace(training, slowdown=max(1.0, training.slowdown / halves), busy=training.busy / halves)
        calls = {
            engine: engines[engine].decide_lending.remote(
                replace(as_lent if self._lent.get(engine) else training, others=others if engine == last else None)
            )
            for engine in {*candidates, *([] if last is None else [last])}
        }
        moves = zip(calls, gather(calls.values()), strict=True)
        # The dead lend nothing.
        return {one: move or Move.NEVER for one, move in moves if one in candidates or move is Move.LEAVE}

    def _describe_others(self, awake: Sequence[int]) -> tuple[int | None, Others | None]:
        """The engine that may leave, which has the fewest requests, and what the others have; None: none may."""
        if len(awake) < 2:
            return None, None
        engines = self._trainer.engines.list_actors()
        answers = zip(awake, ask_each([engines[engine] for engine in awake], "load"), strict=True)
        reports = {engine: report for engine, report in answers if report is not None}
        if len(reports) < 2:
            return None, None
        last, *others = sorted(reports, key=lambda engine: reports[engine].running + reports[engine].waiting)
        most = reports[others[-1]]
        room = min(most.kv_free + most.tokens, MOST_COUNT)  # it may not be known yet
        return last, Others(
            engines=len(others), running=most.running, waiting=most.waiting, tokens=most.tokens, room=room,
            delay=RETRY_SECONDS, lent=self._get_lent_share(),
        )  # fmt: skip

    def _get_lent_share(self) -> float:
        """Share of all ranks that the trainer has."""
        return sum(map(len, self._lent.values())) / self._trainer.actor_rollout_wg.world_size

    def _describe_training(self, step: StreamStep, complete: int, groups: set[str], engines: int) -> Training:
        """The state of training for one engine: it lends for as much of the batch as the others."""
        n, buffer = self._trainer.config.actor_rollout_ref.rollout.n, step.buffer
        measured = self._pace.describe(time.monotonic())
        measured["seconds_per_token"] *= engines
        measured["trained"] = measured.get("trained", 0) // engines
        ready, pending = (sum_tokens(step.list_tags(uids)) for uids in (groups, buffer.running_keys["train"]))
        spare = buffer.count_spare() if isinstance(buffer, ChunkedTailBatchingBuffer) else 0
        return Training(
            samples=max(1, step.batch * n // engines), complete=complete * n // engines,
            ready=ready // engines, pending=pending // engines, spare=spare // engines, **measured,
        )  # fmt: skip

    def _make_moves(self, moves: dict[int, Move], completion: float) -> None:
        lend, back, never, leave = (
            [engine for engine, move in moves.items() if move == kind]
            for kind in (Move.LEND, Move.TAKE_BACK, Move.NEVER, Move.LEAVE)
        )
        self._lent |= {engine: [] for engine in never}
        if lend:
            engines = self._trainer.engines.list_actors()
            with marked_timer("switch_to_trainer", self._trainer.timing_raw, color="cyan"):
                lent = ask_each([engines[engine] for engine in lend], "lend_ranks", STRIDE)
            self._lent |= {engine: ranks or [] for engine, ranks in zip(lend, lent, strict=True)}
            self._pace.lend(time.monotonic())
            self.left_at = min(self.left_at or 1.0, completion)
        if back:
            self._take_back(back)
        size = self._trainer.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        for engine in leave:
            if self._lent.get(engine):
                self._take_back([engine])
            with marked_timer("switch_to_trainer", self._trainer.timing_raw, color="cyan"):
                self._trainer.checkpoint_manager.leave_round(engine)
            if not any(self._lent.values()):
                self._pace.lend(time.monotonic())
            self._left.add(engine)
            self._lent[engine] = list(range(size))
            self.left_at = min(self.left_at or 1.0, completion)
        self.ranks = [engine * size + rank for engine, ranks in sorted(self._lent.items()) for rank in ranks]

    def _take_back(self, engines: Sequence[int]) -> None:
        actors = self._trainer.engines.list_actors()
        with marked_timer("take_back_ranks", self._trainer.timing_raw, color="cyan"):
            self._trainer.actor_rollout_wg.empty_cache()
            ask_each([actors[engine] for engine in engines], "lend_ranks", 1)
        self._lent |= {engine: [] for engine in engines}
        if not any(self._lent.values()):
            self._pace.take_back()

    def _wake(self) -> None:
        """Have the engines that have left generate again, since all others have died."""
        manager = self._trainer.checkpoint_manager
        self._trainer.actor_rollout_wg.empty_cache()
        manager.update_weights()
        manager.resume_generation_replicas()
        self._lent = {engine: [] for engine in range(len(self._trainer.engines.list_actors()))}  # no more in this step
        self._left, self.ranks = set(), ()
        self._pace.take_back()

    def _end_generation(self) -> None:
        engines = range(len(self._trainer.engines.list_actors()))
        self._take_back([engine for engine in engines if engine not in self._left])
        PPOTrainerColocateAsync.on_sample_end(self._trainer)  # verl's: the engines sleep
        self.ranks, self.generates = range(self._trainer.actor_rollout_wg.world_size), False

    def begin_chunk(self) -> None:
        self._ring(False)  # the ranks may have been done when it was rung

    def _ring(self, rung: bool) -> None:
        if rung != self._rung:
            ray.get(self.bell.set.remote(rung))
            self._rung = rung

    def note_chunk(self, chunk: KVBatchMeta, seconds: float, ranks: Sequence[int]) -> None:
        if self.ranks == ranks:  # all of it on the same ones
            share = len(ranks) / self._trainer.actor_rollout_wg.world_size
            half = seconds if share == 1 else seconds * share * STRIDE  # a pace is that of all ranks, or of half
            self._pace.add(half, sum_tokens(list_samples(chunk)), lent=share < 1)


@register_trainer(MODE)
class AdaptiveStreamLent(StreamTrainer, PPOTrainerColocateAsync):
    """verl's ``colocate_async``, whose engines sleep when the batch is complete, and of which half trains before."""

    mode, name, lends_ranks = "colocate_async", MODE, True
    gpus_class, worker_class = LentRanks, LentWorker
