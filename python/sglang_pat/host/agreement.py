"""What the ranks of a group must agree on, and how they come to.

Ranks of one TP group run the same scheduler side by side: where two of them differ in a counter or an order, one waits
in a broadcast and the other in an all-reduce, for ever.  Ranks that come together from different groups differ in
whatever has counted their steps or read their clocks.  What the new group's leader holds in :data:`TAKEN` becomes
everyone's at the switch; what else must be equal is made anew by ``AdaptiveScheduler.point_at`` and ``adopt``.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sglang_pat.host import attributes
from sglang_pat.host.census import describe
from sglang_pat.layout import ParallelLayout

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_pat.host.scheduler import AdaptiveScheduler

CHECK_AGREEMENT_ENV = "SGLANG_PAT_CHECK_AGREEMENT"
"""Test builds: compare what the ranks of a group must agree on after every switch."""

TAKEN = ("forward_ct", "recv_skipper._counter")
"""Attributes of the host's scheduler, dotted, that a rank takes over from its new leader; plain values."""

_STEP_MARKS = ("profiler_start_forward_ct", "profiler_target_forward_ct")
"""Counted in steps of this rank: they move along when ``forward_ct`` does."""


def taken(scheduler: AdaptiveScheduler) -> dict[str, Any]:
    """The values of :data:`TAKEN` that this scheduler has."""
    return {path: value for path in TAKEN if (value := _find(scheduler, path)) is not None}


def take(scheduler: AdaptiveScheduler, values: dict[str, Any]) -> None:
    """Hold what the leader holds."""
    for name in _STEP_MARKS:
        if (mark := getattr(scheduler, name, None)) is not None:
            setattr(scheduler, name, mark + values["forward_ct"] - scheduler.forward_ct)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        setattr(_find(scheduler, owner) if owner else scheduler, name, value)


def leader_before(rank: int, old: ParallelLayout, new: ParallelLayout) -> int:
    """The old leader whose group the leader of ``rank``'s new group comes from."""
    return old.group_of(new.group_of(rank))


def check(scheduler: AdaptiveScheduler) -> None:
    """In test builds: raise ``RuntimeError`` naming what differs within the group.  All its ranks together."""
    if os.environ.get(CHECK_AGREEMENT_ENV) != "1" or scheduler.tp_size == 1:
        return
    mine = _agreed(scheduler)
    held: list[dict[str, Any]] = [{} for _ in range(scheduler.tp_size)]
    dist.all_gather_object(held, mine, group=scheduler.tp_cpu_group)
    for name, value in mine.items():
        if any(other.get(name) != value for other in held):
            given = ", ".join(str(other.get(name)) for other in held)
            raise RuntimeError(f"ranks of a TP group do not agree on {name}: {given}")


def _agreed(scheduler: AdaptiveScheduler) -> dict[str, Any]:
    """Everything that the group's ranks must agree on, by name."""
    running, waiting = scheduler.running_batch.reqs, scheduler.waiting_queue
    roots = SimpleNamespace(Scheduler=scheduler, ModelRunner=scheduler.tp_worker.model_runner)
    return {
        **{path: describe(_find(roots, path)) for path in attributes.of_groups()},
        "running_batch": [_account(req) for req in running],
        "waiting_queue": [_account(req) for req in waiting],
    }


def _account(req: Req) -> tuple:
    """What the host decides by about one request."""
    entered = req.time_stats.wait_queue_entry_time
    return req.rid, req.priority, entered, len(req.output_ids), req.kv_committed_len, req.cache_protected_len


def _find(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
