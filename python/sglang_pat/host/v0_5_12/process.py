"""The process of a rank."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import configure_scheduler_process


def configure(args: Any, rank: int, gpu_id: int, tp_rank: int) -> None:
    """Prepare this process to be a rank of ``args``, those of one replica of the base layout."""
    # With all ranks as one group: the cores of a machine are shared out over them.
    configure_scheduler_process(args, gpu_id, rank, 0, 0, 0, 0, None)


def list_places(gpu_id: int, tp_rank: int) -> dict[str, Any]:
    """What a scheduler is told of its place, beside the arguments."""
    return dict(gpu_id=gpu_id, tp_rank=tp_rank, moe_ep_rank=0, pp_rank=0, attn_cp_rank=0, moe_dp_rank=0, dp_rank=None)
