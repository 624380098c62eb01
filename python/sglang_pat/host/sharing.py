"""All ranks on one GPU (``SGLANG_PAT_SHARE_GPU``), for the acceptance on a machine that has only one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang_pat.host.assign import assign

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARE_ENV = "SGLANG_PAT_SHARE_GPU"
"""Environment variable: with ``1`` all ranks run on one GPU, for ``python -m sglang_pat.acceptance`` on a machine with
one.  They take turns there, and NCCL goes through sockets, so times of merged layouts and of switches mean nothing."""


def is_gpu_shared() -> bool:
    """Whether all ranks run on one GPU."""
    return os.environ.get(SHARE_ENV) == "1"


def allow_sharing(rank: int) -> None:
    """Have ranks that share one GPU communicate as on several; to be called before the first group is made.

    NCCL refuses two ranks of one machine on one GPU: for it, each rank is a machine.  SGLang's custom all-reduce
    refuses GPUs without NVLink between them: a GPU reaches its own memory without.
    """
    if not is_gpu_shared():
        return
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

    def can_use(group: ProcessGroup, **_: Any) -> bool | None:
        return True if group.size() > 1 else None

    assign(custom_all_reduce_v2, can_use_custom_all_reduce_with_nvlink=can_use)
