"""The group of a rank: where SGLang keeps groups, ranks and sizes, and how it makes the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed.parallel_state import GroupCoordinator, init_model_parallel_group

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign

# -- SGLang's coordinators ---------------------------------------------------------------------------------------------


def make_coordinator(
    groups: list[list[int]], local_device: int, backend: str, for_graphs: bool, name: str
) -> GroupCoordinator:
    """Make the one of ``groups`` that has this rank; all ranks together.

    Args:
        for_graphs: whether it gets SGLang's communicator for CUDA graphs.
    """
    return init_model_parallel_group(groups, local_device, backend, for_graphs, group_name=name)


def make_single_coordinator(num_ranks: int, local_device: int, backend: str, for_graphs: bool) -> GroupCoordinator:
    """Make a group of this rank alone; all ranks together."""
    alone = [[rank] for rank in range(num_ranks)]
    single = make_coordinator(alone, local_device, backend, for_graphs, "single")
    # Some models of SGLang's (Phi, StarCoder2) take the pipeline group's rank in the world for their stage.
    assign(single, rank=0, ranks=[0])
    return single


def reduce_once(group: GroupCoordinator, sizes: Sequence[int], dtype: torch.dtype) -> None:
    """Reduce tensors of ``sizes`` bytes, as a model of this type does; on a CPU the first of them only."""
    if group.world_size == 1:
        return
    for size in sizes if group.device.type != "cpu" else sizes[:1]:
        group.all_reduce(torch.zeros(size // dtype.itemsize, dtype=dtype, device=group.device))


def take_first_ranks(group: GroupCoordinator, tensor: torch.Tensor) -> torch.Tensor:
    """The ``tensor`` of the first rank of the group, on all its ranks."""
    return group.broadcast(tensor)


def set_control_group(group: GroupCoordinator, control: dist.ProcessGroup) -> None:
    """Send SGLang's broadcast of requests, once a step, through ``control``."""
    assign(group, cpu_group=control)


def get_device_group(group: GroupCoordinator) -> dist.ProcessGroup:
    return group.device_group


# -- which of them are in force ----------------------------------------------------------------------------------------


def set_scheduler_group(scheduler: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make ``scheduler`` rank ``tp_rank`` of this group of ``tp`` ranks: wherever it keeps a group, a rank or a
    size."""
    control = group.cpu_group
    assign(
        scheduler,
        tp_size=tp,
        tp_group=group,
        attn_tp_group=group,
        dp_tp_group=group,
        tp_cpu_group=control,
        attn_tp_cpu_group=control,
        dp_tp_cpu_group=control,
    )
    adapter.rank.set_scheduler_group(scheduler, group, tp_rank, tp)
    assign(
        scheduler.grammar_manager,
        grammar_sync_group=group.cpu_group,
        grammar_sync_size=group.world_size,
        grammar_sync_entry=group.first_rank,
        is_grammar_sync_entry=group.is_first_rank,
    )


def get_place(scheduler: Any) -> tuple[int, int]:
    """TP rank and degree of the scheduler."""
    return adapter.rank.get_place(scheduler)


def get_control_group(scheduler: Any) -> dist.ProcessGroup:
    """The group through which the scheduler's ranks broadcast requests."""
    return scheduler.tp_cpu_group
