"""SGLang's KV: a request's own is in ``Req.kv``; the components of the scheduler hold one allocator for good."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_pat.host.assign import assign


def get_record(req: Req) -> Any:
    """The object that says which line, how many slots, and how many of the tree's, ``req`` has."""
    return req.kv


def write_extent(req: Req, tokens: Any, slots: torch.Tensor) -> None:
    """Write which ``tokens`` of ``req``, which is about to decode, have KV; in which ``slots`` its line says."""
    req.refresh_fill_ids()
    assign(req, extend_end=len(tokens), prefix_len=len(tokens))


def forget_slots(req: Req) -> None:
    """Forget how many slots ``req``, which has no line any more, had."""
    req.kv.mark_kv_released()


def fill_view(view: MHATokenToKVPool, heads: int) -> None:
    """Compute what a view of a pool with ``heads`` heads has beside its buffers."""
    assign(view, row_dim=heads * view.head_dim, v_row_dim=heads * view.v_head_dim)
    if getattr(view, "data_strides", None) is not None:  # SGLang makes these where it moves slots
        view._init_data_ptrs_and_strides()


def copy_allocator(allocator: TokenToKVPoolAllocator) -> TokenToKVPoolAllocator:
    """The allocator that a layout keeps for its own: the scheduler's becomes another's in a switch."""
    return copy.copy(allocator)


def set_allocator(scheduler: Any, allocator: TokenToKVPoolAllocator) -> None:
    """Have all slots be taken from what ``allocator`` has.

    A dozen components hold the scheduler's own allocator, some of them frozen: it stays, and becomes this one, once
    its slots are freed (``clear_pools``).
    """
    live, size = scheduler.token_to_kv_pool_allocator, allocator.size
    assign(live, size=size, _kvcache=allocator.get_kvcache())
    assign(scheduler, max_total_num_tokens=size)
    for part in (scheduler.pool_stats_observer, scheduler.invariant_checker, scheduler.load_inquirer):
        object.__setattr__(part, "max_total_num_tokens", size * scheduler.kv_shard_widening)
    assign(scheduler.kv_events_publisher, max_total_num_tokens=size)


def find_leak(scheduler: Any, held: int) -> str | None:
    """A line with all terms if KV slots do not add up, of which requests hold ``held``; None if they do."""
    stats = scheduler.pool_stats_observer.get_pool_stats()
    leak, message = scheduler.invariant_checker._check_full_pool(stats, uncached=held)
    return message if leak else None
