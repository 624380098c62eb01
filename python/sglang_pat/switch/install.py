"""COMMIT: a rank takes over its new leader's counters and the requests of its new group.

The requests' KV lies in place, and the pools are empty.

Everything is laid out in host memory and then uploaded at once: what is launched on the device does not depend on the
number of requests, and nothing is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pat.host.fixes import penalties
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank import degrees
from sglang_pat.switch import grammars
from sglang_pat.switch.requests import IncomingRequests
from sglang_pat.switch.transfer import upload

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

COUNTERS = ("forward_ct", "recv_skipper._counter")
"""Attributes of SGLang's scheduler, dotted, that a rank takes over from its new leader; plain values.

Ranks of one TP group run the same scheduler side by side: where two of them differ in a counter or an order, one waits
in a broadcast and the other in an all-reduce, for ever.  Ranks that come together from different groups differ in
whatever has counted their steps or read their clocks.  What else must be equal is made anew by
``AdaptiveScheduler.enter_layout`` and :func:`install_requests`.
"""

_STEP_MARKS = ("profiler_start_forward_ct", "profiler_target_forward_ct")
"""Counted in steps of this rank: they move along when ``forward_ct`` does."""


def read_counters(scheduler: SwitchingScheduler) -> dict[str, Any]:
    """The values of :data:`COUNTERS` that this scheduler has."""
    return {path: value for path in COUNTERS if (value := find(scheduler, path)) is not None}


def take_counters(scheduler: SwitchingScheduler, values: dict[str, Any]) -> None:
    """Hold what the leader holds."""
    for name in _STEP_MARKS:
        if (mark := getattr(scheduler, name, None)) is not None:
            setattr(scheduler, name, mark + values["forward_ct"] - scheduler.forward_ct)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        setattr(find(scheduler, owner) if owner else scheduler, name, value)


def find_old_leader(rank: int, old: ParallelLayout, new: ParallelLayout) -> int:
    """The old leader whose group the leader of ``rank``'s new group comes from."""
    return old.group_of(new.group_of(rank))


def find(root: Any, path: str) -> Any:
    """The attribute at this dotted path, or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def install_requests(scheduler: SwitchingScheduler, incoming: IncomingRequests) -> None:
    """Make ``incoming`` the requests of this scheduler."""
    for req in [req for req, _, _ in incoming.decoding] + incoming.waiting:
        degrees.record_degree(req, scheduler.tp_size)
    scheduler.chunked_req, scheduler._chunked_req_scheduled_last_iter = None, False
    scheduler.grammar_manager.grammar_queue = [req for req in incoming.waiting if grammars.is_compiling(req)]
    scheduler.waiting_queue = [req for req in incoming.waiting if not grammars.is_compiling(req)]
    scheduler.grammars.keep([req for req, _, _ in incoming.decoding] + scheduler.waiting_queue)
    for req in scheduler.waiting_queue:
        req.retracted_stain |= bool(req.output_ids or req.extend_batch_idx)  # what it finds in the tree is its own
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    if not incoming.num_slots:
        return
    _allocate_slots(scheduler, incoming.place[1:])
    slots = _Slots(scheduler, incoming.place)
    rows = [slots.enter(req, row, shared, decodes=True) for req, row, shared in incoming.decoding]
    for req, row, shared in incoming.parked:
        slots.enter(req, row, shared, decodes=False)
    slots.upload()
    reqs = [req for req, _, _ in incoming.decoding]
    if reqs:
        _write_request_table(scheduler, reqs, rows)
        scheduler.running_batch = _decode_batch(scheduler, reqs)


def _allocate_slots(scheduler: SwitchingScheduler, slots: np.ndarray) -> None:
    """Take these KV slots out of the empty pool."""
    allocator, highest = scheduler.token_to_kv_pool_allocator, int(slots.max())
    free = np.ones(highest + 1, dtype=bool)
    free[0] = False  # SGLang's padding slot
    free[slots] = False
    # Of those above, which may be many, nothing is looked up: the empty pool's list is 1, 2, 3 ...
    low = upload(np.flatnonzero(free), torch.int64, scheduler.device)
    allocator.free_pages = torch.cat([low, allocator.free_pages[highest:]])


class _Slots:
    """Where the tokens of requests lie, entered one request after the other; in host memory until :meth:`upload`.

    Where two groups bring the same tokens, the radix tree keeps the first copy, and the slots of the second are freed:
    requests that share slots with the second one follow it.
    """

    def __init__(self, scheduler: SwitchingScheduler, place: np.ndarray) -> None:
        self._scheduler = scheduler
        self._tree: BasePrefixCache = scheduler.tree_cache
        self._keeps = not (self._tree.is_chunk_cache() or self._tree.disable)
        self._now = place.copy()
        self._freed: list[np.ndarray] = []

    def enter(self, req: Req, row: np.ndarray, shared: int, decodes: bool) -> np.ndarray:
        """The slots of ``req``'s tokens.

        What waits leaves its KV in the tree, where it is found again; it may be evicted there if those that decode
        need the room, like all that the tree keeps.

        Args:
            row: its slots in the plan, of which it shares the first ``shared`` with a request that was entered before.
        """
        slots, node, protected = self._now[row], getattr(self._tree, "root_node", None), shared
        if self._keeps:
            key = RadixKey((req.origin_input_ids + req.output_ids)[: len(row)], req.extra_key)
            given = InsertParams(key=key, value=torch.from_numpy(slots), priority=getattr(req, "priority", 0) or 0)
            known = self._tree.insert(given).prefix_len
            self._freed.append(slots[shared:known])
            found = self._tree.match_prefix(MatchPrefixParams(key=key))
            slots, node, protected = found.device_indices.numpy(), found.last_device_node, len(row)
            self._now[row] = slots
        if decodes:
            req.cache_protected_len, req.last_node = protected, node
            req.last_host_node = req.best_match_node = None
            self._tree.inc_lock_ref(node)
        return slots

    def upload(self) -> None:
        """Have the tree's slots on the device, and give back those of which it has another copy."""
        device = self._scheduler.device
        freed = np.concatenate(self._freed) if self._freed else ()
        if len(freed):
            self._scheduler.token_to_kv_pool_allocator.free(upload(freed, torch.int64, device))
        nodes = _list_tree_nodes(self._tree) if self._keeps else []
        if nodes:
            flat = upload(torch.cat([node.value for node in nodes]), torch.int64, device)
            for node, value in zip(nodes, flat.split([len(node.value) for node in nodes]), strict=True):
                node.value = value


