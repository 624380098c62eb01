"""SGLang's model runner and TP worker, on one world of N ranks instead of one world per replica."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.utils import get_available_gpu_memory, monkey_patch_p2p_access_check
from sglang.srt.utils.network import NetworkAddress

from sglang_pat.comm import rendezvous, shm
from sglang_pat.config import AdaptiveConfig
from sglang_pat.fixes.grammars import MendedModelRunner
from sglang_pat.fixes.weight_updates import WholeUpdatesTpModelWorker
from sglang_pat.launch import sharing
from sglang_pat.rank.groups import GroupPool
from sglang_pat.rank.weights import build_model


class AdaptiveModelRunner(MendedModelRunner):
    """A ``ModelRunner`` whose groups come from a pool over all N ranks.

    Life cycle: constructed in the base layout; ``sglang_pat.rank.layouts`` then points its
    model, sampler, attention backend, graphs and KV pool at those of the layout in force.
    """

    def __init__(self, *, adaptive: AdaptiveConfig, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = adaptive
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)

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


class AdaptiveTpModelWorker(WholeUpdatesTpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    def __init__(self, *, adaptive: AdaptiveConfig, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = adaptive
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)
        runner = self.model_runner
        runner.groups.use_shared_memory_for_control()
        self.expect(build_model(runner.model_config, runner.load_config, runner.device))

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
