"""Weights from verl's trainer to engines of their own without GPUs: a checkpoint engine of verl's named ``gloo``.

``rollout.checkpoint_engine.backend=gloo`` and ``.custom_backend_module=on_cpu.verl_gloo``.  verl's own ones
need CUDA or RDMA.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from sglang_pat.testing.ports import find_free_port

HOST = "127.0.0.1"


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Checkpoint engine that sends tensor after tensor from the first trainer process to those of the rollout."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._master = is_master
        self._rank = -1
        self._group: Any = None  # torch says nothing of a ProcessGroupGloo's methods

    def prepare(self) -> int | None:
        """Port at which the processes will meet, if this one is the master."""
        return find_free_port() if self._master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[int | None]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The other trainer processes have rank -1: they only help to put the tensors together."""
        size = 1 + rollout_world_size

        def of(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [size] * len(ranks), "port": [metadata[0]] * len(ranks)}

        return of([0] + [-1] * (actor_wg_world_size - 1)), of(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, port: int) -> None:
        self._rank = rank
        if rank >= 0:
            store = TCPStore(HOST, port, world_size, is_master=rank == 0)
            self._group = ProcessGroupGloo(store, rank, world_size, timedelta(minutes=10))

    def finalize(self) -> None:
        self._group = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        async for name, tensor in ensure_async_iterator(weights):
            if self._rank == 0:
                self._tell((name, tensor.shape, tensor.dtype))
                self._broadcast(tensor.contiguous())
        if self._rank == 0:
            self._tell(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while (header := self._told()) is not None:
            name, shape, dtype = header
            yield name, self._broadcast(torch.empty(shape, dtype=dtype))

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.broadcast(tensor, 0).wait()
        return tensor

    def _tell(self, value: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def _told(self) -> Any:
        length = int(self._broadcast(torch.empty(1, dtype=torch.int64)).item())
        return pickle.loads(bytes(self._broadcast(torch.empty(length, dtype=torch.uint8)).tolist()))
