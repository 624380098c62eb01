"""All process groups of a rank, for every layout (:class:`GroupPool`)."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from sglang_pat.cpu import shm
from sglang_pat.host import adapter
from sglang_pat.host import groups as host
from sglang_pat.layout import ParallelLayout, exchange_groups, get_exchange_degrees

REDUCED = (4 << 10, 1 << 20, 8 << 20, 32 << 20)
"""Sizes of reductions, in bytes, that use once each way in which SGLang reduces on a GPU: the kernel of its custom
all-reduce that pushes, the one that pulls (above 160 KB to 4 MB, by ranks and GPU), and NCCL (above 16 MB).  The two
kernels are compiled on first use, which takes tens of seconds."""


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
        self._single = host.make_single_coordinator(len(ranks), local_device, backend, own_nccl)
        self._tp: dict[int, Any] = {}
        """SGLang's ``GroupCoordinator`` of this rank, by degree."""
        self._control: dict[int, dist.ProcessGroup] = {}
        self._gather: dict[int, dist.ProcessGroup] = {}
        for layout in layouts:
            self._tp[layout.tp] = host.make_coordinator(
                layout.groups(), local_device, backend, own_nccl, f"tp{layout.tp}"
            )
            self._control[layout.tp] = self._make_group(layout.groups(), shm.BACKEND)
        self._exchange: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
        for i, low in enumerate(layouts):
            for high in layouts[i + 1 :]:
                groups = exchange_groups(low, high)
                members = next(group for group in groups if rank in group)
                self._exchange[low.tp, high.tp] = (self._make_group(groups, backend), members)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Reduce in every TP group as a model of this type does, in each way: nothing is made or compiled later on."""
        for coordinator in self._tp.values():
            host.reduce_once(coordinator, REDUCED, dtype)

    def _make_group(self, groups: list[list[int]], backend: str) -> dist.ProcessGroup:
        own_group = None
        for ranks in groups:
            group = dist.new_group(ranks, backend=backend)
            if self.rank in ranks:  # else torch gives a number
                own_group = cast("dist.ProcessGroup", group)
        assert own_group is not None
        return own_group

    def get_tp_group(self, layout: ParallelLayout) -> Any:
        return self._tp[layout.tp]

    def get_single_group(self) -> Any:
        return self._single

    def exchange_group(self, a: ParallelLayout, b: ParallelLayout) -> tuple[dist.ProcessGroup, list[int]]:
        """Process group and ranks among which this rank exchanges KV in a switch from ``a`` to ``b``."""
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
            host.set_control_group(coordinator, self._control[tp])

    def install(self, layout: ParallelLayout) -> None:
        """Point SGLang's group globals at the pooled groups of ``layout``."""
        adapter.rank.set_global_groups(self._tp[layout.tp], self._single)
