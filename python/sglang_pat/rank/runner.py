"""SGLang's model runner and TP worker, on one world of N ranks instead of one world per replica."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import (
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import LocalSerializedTensor, ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils import MultiprocessingSerializer, get_available_gpu_memory, monkey_patch_p2p_access_check
from sglang.srt.utils.network import NetworkAddress
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

from sglang_pat.config import AdaptiveConfig
from sglang_pat.cpu import rendezvous, shm
from sglang_pat.fixes import grammars
from sglang_pat.launch import sharing
from sglang_pat.rank import updates
from sglang_pat.rank.groups import GroupPool
from sglang_pat.rank.shared_memory import open_patiently
from sglang_pat.rank.weights import build_model


def leave_a_choice(logits: torch.Tensor) -> None:
    """Let rows in which a request forbids every token choose from all: SGLang's sampler dies of them.

    A grammar and ``min_new_tokens`` can do that together; the grammar then aborts the request.

    Args:
        logits: float ``[requests, vocab]``, changed in place; on CUDA nothing is waited for.
    """
    empty = ~torch.isfinite(logits.amax(dim=-1, keepdim=True))
    if logits.is_cuda or empty.any():
        logits.masked_fill_(empty, 0.0)


class AdaptiveModelRunner(ModelRunner):
    """A ``ModelRunner`` whose groups come from a pool over all N ranks.

    Life cycle: constructed in the base layout; ``sglang_pat.rank.layouts`` then points its
    model, sampler, attention backend, graphs and KV pool at those of the layout in force.
    """

    def __init__(self, *, adaptive: AdaptiveConfig, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = adaptive
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)

    def _preprocess_logits(self, logits_output: LogitsProcessorOutput, sampling_info: SamplingBatchInfo) -> None:
        grammars.guard(sampling_info)
        super()._preprocess_logits(logits_output, sampling_info)
        orchestrator = sampling_info.penalizer_orchestrator  # None with overlap scheduling, which has sums of them
        penalized = sampling_info.acc_additive_penalties is not None or (orchestrator and orchestrator.is_required)
        if sampling_info.grammars or sampling_info.logit_bias is not None or penalized:
            leave_a_choice(logits_output.next_token_logits)

    def init_threads_binding(self) -> None:
        """Share the cores out over the N ranks (SGLang knows the ranks of one replica only)."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // self.adaptive.num_ranks)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
        if len(cores) >= self.adaptive.num_ranks:
            os.sched_setaffinity(0, cores[self.rank * share : (self.rank + 1) * share])

    def init_torch_distributed(self) -> float:
        """One world of N ranks with pooled groups; returns the free memory before loading, in GB."""
        sharing.share(self.rank)
        shm.register()
        rendezvous.register()
        torch.get_device_module(self.device).set_device(self.gpu_id)
        meeting = rendezvous.url(self.dist_port) if self.dist_port else rendezvous.url_in(self.folder)
        if self.server_args.dist_init_addr:
            meeting = NetworkAddress.parse(self.server_args.dist_init_addr).to_tcp()
        on_cuda = self.device == "cuda"
        if on_cuda:
            monkey_patch_p2p_access_check()  # as SGLang does, and in place of a check that is refused (flags.py)
        parallel_state.set_custom_all_reduce(on_cuda and not self.server_args.disable_custom_all_reduce)
        parallel_state.init_distributed_environment(
            backend="nccl" if on_cuda else "gloo",
            world_size=self.adaptive.num_ranks,
            rank=self.rank,
            local_rank=self.gpu_id,
            distributed_init_method=meeting,
            timeout=self.server_args.dist_timeout,
        )
        self.groups = GroupPool(self.adaptive.layouts, self.rank, self.gpu_id, self.device)
        base = self.adaptive.base
        self.groups.install(base)
        initialize_dp_attention(server_args=self.server_args, model_config=self.model_config)
        self.tp_group = self.attention_tp_group = self.groups.tp_group(base)
        self.pp_group = self.groups.single()
        return get_available_gpu_memory(
            self.device,
            self.gpu_id,
            distributed=self.adaptive.num_ranks > 1,
            cpu_group=parallel_state.get_world_group().cpu_group,
        )


class AdaptiveTpModelWorker(TpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    def __init__(self, *, adaptive: AdaptiveConfig, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = adaptive
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)
        runner = self.model_runner
        runner.groups.use_shared_memory_for_control()
        empty = build_model(runner.model_config, runner.load_config, runner.device)
        self.expected = updates.Expected(empty, partial(updates.checkpoint_names, runner.model_config.model_path))

    def _init_model_runner(self) -> None:
        self._model_runner = AdaptiveModelRunner(
            adaptive=self.adaptive,
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

    # -- weight updates: all of a request on all ranks, or nothing ------------------------------------

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """SGLang's, on all ranks together."""
        tensors, problem = None, None
        try:
            monkey_patch_torch_reductions()
            open_patiently()
            tensors = self._opened(recv_req)
            if (given := updates.shapes(tensors, recv_req.load_format)) is not None:
                problem = self.expected.problem(given, recv_req.load_format)
        except Exception as error:  # the other ranks wait to hear of it
            problem = updates.refused(error)
        wrong = torch.tensor([problem is not None], dtype=torch.int32)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self.model_runner.groups.world)
        if wrong.item():
            return False, problem or ""
        return self.model_runner.update_weights_from_tensor(tensors, recv_req.load_format)

    def _opened(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        """What the request has for this rank."""
        items = recv_req.serialized_named_tensors
        if len(items) <= self.rank:
            raise ValueError(f"{len(items)} items for {self.adaptive.num_ranks} ranks, must be one for each")
        tensors = MultiprocessingSerializer.deserialize(items[self.rank])
        if recv_req.load_format == "flattened_bucket":
            return tensors
        return [
            (name, tensor.get(self.rank) if isinstance(tensor, LocalSerializedTensor) else tensor)
            for name, tensor in tensors
        ]

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> tuple[bool, str]:
        """SGLang's; what does not fit is received all the same, since its sender waits for us."""
        try:
            problem = self.expected.problem(zip(recv_req.names, recv_req.shapes, strict=True))
        except Exception as error:
            problem = updates.refused(error)
        runner = self.model_runner
        model, runner.model = runner.model, updates.Receiver(runner.model, problem)
        try:
            success, message = super().update_weights_from_distributed(recv_req)
            loaded = runner.model.loaded
        finally:
            runner.model = model
        if success or loaded:
            return success, message
        return False, problem or updates.not_received(message)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> tuple[bool, str]:
        """SGLang's; nothing is loaded from the first bucket on that does not fit."""
        runner = self.model_runner
        model = runner.model
        buckets = runner.model = updates.Buckets(model, self.expected)
        try:
            success, message = super().update_weights_from_ipc(recv_req)
        finally:
            runner.model = model
        return success, message if success else buckets.problem or message
