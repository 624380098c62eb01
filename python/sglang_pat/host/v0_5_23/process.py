"""The process of a rank, which publishes its configuration before it builds anything."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import configure_scheduler_process
from sglang.srt.runtime_context import SpawnRanks, publish

from sglang_pat.host.v0_5_23 import tree


def configure(args: Any, rank: int, gpu_id: int, tp_rank: int) -> None:
    """Prepare this process to be a rank of ``args``, those of one replica of the base layout."""
    tree.register()
    context = publish(args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=gpu_id))
    context.override("sglang_pat", radix_cache_backend=tree.BACKEND)
    configure_scheduler_process(args, gpu_id)


def list_places(gpu_id: int, tp_rank: int) -> dict[str, Any]:
    """What a scheduler is told of its place, beside the arguments: nothing, it was published."""
    return {}
