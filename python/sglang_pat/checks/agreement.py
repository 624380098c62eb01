"""Test builds: after a switch the ranks of a group must agree on all that ``attributes.txt`` says they must
(``SGLANG_PAT_CHECK_AGREEMENT=1``)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sglang_pat.checks import attributes
from sglang_pat.checks.census import describe
from sglang_pat.switch.install import find

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_pat.switch.scheduler import SwitchingScheduler

CHECK_AGREEMENT_ENV = "SGLANG_PAT_CHECK_AGREEMENT"


def check(scheduler: SwitchingScheduler) -> None:
    """Raise ``RuntimeError`` naming what differs within the group; called by all its ranks together."""
    if os.environ.get(CHECK_AGREEMENT_ENV) != "1" or scheduler.tp_size == 1:
        return
    mine = _read_agreed_values(scheduler)
    held: list[dict[str, Any]] = [{} for _ in range(scheduler.tp_size)]
    dist.all_gather_object(held, mine, group=scheduler.tp_cpu_group)
    for name, value in mine.items():
        if any(other.get(name) != value for other in held):
            given = ", ".join(str(other.get(name)) for other in held)
            raise RuntimeError(f"ranks of a TP group do not agree on {name}: {given}")


def _read_agreed_values(scheduler: SwitchingScheduler) -> dict[str, Any]:
    """Everything that the group's ranks must agree on, by name."""
    running, waiting = scheduler.running_batch.reqs, scheduler.waiting_queue
    roots = SimpleNamespace(Scheduler=scheduler, ModelRunner=scheduler.tp_worker.model_runner)
    return {
        **{path: describe(find(roots, path)) for path in attributes.list_agreed_paths()},
        "running_batch": [_account(req) for req in running],
        "waiting_queue": [_account(req) for req in waiting],
    }


def _account(req: Req) -> tuple:
    """What SGLang decides by about one request."""
    entered = req.time_stats.wait_queue_entry_time
    return req.rid, req.priority, entered, len(req.output_ids), req.kv_committed_len, req.cache_protected_len
