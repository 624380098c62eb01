"""Objects that a rank needs to run in each layout, built once and switched to by assignment (:class:`Layouts`).

Model object, sampler, attention backend, CUDA graphs and KV pool view all capture group sizes or
head counts when they are constructed (docs/sglang.md), so each layout has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_pat.cpu.windows import Windows
from sglang_pat.errors import Unsupported, format_one_line
from sglang_pat.host import adapter, groups, kv, runner
from sglang_pat.host.layers import compile_layers
from sglang_pat.host.runner import LayoutParts
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.shard_check import check_heads, check_shards
from sglang_pat.rank.weights import Views, reshard
from sglang_pat.switch.plan import compute_kv_head_range
from sglang_pat.switch.transfer import synchronize

logger = logging.getLogger(__name__)


@dataclass
class LayoutRuntime:
    """One layout on one rank.

    Attributes:
        parts: SGLang's objects of the layout.
        views: places of the weights in the base shards; None for the base layout and in reshard mode.
        kv: view of the one KV allocation, ``[slots, local KV heads, head dim]`` per layer.
        capacity: number of KV slots.
    """

    layout: ParallelLayout
    parts: LayoutParts
    views: Views | None
    kv: kv.KvBuffers
    capacity: int

    @property
    def model(self) -> torch.nn.Module:
        return self.parts.model

    @property
    def has_graphs(self) -> bool:
        return self.parts.has_graphs


class Layouts:
    """All layouts of a rank; :attr:`current` is the one the runner is pointed at.

    Attributes:
        layout: the layout in force; unlike ``current.layout`` it says which ranks are lent.
        groups: the process groups of all layouts.
        device: this rank's device; ``dtype``: the model's type.
        routed_experts: rows of routed experts, if clients may ask for them.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.runner = runner.get_runner(worker)
        self.config = self.runner.adaptive
        self.rank = self.runner.rank
        self.groups, self.routed_experts = self.runner.groups, self.runner.routed_experts
        self.device, self.dtype, self.kv_heads = runner.describe(self.runner)
        self.weight_version = 0
        """Number of weight updates so far, which all ranks must have counted alike."""
        base = self.config.base
        if why := runner.find_reason_against(self.runner):
            raise Unsupported(f"--adaptive-tp does not support this model: {why}")
        parts = runner.read_parts(self.runner)
        self._check(parts.model, base)
        compile_layers(parts.model, self.device)
        self._runtimes = {base.tp: self._make_runtime(base, parts, None)}
        self._said_without_graph: set[int] = set()
        self.current, self.layout = self._runtimes[base.tp], base
        self.windows = self._make_windows()
        for layout in self.config.layouts[1:]:
            self._runtimes[layout.tp] = self._build(layout)
            self.install(base)
        self.kv_totals = {tp: runtime.capacity for tp, runtime in self._runtimes.items()}

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
        """Make the windows that KV goes through in a switch; None where the groups' own all-to-all carries it."""
        if self.device != "cpu" or self.config.kv_exchange != "direct":
            return None
        buffers, degrees = self.base.kv, [layout.tp for layout in self.config.layouts]
        # With more ranks than KV heads a rank may send the same heads to several.
        most = (buffers.k[0].nbytes + buffers.v[0].nbytes) * (degrees[-1] // degrees[0])
        try:
            return Windows(self.groups.world, most)
        except OSError as error:
            logger.warning("switches go through copies, ranks do not see each other's memory: %s", error)
            return None

    def _make_runtime(self, layout: ParallelLayout, parts: LayoutParts, views: Views | None) -> LayoutRuntime:
        return LayoutRuntime(
            layout=layout,
            parts=parts,
            views=views,
            kv=kv.read_buffers(parts.kv_pool),
            capacity=kv.count_slots(parts.allocator),
        )

    def _build(self, layout: ParallelLayout) -> LayoutRuntime:
        base = self.base
        self._set_group(layout)
        model = self._build_model(layout)
        self._check(model, layout)
        views = None if self.resharding else Views(model, base.model, layout, self.config.base, self.rank)
        compile_layers(model, self.device)
        _, base_heads = compute_kv_head_range(self.kv_heads, self.config.base, self.rank)
        _, heads = compute_kv_head_range(self.kv_heads, layout, self.rank)
        pool, allocator = kv.make_view(base.parts.kv_pool, base.parts.allocator, base_heads // heads)
        parts = runner.build_parts(self.runner, model, pool, allocator, self._get_graph_sizes(layout.tp))
        return self._make_runtime(layout, parts, views)

    def _build_model(self, layout: ParallelLayout) -> torch.nn.Module:
        """Build SGLang's model for ``layout``, whose groups are installed; SGLang may refuse the degree."""
        try:
            return runner.build_model(self.runner)
        except Exception as error:
            why = f"{type(error).__name__}: {format_one_line(error)}"
            advice = f"leave tp={layout.tp} out of --pat-candidates"
            raise Unsupported(
                f"--adaptive-tp: SGLang cannot build this model at tp={layout.tp} ({why}): {advice}"
            ) from error

    def _get_graph_sizes(self, tp: int) -> Sequence[int]:
        return runner.get_graph_sizes(self.runner, tp)

    def list_largest_graphs(self) -> list[int]:
        """Number of requests of the largest CUDA graph of each layout that has graphs."""
        return [max(sizes) for tp in self._runtimes if (sizes := self._get_graph_sizes(tp))]

    def _set_group(self, layout: ParallelLayout) -> None:
        self.groups.install(layout)
        group = self.groups.get_tp_group(layout)
        adapter.rank.set_runner_group(self.worker, self.runner, group, layout.tp_rank(self.rank), layout.tp)

    def get_largest_graph(self) -> int | None:
        """Number of requests of the largest CUDA graph of the layout in force; None if it has no graphs."""
        return max(self._get_graph_sizes(self.current.layout.tp)) if self.current.has_graphs else None

    def log_missing_graph(self, batch: int) -> None:
        """Log, once for each layout, that a decode step of ``batch`` requests is larger than the layout's graphs."""
        tp = self.current.layout.tp
        largest = self.get_largest_graph()
        if largest is None or batch <= largest or tp in self._said_without_graph:
            return
        self._said_without_graph.add(tp)
        logger.warning(
            "tp%d: steps of more than %d requests, as now of %d, run without a CUDA graph, which takes several times "
            "as long: give %s with the sizes that all layouts are to have",
            tp, largest, batch, adapter.arguments.GRAPH_SIZES_FLAG,
        )  # fmt: skip

    def prepare(self, layout: ParallelLayout) -> None:
        """Make sure that ``layout`` sees the present weights; decoding may go on meanwhile.

        Raises:
            RuntimeError: an update has replaced weights that this layout's CUDA graphs read at the old address.
        """
        runtime = self[layout]
        if runtime.views is not None and runtime.views.have_moved():
            if runtime.has_graphs:
                raise RuntimeError(f"a weight update has moved weights that the CUDA graphs of tp={layout.tp} read")
            runtime.views.refresh()

    def reshard(self, old: ParallelLayout, new: ParallelLayout) -> None:
        """Reshard mode: move the weights from ``old`` to ``new``; all ranks together."""
        group = groups.get_device_group(self.groups.get_tp_group(old))
        reshard(self[old].model, self[new].model, old, new, self.rank, group)
        synchronize(self.device)

    def install(self, layout: ParallelLayout) -> LayoutRuntime:
        """Point SGLang's groups, runner and worker at ``layout``."""
        runtime = self[layout]
        self._set_group(layout)
        runner.install_parts(self.worker, self.runner, runtime.parts)
        self.current, self.layout = runtime, layout
        return runtime
