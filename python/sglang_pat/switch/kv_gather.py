"""The KV of live requests moved PAT's way, ``--pat-kv-exchange allgather``: to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.kernels import kv as kernels
from sglang_pat.kernels.transfer import synchronize, upload
from sglang_pat.layout import ParallelLayout
from sglang_pat.switch.gather import Gather

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


class KvGather:
    """One rank's part of an all-gather of the KV; used as :class:`~sglang_pat.switch.kv_exchange.KvExchange`."""

    def __init__(self, scheduler: SwitchingScheduler, new: ParallelLayout, gather: Gather) -> None:
        layouts = scheduler.layouts
        self._plan = gather
        self._source, self._target = layouts.current.kv_pool, layouts[new].kv_pool
        sample = self._source.k_buffer[0]
        self._group = layouts.runner.groups.larger(layouts.current.layout, new)
        self._dims = self._source.head_dim, self._source.v_head_dim
        # Members may hold different numbers of slots, an all-gather wants one size.
        size = max(gather.counts) * gather.heads * sum(self._dims)
        self._out = torch.empty(size, dtype=sample.dtype, device=sample.device)
        self._all = [torch.empty_like(self._out) for _ in gather.counts]
        self._send_slots = upload(gather.send_slots, torch.int64, sample.device)
        self._takes = [
            (take, torch.arange(take.first, take.first + len(take.slots), device=sample.device),
             upload(take.slots, torch.int64, sample.device))
            for take in gather.takes
        ]  # fmt: skip
        self.bytes_sent = self._out.nbytes * (len(gather.counts) - 1) * self._source.layer_num
        """To other ranks, all layers."""
        self.place = np.arange(gather.total + 1, dtype=np.int64)
        """Slot of the new pool view for each slot of the plan: the same."""

    def run(self, error: Exception | None = None) -> Exception | None:
        """Move all layers; returns the first error, as ``KvExchange.run``."""
        for layer in range(self._source.layer_num):
            try:
                if error is None:
                    self._pack(layer)
            except Exception as exc:
                error = exc
            dist.all_gather(self._all, self._out, group=self._group)
            try:
                if error is None:
                    self._cut(layer)
            except Exception as exc:
                error = exc
        try:
            synchronize(self._out.device)
        except Exception as exc:
            error = error or exc
        return error

    def _pack(self, layer: int) -> None:
        slots, heads = self._send_slots, self._plan.heads
        pools = self._source.k_buffer[layer], self._source.v_buffer[layer]
        out = self._out[: len(slots) * heads * sum(self._dims)]
        kernels.kv_pack(*pools, slots, [0, len(slots)], [0], heads, out)

    def _cut(self, layer: int) -> None:
        pools = self._target.k_buffer[layer], self._target.v_buffer[layer]
        for take, rows, slots in self._takes:
            count, heads = self._plan.counts[take.member], self._plan.heads
            middle, end = (count * heads * sum(self._dims[:n]) for n in (1, 2))
            gathered = self._all[take.member]
            keys = gathered[:middle].view(count, heads, self._dims[0])
            values = gathered[middle:end].view(count, heads, self._dims[1])
            part = gathered.new_empty(len(slots) * take.count * sum(self._dims))
            kernels.kv_pack(keys, values, rows, [0, len(rows)], [take.src_head], take.count, part)
            kernels.kv_unpack(*pools, slots, [0, len(slots)], [take.dst_head], take.count, part)
