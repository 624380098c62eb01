"""SGLang's groups, ranks and sizes: in globals of ``parallel_state``, and copied into scheduler, worker and runner."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator

from sglang_pat.host.assign import assign

TP_GLOBALS = ("_TP", "_ATTN_TP", "_MOE_TP")
"""Globals of ``parallel_state`` that follow the layout."""

SINGLE_GLOBALS = ("_PP", "_ATTN_CP", "_MOE_DP", "_MOE_EP")
"""Globals of ``parallel_state`` that are always groups of one rank (the degrees refused at start)."""


def set_global_groups(tp: GroupCoordinator, single: GroupCoordinator) -> None:
    """Have SGLang's layers reduce in ``tp``; they read these globals when they are called."""
    assign(parallel_state, **dict.fromkeys(TP_GLOBALS, tp), **dict.fromkeys(SINGLE_GLOBALS, single))


def set_scheduler_group(scheduler: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make ``scheduler`` rank ``tp_rank`` of ``tp``, where only this version keeps it."""
    assign(scheduler, tp_rank=tp_rank, attn_tp_rank=tp_rank, attn_tp_size=tp)


def set_runner_group(worker: Any, runner: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make a worker and its model runner rank ``tp_rank`` of this group of ``tp`` ranks."""
    assign(runner, tp_group=group, attention_tp_group=group)
    for owner in (worker, runner):
        assign(owner, tp_rank=tp_rank, tp_size=tp)
    assign(runner.load_config, tp_rank=tp_rank)
    assign(runner.server_args, tp_size=tp)


def get_place(scheduler: Any) -> tuple[int, int]:
    """TP rank and degree of the scheduler."""
    return scheduler.tp_rank, scheduler.tp_size
