"""What a rank needs to run in each layout, built once and switched to by assignment.

Model object, sampler, attention backend, CUDA graphs and KV pool view all capture group sizes or
head counts when they are constructed (docs/sglang.md), so each layout has its own.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.sampler import create_sampler
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_pat.cpu.windows import Windows
from sglang_pat.errors import format_one_line
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.experts import PiecewiseExperts
from sglang_pat.rank.runner import AdaptiveModelRunner, AdaptiveTpModelWorker
from sglang_pat.rank.shard_check import check_heads, check_shards
from sglang_pat.rank.weights import PiecewiseLinear, Unsupported, Views, build_model, reshard
from sglang_pat.switch.plan import compute_kv_head_range
from sglang_pat.switch.transfer import synchronize

logger = logging.getLogger(__name__)


@dataclass
class LayoutRuntime:
    """One layout on one rank.

    Attributes:
        views: where the weights lie in the base shards; None for the base layout and in reshard mode.
        kv_pool: view of the one KV allocation, ``[slots, local KV heads, head dim]`` per layer.
    """

    layout: ParallelLayout
    tp_rank: int
    model: torch.nn.Module
    views: Views | None
    sampler: torch.nn.Module
    attn_backend: Any
    graph_runner: Any
    kv_pool: MHATokenToKVPool
    allocator: TokenToKVPoolAllocator


def make_kv_pool_view(pool: MHATokenToKVPool, ratio: int) -> MHATokenToKVPool:
    """The same bytes with ``ratio`` times the slots and ``1/ratio`` of the heads.

    ``[slots, heads, dim]`` becomes ``[slots * ratio, heads / ratio, dim]``; addresses do not change.
    """
    if ratio == 1:
        return pool
    view = copy.copy(pool)
    view.head_num = pool.head_num // ratio
    view.size = (pool.size + pool.page_size) * ratio - pool.page_size
    view.k_buffer = [_reshape(layer, ratio) for layer in pool.k_buffer]
    view.v_buffer = [_reshape(layer, ratio) for layer in pool.v_buffer]
    view.data_strides = torch.tensor(
        [int(np.prod(x.shape[1:])) * x.dtype.itemsize for x in view.k_buffer + view.v_buffer], device=pool.device
    )
    view.row_dim = view.head_num * view.head_dim
    return view


def _reshape(layer: torch.Tensor, ratio: int) -> torch.Tensor:
    slots, heads, dim = layer.shape
    return layer.view(slots * ratio, heads // ratio, dim)


def _compile(model: torch.nn.Module, device: str) -> None:
    """Have what is compiled on first use compiled now, not in the first step after a switch: SGLang's ``torch.compile``
    of the sharded embedding and of the sum over a token's experts, once for one token and once for several, and our
    products of weights in pieces.

    Not on a CPU, see ``run_rank``.  All ranks of a group together.
    """
    if device == "cpu":
        return
    experts = next((module for module in model.modules() if isinstance(module, FusedMoE)), None)
    with torch.no_grad():
        if experts is not None:  # those of all layers are alike
            _compile_experts(experts, device)
        for module in model.modules():
            if type(module) is VocabParallelEmbedding:
                for tokens in (1, 4):
                    module(torch.zeros(tokens, dtype=torch.int64, device=device))
            elif isinstance(method := _get_method(module), PiecewiseLinear):
                method.compile()


def _compile_experts(experts: FusedMoE, device: str) -> None:
    if isinstance(experts.quant_method, PiecewiseExperts):
        experts.quant_method.compile(experts)
        return
    config = experts.moe_runner_config
    chosen = config.top_k or 0
    if chosen <= 2:  # for which SGLang has another sum
        return
    for tokens in (1, 4):
        each = torch.zeros(tokens, chosen, config.hidden_size, dtype=config.params_dtype, device=device)
        fused_moe.moe_sum_reduce_torch_compile(each, each.new_empty(tokens, config.hidden_size), 1.0)


def _get_method(module: torch.nn.Module) -> Any:
    return getattr(module, "quant_method", None)


class Layouts:
    """All layouts of a rank; :attr:`current` is the one the runner is pointed at.

    Attributes:
        layout: in force; unlike ``current.layout`` it says which ranks are lent.
    """

    def __init__(self, worker: AdaptiveTpModelWorker) -> None:
        self.worker = worker
        self.runner: AdaptiveModelRunner = worker.model_runner
        self.config = self.runner.adaptive
        self.rank = self.runner.rank
        self.weight_version = 0
        """Updates so far, which all ranks must have counted alike."""
        self.kv_heads = self.runner.model_config.get_total_num_kv_heads()
        base = self.config.base
        self._refuse()
        self._check(self.runner.model, base)
        _compile(self.runner.model, self.runner.device)
        self._runtimes = {base.tp: self._make_runtime(base, None)}
        self._said_without_graph: set[int] = set()
        self.current, self.layout = self._runtimes[base.tp], base
        self.windows = self._make_windows()
        for layout in self.config.layouts[1:]:
            self._runtimes[layout.tp] = self._build(layout)
            self.install(base)
        self.kv_totals = {tp: runtime.allocator.size for tp, runtime in self._runtimes.items()}

    def _refuse(self) -> None:
        """Raise :class:`Unsupported` for what only the loaded model tells."""
        pool = self.runner.token_to_kv_pool
        if not isinstance(pool, MHATokenToKVPool):
            raise Unsupported(f"--adaptive-tp does not support this model: its KV pool is a {type(pool).__name__}")
        if self.runner.sliding_window_size is not None:
            raise Unsupported("--adaptive-tp does not support this model: its attention has a sliding window")

    def _check(self, model: torch.nn.Module, layout: ParallelLayout) -> None:
        check_heads(model, layout.tp, self.kv_heads)
        check_shards(model, layout.tp, layout.tp_rank(self.rank))

    def __getitem__(self, layout: ParallelLayout) -> LayoutRuntime:
        return self._runtimes[layout.tp]

    @property
    def base(self) -> LayoutRuntime:
        return self._runtimes[self.config.base.tp]

    @property
    def resharding(self) -> bool:
        return self.config.weights == "reshard"

    def _make_windows(self) -> Windows | None:
        """Where KV goes through in a switch; None where the groups' own all-to-all carries it."""
        if self.runner.device != "cpu" or self.config.kv_exchange != "direct":
            return None
        pool, degrees = self.base.kv_pool, [layout.tp for layout in self.config.layouts]
        # With more ranks than KV heads a rank may send the same heads to several.
        most = (pool.k_buffer[0].nbytes + pool.v_buffer[0].nbytes) * (degrees[-1] // degrees[0])
        try:
            return Windows(self.runner.groups.world, most)
        except OSError as error:
            logger.warning("switches go through copies, ranks do not see each other's memory: %s", error)
            return None

    def _make_runtime(self, layout: ParallelLayout, views: Views | None) -> LayoutRuntime:
        """Of the layout that the runner has been pointed at."""
        runner = self.runner
        return LayoutRuntime(
            layout=layout,
            tp_rank=layout.tp_rank(self.rank),
            model=runner.model,
            views=views,
            sampler=runner.sampler,
            attn_backend=runner.attn_backend,
            graph_runner=runner.graph_runner,
            kv_pool=runner.token_to_kv_pool,
            allocator=runner.token_to_kv_pool_allocator,
        )

    def _build(self, layout: ParallelLayout) -> LayoutRuntime:
        runner, base = self.runner, self.base
        runner.groups.install(layout)
        self._set_ranks(layout)
        model = self._build_model(layout)
        self._check(model, layout)
        views = None if self.resharding else Views(model, base.model, layout, self.config.base, self.rank)
        _compile(model, runner.device)
        _, base_heads = compute_kv_head_range(self.kv_heads, self.config.base, self.rank)
        _, heads = compute_kv_head_range(self.kv_heads, layout, self.rank)
        pool = make_kv_pool_view(base.kv_pool, base_heads // heads)
        allocator = base.allocator
        if pool is not base.kv_pool:
            allocator = TokenToKVPoolAllocator(
                pool.size, base.allocator.dtype, base.allocator.device, pool, base.allocator.need_sort
            )
        runner.model, runner.sampler = model, create_sampler()
        runner.token_to_kv_pool, runner.token_to_kv_pool_allocator = pool, allocator
        runner.init_attention_backend()
        runner.graph_runner = None
        args = runner.server_args
        if sizes := args.spec.graph_sizes[layout.tp]:
            saved, args.cuda_graph_bs = args.cuda_graph_bs, list(sizes)  # SGLang adds to it
            try:
                runner.init_device_graphs()
            finally:
                args.cuda_graph_bs = saved
        return self._make_runtime(layout, views)

    def _build_model(self, layout: ParallelLayout) -> torch.nn.Module:
        """SGLang's for ``layout``, whose groups are installed; it may have its own idea of what can be divided."""
        try:
            return build_model(self.runner.model_config, self.runner.load_config, self.runner.device)
        except Exception as error:
            why = f"{type(error).__name__}: {format_one_line(error)}"
            advice = f"leave tp={layout.tp} out of --pat-candidates"
            raise Unsupported(
                f"--adaptive-tp: SGLang cannot build this model at tp={layout.tp} ({why}): {advice}"
            ) from error

    def _set_ranks(self, layout: ParallelLayout) -> None:
        tp_rank = layout.tp_rank(self.rank)
        group = self.runner.groups.get_tp_group(layout)
        self.runner.tp_group = self.runner.attention_tp_group = group
        for owner in (self.worker, self.runner):
            owner.tp_rank, owner.tp_size = tp_rank, layout.tp
        self.runner.load_config.tp_rank = tp_rank
        self.runner.server_args.tp_size = layout.tp

    def log_missing_graph(self, batch: int) -> None:
        """Log, once for each layout, that a decode step of so many requests is larger than the layout's graphs."""
        tp = self.current.layout.tp
        if self.current.graph_runner is None or tp in self._said_without_graph:
            return
        largest = max(self.runner.server_args.spec.graph_sizes[tp])
        if batch <= largest:
            return
        self._said_without_graph.add(tp)
        logger.warning(
            "tp%d: steps of more than %d requests, as now of %d, run without a CUDA graph, which takes several times "
            "as long: give --cuda-graph-bs with the sizes that all layouts are to have", tp, largest, batch,
        )  # fmt: skip

    def prepare(self, layout: ParallelLayout) -> None:
        """Make sure that ``layout`` sees the present weights; decoding may go on meanwhile.

        Raises:
            RuntimeError: an update has replaced weights that this layout's CUDA graphs read at the old address.
        """
        runtime = self[layout]
        if runtime.views is not None and runtime.views.have_moved():
            if runtime.graph_runner is not None:
                raise RuntimeError(f"a weight update has moved weights that the CUDA graphs of tp={layout.tp} read")
            runtime.views.refresh()

    def reshard(self, old: ParallelLayout, new: ParallelLayout) -> None:
        """Reshard mode: move the weights from ``old`` to ``new``; all ranks together."""
        group = self.runner.groups.get_tp_group(old).device_group
        reshard(self[old].model, self[new].model, old, new, self.rank, group)
        synchronize(self.runner.device)

    def install(self, layout: ParallelLayout) -> LayoutRuntime:
        """Point SGLang's groups, runner and worker at ``layout``."""
        runtime = self[layout]
        runner = self.runner
        runner.groups.install(layout)
        self._set_ranks(layout)
        runner.model, runner.sampler = runtime.model, runtime.sampler
        runner.attn_backend, runner.graph_runner = runtime.attn_backend, runtime.graph_runner
        runner.token_to_kv_pool = runtime.kv_pool
        runner.token_to_kv_pool_allocator = runtime.allocator
        runner.max_total_num_tokens = self.worker.max_total_num_tokens = runtime.allocator.size
        self.current, self.layout = runtime, layout
        return runtime
