"""SGLang's model runner and TP worker, on one world of N ranks instead of one world per replica; and what of the runner
belongs to a layout.

The classes themselves are the adapter's (``AdaptiveModelRunner``, ``AdaptiveTpModelWorker``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.sampler import create_sampler
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer
from sglang.srt.utils import monkey_patch_p2p_access_check
from sglang.srt.utils.network import NetworkAddress

from sglang_pat.config import AdaptiveConfig
from sglang_pat.cpu import rendezvous, shm
from sglang_pat.errors import Unsupported
from sglang_pat.host import adapter, kv, layers, sharing
from sglang_pat.host.assign import assign
from sglang_pat.host.features import FeatureTap
from sglang_pat.host.routed_experts import RoutedExperts
from sglang_pat.rank.draft_model import DraftModel, read_config
from sglang_pat.rank.groups import GroupPool
from sglang_pat.speculate.acceptance import MOST_ROWS
from sglang_pat.switch.plan import compute_kv_head_range


class RankParts:
    """What a rank's model runner has beside SGLang's; the adapter's ``AdaptiveModelRunner`` is made of it.

    Its groups come from a pool over all N ranks.  Life cycle: constructed in the base layout; ``rank/layouts.py`` then
    points its model, sampler, attention backend, graphs and KV pool at those of the layout in force.

    Attributes:
        adaptive: what the settings say; ``rank``: number in the engine; ``groups``: the process groups of all layouts.
    """

    adaptive: AdaptiveConfig
    rank: int
    groups: GroupPool

    def load_model(self: Any) -> None:
        super().load_model()  # pyright: ignore[reportAttributeAccessIssue]
        self.draft_model = self.features = None
        if folder := self.adaptive.draft_model:
            self.draft_model, self.features = _load_drafter(self, Path(folder))

    def init_routed_experts_capturer(self: Any) -> None:
        """Make our table of routed experts, with a row for each slot of the largest layout; all ranks together."""
        self.routed_experts = None
        if self.server_args.enable_return_routed_experts:
            assert self.page_size is not None, "SGLang has chosen it"
            kv_heads = self.model_config.get_total_num_kv_heads()
            heads = [compute_kv_head_range(kv_heads, layout, self.rank)[1] for layout in self.adaptive.layouts]
            try:
                self.routed_experts = RoutedExperts(
                    self.model_config,
                    slots=(self.max_total_num_tokens + self.page_size) * (heads[0] // heads[-1]),
                    step=_count_step_tokens(self),
                    device=self.device,
                    group=self.groups.world,
                )
            except OSError as error:
                raise Unsupported(f"--enable-return-routed-experts: {error}") from None
        set_global_experts_capturer(self.routed_experts)


def _load_drafter(runner: Any, folder: Path) -> tuple[DraftModel, FeatureTap]:
    """The trained drafter, and what it learns from, of the model that was just loaded."""
    model_config, args = runner.model_config, runner.server_args
    sizes = [size for of_layout in args.spec.graph_sizes.values() for size in of_layout]
    try:
        config = read_config(folder)
        # The GPU is free of it, too, while the engine sleeps.  Nobody sends it again: it waits in host memory.
        with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True):
            drafter = DraftModel(folder, config, MOST_ROWS, runner.dtype, runner.device)
        layers, rows = config.list_layers(model_config.num_hidden_layers), max([MOST_ROWS, *sizes])
        tap = FeatureTap(layers, model_config.hidden_size, rows, runner.dtype, runner.device)
        tap.attach(runner.model)
        drafter.check(len(layers) * model_config.hidden_size, model_config.hidden_size, model_config.vocab_size)
    except ValueError as error:
        raise Unsupported(f"--pat-draft-model {folder}: {error}") from None
    return drafter, tap


def count_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def get_drafter(runner: Any) -> tuple[DraftModel, FeatureTap]:
    return runner.draft_model, runner.features


def _count_step_tokens(runner: Any) -> int:
    """Most tokens of a step."""
    args = adapter.arguments.read(runner.server_args)
    whole = args.chunked_prefill_size is None or args.chunked_prefill_size <= 0
    prompts = max(args.max_prefill_tokens, runner.model_config.context_len) if whole else args.chunked_prefill_size
    return max(prompts, runner.max_running_requests)


# -- one world of N ranks ----------------------------------------------------------------------------------------------


def share_cores(num_ranks: int, rank: int) -> None:
    """Share the cores out over the ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_ranks)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def find_meeting(address: str | None, port: int | None, folder: Path) -> str:
    """URL at which the ranks meet: the ``address`` that a user gave, or on this machine."""
    if address:
        return NetworkAddress.parse(address).to_tcp()
    return rendezvous.make_url(port) if port else rendezvous.make_file_url(folder)


