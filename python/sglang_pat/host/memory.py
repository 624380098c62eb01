"""SGLang's memory saver: KV pool and weights of a rank, released and taken back."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS

from sglang_pat.memory.memory_plan import format_size

logger = logging.getLogger(__name__)

TAGS = (GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE)


def log_kept(kept: int, gpu: int) -> None:
    """Say in the log what is in use after a release; a rank keeps ``kept`` bytes by the plan."""
    free, total = torch.cuda.mem_get_info()
    logger.info(
        "memory released: by the plan a rank keeps %s for context, communicators and graphs of all layouts; "
        "GPU %d has %s of %s in use now, by whomever",
        format_size(kept), gpu, format_size(total - free), format_size(total),
    )  # fmt: skip


class Saver:
    """The memory saver (``--enable-memory-saver``) of a scheduler's rank."""

    def __init__(self, scheduler: Any) -> None:
        self._adapter: Any = scheduler.memory_saver_adapter

    @property
    def enabled(self) -> bool:
        return self._adapter.enabled

    def release(self) -> None:
        """Release the memory of KV pool and weights, which lose their contents."""
        for tag in TAGS:
            self._adapter.pause(tag)

    def resume(self) -> None:
        """Take memory back, at the same addresses."""
        for tag in TAGS:
            self._adapter.resume(tag)
