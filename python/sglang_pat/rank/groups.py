"""Communication groups: built once, pooled, and pointed at by SGLang's globals (:meth:`GroupPool.install`)."""

from __future__ import annotations

import time
from typing import cast

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator, init_model_parallel_group

from sglang_pat.cpu import shm
from sglang_pat.layout import ParallelLayout, exchange_groups

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
        self._tp: dict[int, GroupCoordinator] = {}
        self._control: dict[int, dist.ProcessGroup] = {}
        self._gather: dict[int, dist.ProcessGroup] = {}
        self.seconds: dict[int, float] = {}
        """Time to make the groups of each degree."""
        for layout in layouts:
            begun = time.perf_counter()
            self._tp[layout.tp] = init_model_parallel_group(
                layout.groups(), local_device, backend, own_nccl, group_name=f"tp{layout.tp}"
            )
            self._control[layout.tp] = self._new_group(layout.groups(), shm.BACKEND)
            self.seconds[layout.tp] = time.perf_counter() - begun
        self._exchange: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
        for i, low in enumerate(layouts):
            for high in layouts[i + 1 :]:
                groups = exchange_groups(low, high)
                mine = next(group for group in groups if rank in group)
                self._exchange[low.tp, high.tp] = (self._new_group(groups, backend), mine)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Reduce in every TP group as a model of this type does, in each way: nothing is made or compiled later on."""
        for coordinator in self._tp.values():
            if coordinator.world_size == 1:
                continue
            for size in REDUCED if coordinator.device.type != "cpu" else REDUCED[:1]:
                coordinator.all_reduce(torch.zeros(size // dtype.itemsize, dtype=dtype, device=coordinator.device))

    def _new_group(self, groups: list[list[int]], backend: str) -> dist.ProcessGroup:
        mine = None
        for ranks in groups:
            group = dist.new_group(ranks, backend=backend)
            if self.rank in ranks:  # else torch gives a number
                mine = cast("dist.ProcessGroup", group)
        assert mine is not None
        return mine

    def tp_group(self, layout: ParallelLayout) -> GroupCoordinator:
        return self._tp[layout.tp]

    def single(self) -> GroupCoordinator:
        return self._single

    def exchange_group(self, a: ParallelLayout, b: ParallelLayout) -> tuple[dist.ProcessGroup, list[int]]:
        """Process group and ranks among which this rank exchanges KV between ``a`` and ``b``."""
        return self._exchange[min(a.tp, b.tp), max(a.tp, b.tp)]

    def larger(self, a: ParallelLayout, b: ParallelLayout) -> dist.ProcessGroup:
        """This rank's group of the higher degree, for PAT's all-gather; made on first use, as PAT does.

        All N ranks must call it together.
        """
        layout = max(a, b)
        if layout.tp not in self._gather:
            self._gather[layout.tp] = self._new_group(layout.groups(), self._backend)
        return self._gather[layout.tp]

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
