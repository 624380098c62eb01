"""A check of test builds: the ranks of a group must sample the same tokens in every step
(``SGLANG_PAT_CHECK_TOKENS=1``)."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sglang_pat.host import batches, groups
from sglang_pat.host.batches import ScheduleBatch

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

CHECK_TOKENS_ENV = "SGLANG_PAT_CHECK_TOKENS"


def check(scheduler: SwitchingScheduler, batch: ScheduleBatch, result: Any) -> None:
    """Raise RuntimeError if the ranks of this group sampled different tokens; called after every step."""
    if os.environ.get(CHECK_TOKENS_ENV) != "1" or groups.get_place(scheduler)[1] == 1:
        return
    if (sampled := batches.read_sampled_tokens(batch, result)) is None:
        return
    digest = torch.tensor([zlib.crc32(repr(sampled).encode())])
    group = groups.get_control_group(scheduler)
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    if low.item() != high.item():
        raise RuntimeError(f"ranks of a TP group sampled different tokens; rank {scheduler.rank} has {sampled[1]}")
