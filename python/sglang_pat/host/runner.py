"""SGLang's model runner and TP worker, on one world of N ranks instead of one world per replica; and what of the runner
belongs to a layout.

SGLang 0.5.16 builds ``ModelRunner(ps=...)`` from a frozen ``ParallelState``, has CUDA graphs in ``runner/`` and
``runner_backend/``, and no ``cuda_graph_bs``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.sampler import create_sampler
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer
from sglang.srt.utils import get_available_gpu_memory, monkey_patch_p2p_access_check
from sglang.srt.utils.network import NetworkAddress

from sglang_pat.cpu import rendezvous, shm
from sglang_pat.errors import Unsupported
from sglang_pat.host import adapter, kv, layers, sharing
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.grammars import MendedModelRunner
from sglang_pat.host.routed_experts import RoutedExperts
from sglang_pat.rank.groups import GroupPool
from sglang_pat.switch.plan import compute_kv_head_range

RESOURCE_MAKERS = (
    (dist, "new_group"),
    (MHATokenToKVPool, "__init__"),
    (ModelRunner, "init_device_graphs"),
    (ModelRunner, "init_attention_backend"),
)
"""Functions that make process groups, pools and graphs, and so a second copy of their memory."""


class AdaptiveModelRunner(MendedModelRunner):
    """A ``ModelRunner`` whose groups come from a pool over all N ranks.

    Life cycle: constructed in the base layout; ``sglang_pat.rank.layouts`` then points its
    model, sampler, attention backend, graphs and KV pool at those of the layout in force.
    """

    def __init__(self, *, server_args: AdaptiveServerArgs, rank: int, folder: Path, **kwargs) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self.folder = folder
        super().__init__(server_args=server_args, **kwargs)

    def init_routed_experts_capturer(self) -> None:
        """Make our table of routed experts, with a row for each slot of the largest layout; all ranks together."""
        self.routed_experts: RoutedExperts | None = None
        if self.server_args.enable_return_routed_experts:
            assert self.page_size is not None, "SGLang has chosen it"
            kv_heads = self.model_config.get_total_num_kv_heads()
            heads = [compute_kv_head_range(kv_heads, layout, self.rank)[1] for layout in self.adaptive.layouts]
            try:
                self.routed_experts = RoutedExperts(
                    self.model_config,
                    slots=(self.max_total_num_tokens + self.page_size) * (heads[0] // heads[-1]),
                    step=self._count_step_tokens(),
                    device=self.device,
                    group=self.groups.world,
                )
            except OSError as error:
                raise Unsupported(f"--enable-return-routed-experts: {error}") from None
        set_global_experts_capturer(self.routed_experts)

    def _count_step_tokens(self) -> int:
        """Most tokens of a step."""
        args = self.server_args
        whole = args.chunked_prefill_size is None or args.chunked_prefill_size <= 0
        prompts = max(args.max_prefill_tokens, self.model_config.context_len) if whole else args.chunked_prefill_size
        return max(prompts, self.max_running_requests)

    def init_threads_binding(self) -> None:
        """Share the cores out over the N ranks (SGLang knows the ranks of one replica only)."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // self.adaptive.num_ranks)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
        if len(cores) >= self.adaptive.num_ranks:
            os.sched_setaffinity(0, cores[self.rank * share : (self.rank + 1) * share])

    def init_torch_distributed(self) -> float:
        """Join one world of N ranks, with pooled groups; returns the free memory before loading, in GB."""
        sharing.allow_sharing(self.rank)
        shm.register()
        rendezvous.register()
        torch.get_device_module(self.device).set_device(self.gpu_id)
        meeting = rendezvous.make_url(self.dist_port) if self.dist_port else rendezvous.make_file_url(self.folder)
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
        self.tp_group = self.attention_tp_group = self.groups.get_tp_group(base)
        self.pp_group = self.groups.get_single_group()
        return get_available_gpu_memory(
            self.device,
            self.gpu_id,
            distributed=self.adaptive.num_ranks > 1,
            cpu_group=parallel_state.get_world_group().cpu_group,
        )


