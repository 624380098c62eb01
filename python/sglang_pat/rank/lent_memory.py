"""Memory of a lent rank: its KV pool and weights go to whoever trains, and come back as they were.

Both lie in regions of SGLang's memory saver (``--enable-memory-saver``); without it a lent rank is idle and keeps them.
Weights wait in host memory: an update takes lent ranks back first, so there is none that they miss.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from sglang_pat.host.memory import Saver
from sglang_pat.memory.memory_plan import format_size
from sglang_pat.switch.transfer import synchronize

if TYPE_CHECKING:
    from sglang_pat.rank.layouts import Layouts
    from sglang_pat.switch.scheduler import SwitchingScheduler


class LentMemory:
    """KV pool and weights of this rank, held or released.  The views of all layouts lie over them: addresses stay."""

    def __init__(self, scheduler: SwitchingScheduler) -> None:
        self._saver = Saver(scheduler)
        self._layouts: Layouts = scheduler.layouts
        self._kept: list[torch.Tensor] | None = None
        """The weights in host memory, while they are released."""

    def _list_weights(self) -> list[torch.Tensor]:
        model = self._layouts.base.model
        return [tensor.data for tensor in itertools.chain(model.parameters(), model.buffers())]

    def _count_bytes(self) -> int:
        buffers = self._layouts.base.kv
        return sum(tensor.nbytes for tensor in [*self._list_weights(), *buffers.k, *buffers.v])

    def release(self) -> int:
        """Give the memory away; returns its size in bytes, 0 if there is no memory saver.

        Raises:
            RuntimeError: the host has no memory for the weights; nothing is released.
        """
        if not self._saver.enabled or self._kept is not None:
            return 0
        self._kept = [torch.empty_like(tensor, device="cpu").copy_(tensor) for tensor in self._list_weights()]
        self._saver.release()
        synchronize(self._layouts.device)
        return self._count_bytes()

    def resume(self) -> None:
        """Take the memory back, with the weights in it; no-op if it was not released.

        Raises:
            RuntimeError: somebody else still has it.
        """
        if self._kept is None:
            return
        if self._layouts.device == "cuda":
            free, need = torch.cuda.mem_get_info()[0], self._count_bytes()
            if free < need:  # the memory saver would end the process
                raise RuntimeError(
                    f"{format_size(free)} of its GPU are free, its weights and KV are {format_size(need)}: "
                    "let the trainer give its memory back first"
                )
        self._saver.resume()
        for tensor, kept in zip(self._list_weights(), self._kept, strict=True):
            tensor.copy_(kept)
        synchronize(self._layouts.device)
        self._kept = None
