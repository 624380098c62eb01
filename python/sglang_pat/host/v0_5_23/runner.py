"""SGLang's model runner and TP worker: pools, backends and graphs are made after them, and the groups before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.runtime_context import get_exec, get_schedule

from sglang_pat.host import runner
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.fixes.grammars import MendedModelRunner
from sglang_pat.host.fixes.weight_updates import ExpectingTpModelWorker
from sglang_pat.rank.groups import GroupPool

__all__ = ["LocalSerializedTensor"]

RESOURCE_MAKERS = (
    (dist, "new_group"),
    (MHATokenToKVPool, "__init__"),
    (ModelRunner, "init_decode_cuda_graph"),
    (ModelRunner, "init_attention_backends"),
)
"""Functions that make process groups, pools and graphs, and so a second copy of their memory."""


class AdaptiveModelRunner(runner.RankParts, MendedModelRunner):
    """A ``ModelRunner`` with :class:`~sglang_pat.host.runner.RankParts`."""

    def __init__(self, *, server_args: Any, rank: int, groups: GroupPool, **kwargs) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self.groups = groups
        super().__init__(server_args=server_args, **kwargs)


class AdaptiveTpModelWorker(ExpectingTpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    _opened: Any = None

    def __init__(self, *, rank: int, groups: GroupPool, **kwargs) -> None:
        self.rank = rank
        self.groups = groups
        super().__init__(**kwargs)
        groups.use_shared_memory_for_control()
        self.expect(runner.build_model(self.model_runner))
        # Groups for updates have this rank by its number in the engine.
        updater = dataclasses.replace(self.model_runner.weight_updater, tp_rank=rank)
        assign(self.model_runner, weight_updater=updater)

    def _init_model_runner(self) -> None:
        self._model_runner = AdaptiveModelRunner(
            rank=self.rank,
            groups=self.groups,
            model_config=self.model_config,
            mem_fraction_static=get_schedule().mem_fraction_static,
            gpu_id=self.gpu_id,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
            load_group=self.load_group,
        )

    # -- updates, of which all ranks of the engine take all tensors, or none does ----------------------

    def open(self, recv_req: UpdateWeightsFromTensorReqInput) -> str | None:
        """Open what a request brought for this rank, for the next call of :meth:`deserialize_own_rank`.

        Returns:
            Why no rank takes it, in one line; None if all do.
        """
        self._opened, problem = self.open_together(recv_req)
        return problem

    def deserialize_own_rank(self, serialized_named_tensors: Any) -> Any:
        # LoRA adapters, for which SGLang calls this too, are refused.
        opened, self._opened = self._opened, None
        return opened


def init_backend(model_runner: Any) -> None:
    """Make the attention backend for the runner's model and pool."""
    model_runner.init_attention_backends()


def capture(model_runner: Any, sizes: Sequence[int]) -> None:
    """Capture decode graphs of batches of these ``sizes``."""
    with assigned(get_exec().graph.cuda_graph_config.decode, bs=list(sizes)):
        model_runner.init_decode_cuda_graph()


def set_allocator(model_runner: Any, allocator: Any) -> None:
    """Do nothing: the runner's allocator becomes another's where the scheduler's does (``rank.set_allocator``)."""


def set_pool(worker: Any, model_runner: Any, allocator: Any) -> None:
    """Have worker and runner take slots from ``allocator``, which theirs becomes where the scheduler's does."""
    assign(model_runner, max_total_num_tokens=allocator.size)
