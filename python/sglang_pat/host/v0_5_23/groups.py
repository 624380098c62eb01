"""SGLang's groups, ranks and sizes: in its ``ParallelContext``, which layers and schedulers read on each call."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.runtime_context import get_parallel

from sglang_pat.host.assign import assign

FOLLOWING = ("tp", "attn_tp", "moe_tp")
"""Dimensions of the context that follow the layout: each has a group, a rank and a size."""

SINGLE = ("pp", "attn_cp", "moe_dp", "moe_ep")
"""Dimensions that are always of one rank (the degrees refused at start)."""


def set_global_groups(tp: GroupCoordinator, single: GroupCoordinator) -> None:
    """Make this process a rank of ``tp``.

    SGLang checks that groups, ranks and sizes agree, so all are set at once.  CUDA graphs are captured in the groups
    that ``parallel_state`` has beside the context.
    """
    values: dict[str, Any] = {"shared_experts_tp_group": tp}
    for name in FOLLOWING:
        values |= {f"{name}_group": tp, f"{name}_rank": tp.rank_in_group, f"{name}_size": tp.world_size}
    for name in SINGLE:
        values[f"{name}_group"] = single
    get_parallel().override_permanently(**values)
    globals_ = {f"_{name.upper()}": tp for name in (*FOLLOWING, "shared_experts_tp")}
    assign(parallel_state, **globals_, **{f"_{name.upper()}": single for name in SINGLE})


def set_scheduler_group(scheduler: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make ``scheduler`` a rank of this group, where only this version keeps it."""
    assign(scheduler.weight_updater, tp_cpu_group=group.cpu_group)


def set_runner_group(worker: Any, runner: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make a worker and its model runner rank ``tp_rank`` of this group, where they do not ask the context."""
    assign(runner.load_config, tp_rank=tp_rank)


def get_place(scheduler: Any) -> tuple[int, int]:
    """TP rank and degree of the scheduler."""
    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size
