"""COMMIT: the requests of a rank's new group become those of its scheduler.

The requests' KV lies in place, and the pools are empty.

Everything is laid out in host memory and then uploaded at once: what is launched on the device does not depend on the
number of requests, and nothing is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_pat.host import batches, grammars, kv, loop, requests, tree
from sglang_pat.host.requests import Req
from sglang_pat.rank import degrees
from sglang_pat.switch.requests import IncomingRequests
from sglang_pat.switch.transfer import upload

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


def install_requests(scheduler: SwitchingScheduler, incoming: IncomingRequests) -> None:
    """Make ``incoming`` the requests of this scheduler."""
    decoding = [req for req, _, _ in incoming.decoding]
    tp = scheduler.layouts.layout.tp
    for req in decoding + incoming.waiting:
        degrees.record_degree(req, tp)
    queued = [req for req in incoming.waiting if not grammars.is_compiling(req)]
    loop.set_requests(scheduler, queued, [req for req in incoming.waiting if grammars.is_compiling(req)])
    scheduler.grammars.keep(decoding + queued)
    for req in queued:
        requests.mark_own_prefix(req)
    if not incoming.num_slots:
        return
    kv.take_slots(scheduler, incoming.place[1:])
    slots = _Slots(scheduler, incoming.place)
    rows = [slots.enter(req, row, shared, decodes=True) for req, row, shared in incoming.decoding]
    for req, row, shared in incoming.parked:
        slots.enter(req, row, shared, decodes=False)
    slots.upload()
    if decoding:
        kv.write_rows(scheduler, decoding, rows)
        loop.set_running(scheduler, batches.make_decode_batch(scheduler, decoding))


class _Slots:
    """Slots of the tokens of requests, entered one request after the other; in host memory until :meth:`upload`.

    Where two groups bring the same tokens, the radix tree keeps the first copy, and the slots of the second are freed:
    requests that share slots with the second one follow it.
    """

    def __init__(self, scheduler: SwitchingScheduler, place: np.ndarray) -> None:
        self._scheduler = scheduler
        self._keeps, self._root = tree.keeps_kv(scheduler), tree.get_root(scheduler)
        self._now = place.copy()
        self._freed: list[np.ndarray] = []

    def enter(self, req: Req, row: np.ndarray, shared: int, decodes: bool) -> np.ndarray:
        """Enter the tokens of ``req``; returns their slots.

        What waits leaves its KV in the tree, where it is found again; it may be evicted there if those that decode
        need the room, like all that the tree keeps.  What the tree may not have, only those that decode keep.

        Args:
            row: the slots of ``req`` in the plan, the first ``shared`` of which a request has that was entered before.
        """
        slots, node, protected = self._now[row], self._root, shared
        if self._keeps and (kept := tree.count_kept(self._scheduler, req)):
            brought, protected = slots, min(len(row), max(shared, kept))
            prefix_length, tree_slots, node = tree.leave_kv(self._scheduler, req, brought[:protected])
            self._freed.append(brought[shared:prefix_length])
            slots = np.concatenate([tree_slots, brought[protected:]])
            self._now[row] = slots
        if decodes:
            tree.hold_kv(self._scheduler, req, node, protected)
        else:
            self._freed.append(slots[protected:])
        return slots

    def upload(self) -> None:
        """Put the tree's slots on the device, and give back those of which it has another copy."""
        if any(map(len, self._freed)):
            kv.free_slots(self._scheduler, np.concatenate(self._freed))
        if self._keeps:
            device = self._scheduler.layouts.device
            tree.map_slots(self._scheduler, lambda slots: upload(slots, torch.int64, device))
