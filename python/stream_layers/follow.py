"""A rank of a running judge follows its memory: between two batches it gives up layers, or takes them back.

All ranks of the judge do so in the same turn of SGLang's loop, and stream equally many layers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import torch

from sglang_pat.host import adapter
from sglang_pat.memory.memory_plan import GIB, read_available_memory
from stream_layers.layers import StreamedLayers
from stream_layers.residency import STEPS, Residency

logger = logging.getLogger(__name__)

EVERY = 16
"""Turns between two looks of a busy judge at its memory; an idle one looks in each turn, once a second."""


class Follower:
    """Follower of a rank's memory, which is called in each turn of a scheduler's loop, before its batch runs.

    Args:
        runner: SGLang's ``ModelRunner``.
        streamed: the layers of its model.
        group: group of the judge's ranks, on CPUs; None if it has one.
    """

    def __init__(self, runner: Any, streamed: StreamedLayers, group: Any) -> None:
        self._runner = runner
        self._streamed = streamed
        self._group = group
        self._kept = self._measure()
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._began: float | None = None
        self._turns = 0

    def turn(self, busy: bool) -> None:
        """Look at the memory if it is time to; ``busy`` says that a batch is about to run."""
        if self._began is not None:
            self._steps.append(time.perf_counter() - self._began)
        self._turns += 1
        if not busy or self._turns % EVERY == 0:
            self._look()
        self._began = time.perf_counter() if busy else None

    def _look(self) -> None:
        before, free = self._streamed.count, self._measure()
        count = self._agree(self._choose(free))
        if count == before:
            return
        begin = time.perf_counter()
        self._streamed.stream(count)
        # A rank had no room after all: the others give up what they took.
        if (agreed := self._agree(self._streamed.count)) != self._streamed.count:
            self._streamed.stream(agreed)
        self._capture()
        self._steps.clear()
        logger.info(
            "%d layers are resident (before: %d): %.2f GiB of the memory were free, %.2f when the judge had started; "
            "it took %.1f s; %s",
            self._streamed.total - agreed, self._streamed.total - before, free / GIB, self._kept / GIB,
            time.perf_counter() - begin, self._streamed,
        )  # fmt: skip

    def _choose(self, free: int) -> int:
        return Residency(
            streamed=self._streamed.count, least=self._streamed.start, layers=self._streamed.total,
            layer_bytes=self._streamed.layer_bytes, free=free, kept=self._kept,
            copy_seconds=self._streamed.copy_seconds, steps=tuple(self._steps),
        ).choose_count()  # fmt: skip

    def _agree(self, count: int) -> int:
        """Largest number of layers that a rank of the judge has to stream."""
        most = torch.tensor(count)
        if self._group is not None:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(most)

    def _capture(self) -> None:
        """Capture the graphs of decode steps anew, so that they read the parameters where they are now."""
        if (graphs := getattr(self._runner, adapter.rank.GRAPHS)) is None:
            return
        # A capture runs a step, which writes KV: not where that of the last step lies, but in the slot for padding.
        buffers = graphs.buffers
        for buffer in (buffers.input_ids, buffers.positions, buffers.req_pool_indices, buffers.out_cache_loc):
            buffer.zero_()
        buffers.seq_lens.fill_(graphs.seq_len_fill_value)
        buffers.seq_lens_cpu.fill_(graphs.seq_len_fill_value)
        graphs.capture()

    def _measure(self) -> int:
        return _measure_own_gpu() if self._runner.device == "cuda" else read_available_memory()


def _measure_own_gpu() -> int:
    """Bytes that a rank can take of its GPU, where it has a context: what is free, and what torch keeps for it."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
