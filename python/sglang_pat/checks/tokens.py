"""Test builds: the ranks of a group must have sampled the same tokens in every step (``SGLANG_PAT_CHECK_TOKENS=1``)."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

CHECK_TOKENS_ENV = "SGLANG_PAT_CHECK_TOKENS"


def check(scheduler: SwitchingScheduler, batch: ScheduleBatch, result: Any) -> None:
    """Raise RuntimeError if the ranks of this group sampled different tokens; called after every step."""
    token_ids = getattr(result, "next_token_ids", None)
    if os.environ.get(CHECK_TOKENS_ENV) != "1" or scheduler.tp_size == 1 or token_ids is None:
        return
    mine = token_ids.tolist()
    digest = torch.tensor([zlib.crc32(repr(([req.rid for req in batch.reqs], mine)).encode())])
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=scheduler.tp_cpu_group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=scheduler.tp_cpu_group)
    if low.item() != high.item():
        raise RuntimeError(f"ranks of a TP group sampled different tokens; rank {scheduler.rank} has {mine}")