def join_world(
    config: AdaptiveConfig,
    rank: int,
    gpu_id: int,
    device: str,
    meeting: str,
    disable_custom_all_reduce: bool,
    timeout: int | None,
) -> GroupPool:
    """Join one world of all ranks, with the groups of all layouts; those of the base layout are installed."""
    sharing.allow_sharing(rank)
    shm.register()
    rendezvous.register()
    torch.get_device_module(device).set_device(gpu_id)
    on_cuda = device == "cuda"
    if on_cuda:
        monkey_patch_p2p_access_check()  # as SGLang does, and in place of a check that is refused (flags.py)
    parallel_state.set_custom_all_reduce(on_cuda and not disable_custom_all_reduce)
    parallel_state.init_distributed_environment(
        backend="nccl" if on_cuda else "gloo",
        world_size=config.num_ranks,
        rank=rank,
        local_rank=gpu_id,
        distributed_init_method=meeting,
        timeout=timeout,
    )
    pool = GroupPool(config.layouts, rank, gpu_id, device)
    pool.install(config.base)
    return pool


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


def get_runner(worker: Any) -> Any:
    runner = worker.model_runner
    assert isinstance(runner, RankParts), "it was made here"
    return runner


def describe(runner: Any) -> tuple[str, torch.dtype, int]:
    """The runner's device, and dtype and number of KV heads of the whole model."""
    assert runner.device is not None, "SGLang has chosen it"
    return runner.device, runner.dtype, runner.model_config.get_total_num_kv_heads()


def find_reason_against(runner: Any) -> str | None:
    """Reason why the loaded model cannot cross a switch; None if there is none."""
    windowed = runner.sliding_window_size is not None
    return kv.find_reason_against(runner.token_to_kv_pool) or (
        "its attention has a sliding window" if windowed else None
    )


def get_graph_sizes(runner: Any, tp: int) -> Sequence[int]:
    """Sizes of the batches that get CUDA graphs at degree ``tp``; empty for none."""
    return runner.server_args.spec.graph_sizes[tp]


def build_model(runner: Any) -> torch.nn.Module:
    """Build the runner's model under the groups that are installed now, without memory for parameters."""
    model = layers.build_model(runner.model_config, runner.load_config, runner.device)
    if runner.features is not None:
        runner.features.attach(model)
    return model


def read_parts(runner: Any) -> LayoutParts:
    """The parts that the runner is pointed at."""
    return LayoutParts(
        model=runner.model,
        sampler=runner.sampler,
        attn_backend=runner.attn_backend,
        graph_runner=getattr(runner, adapter.rank.GRAPHS),
        kv_pool=runner.token_to_kv_pool,
        allocator=adapter.rank.copy_allocator(runner.token_to_kv_pool_allocator),
    )


def build_parts(
    runner: Any,
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
    assign(runner, model=model, sampler=create_sampler(), token_to_kv_pool=pool, **{adapter.rank.GRAPHS: None})
    adapter.runner.set_allocator(runner, allocator)
    adapter.runner.init_backend(runner)
    if graph_sizes:
        adapter.runner.capture(runner, graph_sizes)
    return replace(read_parts(runner), allocator=allocator)


def install_parts(worker: Any, runner: Any, parts: LayoutParts) -> None:
    """Point the runner at ``parts``."""
    assign(
        runner,
        model=parts.model,
        sampler=parts.sampler,
        attn_backend=parts.attn_backend,
        token_to_kv_pool=parts.kv_pool,
        **{adapter.rank.GRAPHS: parts.graph_runner},
    )
    adapter.runner.set_pool(worker, runner, parts.allocator)