def _list_tree_nodes(tree: BasePrefixCache) -> list:
    """All nodes of the radix tree below its root."""
    found = list(tree.root_node.children.values())
    for node in found:  # grows meanwhile
        found += node.children.values()
    return found


def _write_request_table(scheduler: SwitchingScheduler, reqs: list[Req], rows: list[np.ndarray]) -> None:
    """Write the slots of ``reqs`` into the table of running requests."""
    table, device = scheduler.req_to_token_pool, scheduler.device
    for req in reqs:
        req.req_pool_idx = None  # of the old table, if it was here before
    places = upload(table.alloc(reqs), torch.int64, device)
    padded = np.zeros((len(reqs), max(map(len, rows))), dtype=np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    table.req_to_token[places, : padded.shape[1]] = upload(padded, torch.int32, device)
    prefixes = upload(np.concatenate(rows), torch.int64, device).split([len(row) for row in rows])
    for req, prefix in zip(reqs, prefixes, strict=True):
        req.fill_ids = (req.origin_input_ids + req.output_ids)[: len(prefix)]
        req.kv_committed_len = req.kv_allocated_len = len(prefix)
        # SGLang says so when it prefills a request again, which is not needed where all its KV is in the tree; else it
        # would drop each of the tokens, and the request would decode for ever.
        req.is_retracted = False
        req.prefix_indices = prefix


def _decode_batch(scheduler: SwitchingScheduler, reqs: list[Req]) -> ScheduleBatch:
    """A batch about to decode, of requests whose KV is in place."""
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    lengths = [req.kv_committed_len for req in reqs]
    numbers = [[req.req_pool_idx for req in reqs], lengths, [req.output_ids[-1] for req in reqs]]
    batch.req_pool_indices, batch.seq_lens, batch.output_ids = upload(numbers, torch.int64, batch.device).unbind()
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = sum(lengths)
    batch.multimodal_inputs = [None] * len(reqs)
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.token_ids_logprob for req in reqs]
    batch.sampling_info = penalties.make_sampling_info(batch, decode=True)
    return batch