class AdaptiveTpModelWorker(adapter.weight_updates.WholeUpdatesTpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    def __init__(self, *, rank: int, folder: Path, **kwargs) -> None:
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)
        runner = self.model_runner
        runner.groups.use_shared_memory_for_control()
        self.expect(build_model(runner))

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


# -- what of the runner belongs to a layout ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutParts:
    """Objects that capture group sizes or head counts when they are made: each layout has its own."""

    model: torch.nn.Module
    sampler: torch.nn.Module
    attn_backend: Any
    graph_runner: Any
    kv_pool: MHATokenToKVPool
    allocator: TokenToKVPoolAllocator

    @property
    def has_graphs(self) -> bool:
        return self.graph_runner is not None


def get_runner(worker: AdaptiveTpModelWorker) -> AdaptiveModelRunner:
    runner = worker.model_runner
    assert isinstance(runner, AdaptiveModelRunner), "it was made here"
    return runner


def describe(runner: AdaptiveModelRunner) -> tuple[str, torch.dtype, int]:
    """The runner's device, and dtype and number of KV heads of the whole model."""
    assert runner.device is not None, "SGLang has chosen it"
    return runner.device, runner.dtype, runner.model_config.get_total_num_kv_heads()


def find_reason_against(runner: AdaptiveModelRunner) -> str | None:
    """Reason why the loaded model cannot cross a switch; None if there is none."""
    windowed = runner.sliding_window_size is not None
    return kv.find_reason_against(runner.token_to_kv_pool) or (
        "its attention has a sliding window" if windowed else None
    )


def get_graph_sizes(runner: AdaptiveModelRunner, tp: int) -> Sequence[int]:
    """Sizes of the batches that get CUDA graphs at degree ``tp``; empty for none."""
    return runner.server_args.spec.graph_sizes[tp]


def build_model(runner: AdaptiveModelRunner) -> torch.nn.Module:
    """Build the runner's model under the groups that are installed now, without memory for parameters."""
    return layers.build_model(runner.model_config, runner.load_config, runner.device)


def read_parts(runner: AdaptiveModelRunner) -> LayoutParts:
    """The parts that the runner is pointed at."""
    return LayoutParts(
        model=runner.model,
        sampler=runner.sampler,
        attn_backend=runner.attn_backend,
        graph_runner=runner.graph_runner,
        kv_pool=runner.token_to_kv_pool,
        allocator=runner.token_to_kv_pool_allocator,
    )


def build_parts(
    runner: AdaptiveModelRunner,
    model: torch.nn.Module,
    pool: MHATokenToKVPool,
    allocator: TokenToKVPoolAllocator,
    graph_sizes: Sequence[int],
) -> LayoutParts:
    """Build the parts of a layout around its ``model`` and ``pool``, under the groups that are installed now.

    The runner is pointed at them.

    Args:
        graph_sizes: sizes of the batches that get CUDA graphs; empty for none.
    """
    assign(
        runner,
        model=model,
        sampler=create_sampler(),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        graph_runner=None,
    )
    runner.init_attention_backend()
    if graph_sizes:
        args = runner.server_args
        saved = args.cuda_graph_bs
        assign(args, cuda_graph_bs=list(graph_sizes))  # SGLang adds to it
        try:
            runner.init_device_graphs()
        finally:
            assign(args, cuda_graph_bs=saved)
    return read_parts(runner)


def install_parts(worker: AdaptiveTpModelWorker, runner: AdaptiveModelRunner, parts: LayoutParts) -> None:
    """Point the runner at ``parts``."""
    assign(
        runner,
        model=parts.model,
        sampler=parts.sampler,
        attn_backend=parts.attn_backend,
        graph_runner=parts.graph_runner,
        token_to_kv_pool=parts.kv_pool,
        token_to_kv_pool_allocator=parts.allocator,
    )
    for owner in (runner, worker):
        assign(owner, max_total_num_tokens=kv.count_slots(parts.allocator))
