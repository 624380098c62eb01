"""SGLang's model runner and TP worker, which join the world and make the groups when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.managers.io_struct import (
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner import LocalSerializedTensor, ModelRunner
from sglang.srt.utils import get_available_gpu_memory

from sglang_pat.host import runner
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.fixes.grammars import MendedModelRunner
from sglang_pat.host.fixes.weight_updates import ExpectingTpModelWorker

__all__ = ["LocalSerializedTensor"]

RESOURCE_MAKERS = (
    (dist, "new_group"),
    (MHATokenToKVPool, "__init__"),
    (ModelRunner, "init_device_graphs"),
    (ModelRunner, "init_attention_backend"),
)
"""Functions that make process groups, pools and graphs, and so a second copy of their memory."""


class AdaptiveModelRunner(runner.RankParts, MendedModelRunner):
    """A ``ModelRunner`` with :class:`~sglang_pat.host.runner.RankParts`."""

    def __init__(self, *, server_args: AdaptiveServerArgs, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self.folder = folder
        super().__init__(server_args=server_args, **kwargs)

    def init_threads_binding(self) -> None:
        """Share the cores out over the N ranks (SGLang knows the ranks of one replica only)."""
        runner.share_cores(self.adaptive.num_ranks, self.rank)

    def init_torch_distributed(self) -> float:
        """Join one world of N ranks, with pooled groups; returns the free memory before loading, in GB."""
        args, base = self.server_args, self.adaptive.base
        meeting = runner.find_meeting(args.dist_init_addr, self.dist_port, self.folder)
        self.groups = runner.join_world(
            self.adaptive,
            self.rank,
            self.gpu_id,
            self.device,
            meeting,
            args.disable_custom_all_reduce,
            args.dist_timeout,
        )
        initialize_dp_attention(server_args=args, model_config=self.model_config)
        self.tp_group = self.attention_tp_group = self.groups.get_tp_group(base)
        self.pp_group = self.groups.get_single_group()
        return get_available_gpu_memory(
            self.device,
            self.gpu_id,
            distributed=self.adaptive.num_ranks > 1,
            cpu_group=parallel_state.get_world_group().cpu_group,
        )


class AdaptiveTpModelWorker(ExpectingTpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    def __init__(self, *, rank: int, folder: Path, **kwargs) -> None:
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)
        self.model_runner.groups.use_shared_memory_for_control()
        self.expect(runner.build_model(self.model_runner))

    def _init_model_runner(self) -> None:
        self._model_runner = AdaptiveModelRunner(
            rank=self.rank,
            folder=self.folder,
            model_config=self.model_config,
            mem_fraction_static=self.server_args.mem_fraction_static,
            gpu_id=self.gpu_id,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            moe_ep_rank=self.moe_ep_rank,
            moe_ep_size=self.ep_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            nccl_port=self.nccl_port,
            dp_rank=self.dp_rank,
            server_args=self.server_args,
            is_draft_worker=self.is_draft_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            memory_pool_config=self.memory_pool_config,
        )

    # -- updates, of which all ranks of the engine take all tensors, or none does ----------------------

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Update as SGLang does, on all ranks together."""
        tensors, problem = self.open_together(recv_req)
        if problem is not None:
            return False, problem
        return self.model_runner.update_weights_from_tensor(tensors, recv_req.load_format)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> tuple[bool, str]:
        """Update as SGLang does; what does not fit is received all the same, since its sender waits for us."""
        with self.use_receiver() as received:
            received.check_lengths(recv_req.names, recv_req.shapes)
            success, message = super().update_weights_from_distributed(recv_req)
        return success, received.describe(success, message)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> tuple[bool, str]:
        """Update as SGLang does; nothing is loaded from the first bucket on that does not fit."""
        with self.use_receiver() as received:
            success, message = super().update_weights_from_ipc(recv_req)
        return success, message if success else received.problem or message


def init_backend(model_runner: Any) -> None:
    """Make the attention backend for the runner's model and pool."""
    model_runner.init_attention_backend()


def capture(model_runner: Any, sizes: Sequence[int]) -> None:
    """Capture decode graphs of batches of these ``sizes``."""
    with assigned(model_runner.server_args, cuda_graph_bs=list(sizes)):  # SGLang adds to it
        model_runner.init_device_graphs()


def set_allocator(model_runner: Any, allocator: Any) -> None:
    """Have the runner take slots from ``allocator``."""
    assign(model_runner, token_to_kv_pool_allocator=allocator)


def set_pool(worker: Any, model_runner: Any, allocator: Any) -> None:
    """Have worker and runner take slots from ``allocator``."""
    set_allocator(model_runner, allocator)
    for owner in (model_runner, worker):
        assign(owner, max_total_num_tokens=allocator.size)
