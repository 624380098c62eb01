"""Measurement of the memory that this machine or its GPUs have free.

GPUs are read by NVML: ``torch.cuda.mem_get_info`` would leave a context of this process on every one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from sglang_pat.memory.memory_plan import Supply, measure_cpu_memory

logger = logging.getLogger(__name__)


def measure_memory(device: str, gpus: Sequence[int], shared: bool) -> Supply:
    """Memory that is free now: the machine's for ``cpu``, else that of the GPU with the least.

    Args:
        gpus: the number of each rank's GPU.
        shared: whether all ranks run on one GPU; each then has its part.

    Raises:
        ValueError: there are fewer GPUs.
    """
    if device == "cpu":
        return measure_cpu_memory()
    ranks, present = len(gpus), torch.cuda.device_count()
    if max(gpus) >= present:
        raise ValueError(
            f"{ranks} ranks need GPUs {min(gpus)} to {max(gpus)}, {present} are visible: "
            "choose --tp and --dp so that their product is the number of GPUs"
        )
    least = measure_gpus(gpus)
    return Supply(kind="cuda", free=least.free // ranks, total=least.total // ranks) if shared else least


def measure_gpus(gpus: Iterable[int]) -> Supply:
    """Memory of that of these GPUs, by CUDA's numbers, which has the least free."""
    return min(map(_measure_gpu, gpus), key=lambda supply: supply.free)


def _measure_gpu(gpu: int) -> Supply:
    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        used = torch.cuda.device_memory_used(gpu)
    except (ImportError, RuntimeError) as error:
        logger.warning("cannot read how much memory GPU %d has free, taken as empty: %s", gpu, error)
        used = 0
    return Supply(kind="cuda", free=max(0, total - used), total=total)
