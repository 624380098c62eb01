"""A check of test builds: after a switch the ranks of a group must agree on all that ``attributes.txt`` says they must
(``SGLANG_PAT_CHECK_AGREEMENT=1``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sglang_pat.checks import attributes
from sglang_pat.host import groups, loop
from sglang_pat.host.census import read_paths
from sglang_pat.host.kv import describe_account

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

CHECK_AGREEMENT_ENV = "SGLANG_PAT_CHECK_AGREEMENT"


def check(scheduler: SwitchingScheduler) -> None:
    """Raise ``RuntimeError`` naming what differs within the group; called by all its ranks together."""
    _, tp = groups.get_place(scheduler)
    if os.environ.get(CHECK_AGREEMENT_ENV) != "1" or tp == 1:
        return
    values = _read_agreed_values(scheduler)
    held: list[dict[str, Any]] = [{} for _ in range(tp)]
    dist.all_gather_object(held, values, group=groups.get_control_group(scheduler))
    for name, value in values.items():
        if any(other.get(name) != value for other in held):
            listing = ", ".join(str(other.get(name)) for other in held)
            raise RuntimeError(f"ranks of a TP group do not agree on {name}: {listing}")


def _read_agreed_values(scheduler: SwitchingScheduler) -> dict[str, Any]:
    """Values that the group's ranks must agree on, by the attribute's path."""
    return {
        **read_paths(scheduler, attributes.list_agreed_paths()),
        "running_batch": [describe_account(req) for req in loop.list_running(scheduler)],
        "waiting_queue": [describe_account(req) for req in loop.list_queued(scheduler)],
    }
