"""SGLang's memory saver: KV pool and weights of a rank, released and taken back."""

from __future__ import annotations

from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS

from sglang_pat.host.contract import SglangScheduler

TAGS = (GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE)


class Saver:
    """The memory saver (``--enable-memory-saver``) of a scheduler's rank."""

    def __init__(self, scheduler: SglangScheduler) -> None:
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
