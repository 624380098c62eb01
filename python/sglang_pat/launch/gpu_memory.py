"""What GPUs of this machine have free.

Read by NVML: ``torch.cuda.mem_get_info`` would leave a context of this process on every one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from sglang_pat.memory.plan import Supply

logger = logging.getLogger(__name__)


def measure_gpus(gpus: Iterable[int]) -> Supply:
    """Of these GPUs, by CUDA's numbers, the one that has least free."""
    return min(map(_measure_gpu, gpus), key=lambda supply: supply.free)


def _measure_gpu(gpu: int) -> Supply:
    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        used = torch.cuda.device_memory_used(gpu)
    except (ImportError, RuntimeError) as error:
        logger.warning("cannot read how much memory GPU %d has free, taken as empty: %s", gpu, error)
        used = 0
    return Supply(kind="cuda", free=max(0, total - used), total=total)
