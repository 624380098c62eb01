"""SGLang's KV: a request says where its own lies in attributes of ``Req``."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_pat.host.assign import assign


def get_record(req: Req) -> Any:
    """The object that says which line, how many slots, and how many of the tree's, ``req`` has."""
    return req


def write_extent(req: Req, tokens: list[int], slots: torch.Tensor) -> None:
    """Write which ``tokens`` of ``req``, which is about to decode, have KV, and in which ``slots``."""
    assign(req, fill_ids=tokens, prefix_indices=slots)


def forget_slots(req: Req) -> None:
    """Forget how many slots ``req``, which has no line any more, had."""


def fill_view(view: MHATokenToKVPool, heads: int) -> None:
    """Compute what a view of a pool with ``heads`` heads has beside its buffers."""
    strides = [x.stride(0) * x.dtype.itemsize for x in [*view.k_buffer, *view.v_buffer]]
    assign(view, data_strides=torch.tensor(strides, device=view.device), row_dim=heads * view.head_dim)


def copy_allocator(allocator: TokenToKVPoolAllocator) -> TokenToKVPoolAllocator:
    """The allocator that a layout keeps for its own: the scheduler is given another one in a switch."""
    return allocator


def set_allocator(scheduler: Any, allocator: TokenToKVPoolAllocator) -> None:
    """Have the scheduler and its tree take slots from ``allocator``."""
    assign(scheduler, token_to_kv_pool_allocator=allocator, max_total_num_tokens=allocator.size)
    assign(scheduler.tree_cache, token_to_kv_pool_allocator=allocator)


def find_leak(scheduler: Any, held: int) -> str | None:
    """A line with all terms if KV slots do not add up, of which requests hold ``held``; None if they do."""
    leak, message = scheduler._check_full_pool(scheduler.get_pool_stats(), uncached=held)
    return message if leak else None
