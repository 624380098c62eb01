"""verl's trainer whose engines own its GPUs, and lend it ranks while the last responses are generated:
``trainer.v1.trainer_mode=sglang_pat_stream_lent``.

All ranks generate at first.  At a milestone (:mod:`sglang_pat.rollout.scale_down`) each engine lends every second rank.
Those of the trainer's replicas that have their GPUs train on the groups that are complete; the other ranks go on with
all requests.  When the batch is complete the ranks go back, the engines sleep, and all replicas train on the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import ray
import torch
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine.fsdp import transformer_impl

from sglang_pat.integrations.verl import stream_options
from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.streaming import Stream, check, set_mode
from sglang_pat.integrations.verl.trainers import PREFIX, AdaptiveColocateAsync
from sglang_pat.policies.lending import STRIDE

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
    """Its replicas are strided."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        engine = self.config.rollout.tensor_model_parallel_size

        def make_mesh(world_size: int, fsdp_size: int) -> DeviceMesh:
            replicas = torch.tensor(list_replicas(world_size, fsdp_size, engine))
            return DeviceMesh(get_device_name(), replicas, mesh_dim_names=("ddp", "fsdp"))

        with patch.object(transformer_impl, "create_device_mesh", make_mesh):
            super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> None:
        """Of the allocator: what its GPU has free is the engine's."""
        aggressive_empty_cache(force_sync=True)


@register_trainer(MODE)
class AdaptiveStreamLent(Stream, AdaptiveColocateAsync):
    """verl's ``colocate_async``, whose engines sleep when the batch is complete, and of which half trains before."""

    _worker_class = LentWorker
    _training: Sequence[int] = ()
    """Data-parallel ranks that do not generate now."""

    def __init__(self, config: DictConfig) -> None:
        check(config, MODE)
        stream_options.check_lent(config, WHERE)
        super().__init__(set_mode(config, "colocate_async"))

    def prepare_step(self) -> dict[str, Any]:
        self._training = ()
        return super().prepare_step() | self._lend_ranks()

    def _lend_ranks(self) -> dict[str, Any]:
        """Wait for the moment, and lend; if there is none, until the batch is complete."""
        engines = self._list_engines()
        with marked_timer("switch_wait", self.timing_raw, color="yellow"):
            found = self._wait_for_scale_down(engines, 1 / STRIDE)
        if found["training/stream/switched_at"] < 1:
            with marked_timer("switch_to_trainer", self.timing_raw, color="cyan"):
                lent = ray.get([engine.lend_ranks.remote(STRIDE) for engine in engines])
            size = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
            self._training = [number * size + rank for number, ranks in enumerate(lent) for rank in ranks]
        return found

    def _wait_for_groups(self, wanted: int) -> tuple[int, dict[str, Any]]:
        groups, found = super()._wait_for_groups(wanted)
        if groups == wanted:
            self._end_generation()
        return groups, found

    def _end_generation(self) -> None:
        with marked_timer("take_back_ranks", self.timing_raw, color="cyan"):
            self.actor_rollout_wg.empty_cache()
            ray.get([engine.lend_ranks.remote(1) for engine in self._list_engines()])
            AdaptiveColocateAsync.on_sample_end(self)  # verl's: the engines sleep
        self._training = range(self._count_trainer_ranks())

    def _list_training_ranks(self) -> Sequence[int]:
        return self._training
