"""SGLang's model runner and TP worker, on one world of N ranks instead of one world per replica, and its groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator, init_model_parallel_group
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer
from sglang.srt.utils import get_available_gpu_memory, monkey_patch_p2p_access_check
from sglang.srt.utils.network import NetworkAddress

from sglang_pat.cpu import rendezvous, shm
from sglang_pat.host import sharing
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.fixes.grammars import MendedModelRunner
from sglang_pat.host.fixes.weight_updates import WholeUpdatesTpModelWorker
from sglang_pat.layout import ParallelLayout, exchange_groups, get_exchange_degrees
from sglang_pat.rank.routed_experts import RoutedExperts
from sglang_pat.rank.weights import Unsupported, build_model
from sglang_pat.switch.plan import compute_kv_head_range

TP_GLOBALS = ("_TP", "_ATTN_TP", "_MOE_TP")
"""Globals of ``parallel_state`` that follow the layout."""

SINGLE_GLOBALS = ("_PP", "_ATTN_CP", "_MOE_DP", "_MOE_EP")
"""Globals of ``parallel_state`` that are always groups of one rank (the degrees refused at start)."""

REDUCED = (4 << 10, 1 << 20, 8 << 20, 32 << 20)
"""Bytes of reductions that use once all that SGLang reduces with on a GPU: the kernel of its custom all-reduce that
pushes, the one that pulls (above 160 KB to 4 MB, by ranks and GPU), and NCCL (above 16 MB).  The two kernels are
compiled on first use, which takes tens of seconds."""


class GroupPool:
    """All process groups of a rank, for the life of the engine (PAT section 4.3, "Communication Group Pool").

    Everything is created in ``__init__``, by every rank in the same order, so a switch creates nothing.  One exception:
    the groups of ``--pat-kv-exchange allgather`` are made on first use, as in the paper.
    """

    def __init__(self, layouts: tuple[ParallelLayout, ...], rank: int, local_device: int, device: str) -> None:
        self.rank = rank
        backend = self._backend = "nccl" if device == "cuda" else shm.BACKEND
        own_nccl = backend == "nccl"  # SGLang's communicator for graphs
        shm.register()
        ranks = range(layouts[0].num_ranks)
        # Control traffic of all ranks together: votes, capsules, reports.
        self.world = dist.new_group(list(ranks), backend=shm.BACKEND)
        alone = [[rank] for rank in ranks]
        self._single = init_model_parallel_group(alone, local_device, backend, own_nccl, group_name="single")
        # Some models of SGLang's (Phi, StarCoder2) take the pipeline group's rank in the world for their stage.
        self._single.rank, self._single.ranks = 0, [0]
        self._tp: dict[int, GroupCoordinator] = {}
        self._control: dict[int, dist.ProcessGroup] = {}
        self._gather: dict[int, dist.ProcessGroup] = {}
        for layout in layouts:
            self._tp[layout.tp] = init_model_parallel_group(
                layout.groups(), local_device, backend, own_nccl, group_name=f"tp{layout.tp}"
            )
            self._control[layout.tp] = self._make_group(layout.groups(), shm.BACKEND)
        self._exchange: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
        for i, low in enumerate(layouts):
            for high in layouts[i + 1 :]:
                groups = exchange_groups(low, high)
                mine = next(group for group in groups if rank in group)
                self._exchange[low.tp, high.tp] = (self._make_group(groups, backend), mine)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Reduce in every TP group as a model of this type does, in each way: nothing is made or compiled later on."""
        for coordinator in self._tp.values():
            if coordinator.world_size == 1:
                continue
            for size in REDUCED if coordinator.device.type != "cpu" else REDUCED[:1]:
                coordinator.all_reduce(torch.zeros(size // dtype.itemsize, dtype=dtype, device=coordinator.device))

    def _make_group(self, groups: list[list[int]], backend: str) -> dist.ProcessGroup:
        mine = None
        for ranks in groups:
            group = dist.new_group(ranks, backend=backend)
            if self.rank in ranks:  # else torch gives a number
                mine = cast("dist.ProcessGroup", group)
        assert mine is not None
        return mine

    def get_tp_group(self, layout: ParallelLayout) -> GroupCoordinator:
        return self._tp[layout.tp]

    def get_single_group(self) -> GroupCoordinator:
        return self._single

    def exchange_group(self, a: ParallelLayout, b: ParallelLayout) -> tuple[dist.ProcessGroup, list[int]]:
        """Process group and ranks among which this rank exchanges KV between ``a`` and ``b``."""
        return self._exchange[get_exchange_degrees(a, b)]

    def get_larger_group(self, a: ParallelLayout, b: ParallelLayout) -> tuple[dist.ProcessGroup, list[int]]:
        """This rank's group of the higher degree and its ranks, for PAT's all-gather; made on first use, as PAT does.

        All N ranks must call it together.
        """
        layout = max(a, b)
        if layout.tp not in self._gather:
            self._gather[layout.tp] = self._make_group(layout.groups(), self._backend)
        return self._gather[layout.tp], layout.group(layout.group_of(self.rank))

    def use_shared_memory_for_control(self) -> None:
        """Send SGLang's per-step request broadcast through shared memory instead of gloo.

        Only after the model is loaded: SGLang's loader calls ``monitored_barrier``, which gloo alone has.
        """
        for tp, coordinator in self._tp.items():
            coordinator.cpu_group = self._control[tp]

    def install(self, layout: ParallelLayout) -> None:
        """Point SGLang's group globals at the pooled groups of ``layout``."""
        for name in TP_GLOBALS:
            setattr(parallel_state, name, self._tp[layout.tp])
        for name in SINGLE_GLOBALS:
            setattr(parallel_state, name, self._single)


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
        """Ours, with a row for each slot of the layout that has most of them; all ranks together."""
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
        """Tokens of a step at most."""
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
        """One world of N ranks with pooled groups; returns the free memory before loading, in GB."""
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


class AdaptiveTpModelWorker(WholeUpdatesTpModelWorker):
    """A ``TpModelWorker`` around an :class:`AdaptiveModelRunner`."""

    def __init__(self, *, rank: int, folder: Path, **kwargs) -> None:
        self.rank = rank
        self.folder = folder
        super().__init__(**kwargs)
        runner = self.model_runner
        runner.groups.use_shared_memory_for_control()
        self.expect(build_model(runner.model_config, runner.load_config, runner.device))

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
