"""SGLang's KV pools: which slots are free, which slots a request has, and the buffers themselves.

Slots of a request are int64 ``[tokens]``, in the order of its tokens; the last token has none yet.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_pat.host import adapter, requests
from sglang_pat.host.assign import assign
from sglang_pat.host.requests import Req
from sglang_pat.switch.transfer import download, upload

# -- the buffers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvBuffers:
    """K and V of all layers, ``[slots, heads, dim]`` each; slot 0 is SGLang's padding."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def dims(self) -> tuple[int, int]:
        """Number of elements of a head in K and in V."""
        return self.k[0].shape[2], self.v[0].shape[2]

    @property
    def slot_bytes(self) -> int:
        """Size of one slot in one layer, in bytes."""
        return self.k[0][0].nbytes + self.v[0][0].nbytes


def read_buffers(pool: MHATokenToKVPool) -> KvBuffers:
    return KvBuffers(pool.k_buffer, pool.v_buffer)


def find_reason_against(pool: Any) -> str | None:
    """Reason why this pool's KV cannot cross a switch; None if it can."""
    return None if isinstance(pool, MHATokenToKVPool) else f"its KV pool is a {type(pool).__name__}"


def make_view(
    pool: MHATokenToKVPool, allocator: TokenToKVPoolAllocator, ratio: int
) -> tuple[MHATokenToKVPool, TokenToKVPoolAllocator]:
    """The pool with ``ratio`` times the slots and ``1/ratio`` of the heads, and who gives these slots away.

    ``[slots, heads, dim]`` becomes ``[slots * ratio, heads / ratio, dim]``; addresses do not change.
    """
    if ratio == 1:
        return pool, allocator
    view, heads = copy.copy(pool), pool.head_num // ratio
    buffers = pool.k_buffer, pool.v_buffer
    k, v = (
        [layer.view(-1, heads, layer.shape[2]) for layer in layers]  # pyright: ignore[reportOptionalIterable]
        for layers in buffers
    )
    size = (pool.size + pool.page_size) * ratio - pool.page_size
    assign(view, head_num=heads, size=size, k_buffer=k, v_buffer=v)
    adapter.rank.fill_view(view, heads)
    return view, TokenToKVPoolAllocator(view.size, allocator.dtype, allocator.device, view, allocator.need_sort)


def count_slots(allocator: TokenToKVPoolAllocator) -> int:
    return allocator.size


# -- which slots are taken ---------------------------------------------------------------------------------------------


def clear_pools(scheduler: Any) -> None:
    """Empty the tree, and free the slots of all requests."""
    scheduler.tree_cache.reset()
    scheduler.token_to_kv_pool_allocator.clear()
    scheduler.req_to_token_pool.clear()


def take_slots(scheduler: Any, slots: np.ndarray) -> None:
    """Take these slots out of the empty pool."""
    allocator, highest = scheduler.token_to_kv_pool_allocator, int(slots.max())
    free = np.ones(highest + 1, dtype=bool)
    free[0] = False  # SGLang's padding slot
    free[slots] = False
    # Of those above, which may be many, nothing is looked up: the empty pool's list is 1, 2, 3 ...
    low = upload(np.flatnonzero(free), torch.int64, scheduler.device)
    assign(allocator, free_pages=torch.cat([low, allocator.free_pages[highest:]]))


def free_slots(scheduler: Any, slots: np.ndarray) -> None:
    scheduler.token_to_kv_pool_allocator.free(upload(slots, torch.int64, scheduler.device))


def count_used_slots(scheduler: Any) -> tuple[int, int]:
    """Number of slots that are taken, and of all."""
    allocator = scheduler.token_to_kv_pool_allocator
    return allocator.size - allocator.available_size(), allocator.size


def count_lines(scheduler: Any) -> int:
    """Number of requests that can run at once."""
    return min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)


def check_sums(scheduler: Any) -> None:
    """Raise ``RuntimeError`` naming all terms if KV slots or request slots do not add up."""
    reqs = scheduler.running_batch.reqs
    records = [adapter.rank.get_kv_record(req) for req in reqs]
    held = sum(record.kv_allocated_len - record.cache_protected_len for record in records)
    if message := adapter.rank.find_leak(scheduler, held):
        raise RuntimeError(f"KV slots do not add up after the switch: {message}")
    free, used, size = scheduler.req_to_token_pool.available_size(), len(reqs), scheduler.req_to_token_pool.size
    if free + used != size:
        raise RuntimeError(f"request slots do not add up after the switch: {free=} + {used=} != {size=}")


# -- the slots of requests ---------------------------------------------------------------------------------------------


def count_kv(req: Req) -> int:
    """Number of tokens of ``req``, which runs, that have KV."""
    return adapter.rank.get_kv_record(req).kv_committed_len


def add_committed(req: Req) -> None:
    """Note that one token more of ``req``, which runs, has KV."""
    record = adapter.rank.get_kv_record(req)
    assign(record, kv_committed_len=record.kv_committed_len + 1, kv_allocated_len=record.kv_allocated_len + 1)


def get_line(req: Req) -> int | None:
    """The line of ``req`` in the table of running requests; None if it has none."""
    return adapter.rank.get_kv_record(req).req_pool_idx


def lose_kv(req: Req) -> None:
    """Make ``req``, whose KV is lost, ready to go back to the queue as tokens."""
    assign(adapter.rank.get_kv_record(req), req_pool_idx=None)
    adapter.rank.forget_slots(req)
    req.reset_for_retract()
    requests.drop_piece_logprobs(req)


def describe_account(req: Req) -> tuple:
    """Values by which SGLang decides about one request, the same on all ranks of a group."""
    entered, outputs = requests.get_entry_time(req), len(req.output_ids)
    return req.rid, req.priority, entered, outputs, count_kv(req), adapter.rank.get_kv_record(req).cache_protected_len


def read_line(scheduler: Any, req: Req) -> torch.Tensor:
    """Slots of a request that runs, int64 ``[tokens]`` on the device."""
    return scheduler.req_to_token_pool.req_to_token[get_line(req), : count_kv(req)]


def read_rows(scheduler: Any, reqs: Sequence[Req]) -> list[np.ndarray]:
    """Slots of requests that run, int64 ``[tokens]`` each in host memory; one read of the device for all."""
    lengths = [count_kv(req) for req in reqs]
    places = upload([get_line(req) for req in reqs], torch.int64, scheduler.device)
    table = download(scheduler.req_to_token_pool.req_to_token[places, : max(lengths)])
    return [row[:length].astype(np.int64) for row, length in zip(table, lengths, strict=True)]


def write_rows(scheduler: Any, reqs: Sequence[Req], rows: Sequence[np.ndarray]) -> None:
    """Give ``reqs`` lines in the table of running requests, with these slots."""
    pool, device = scheduler.req_to_token_pool, scheduler.device
    for req in reqs:
        assign(adapter.rank.get_kv_record(req), req_pool_idx=None)  # of the old table, if it was here before
    places = upload(pool.alloc(reqs), torch.int64, device)
    padded = np.zeros((len(reqs), max(map(len, rows))), dtype=np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    pool.req_to_token[places, : padded.shape[1]] = upload(padded, torch.int32, device)
    prefixes = upload(np.concatenate(rows), torch.int64, device).split([len(row) for row in rows])
    for req, prefix in zip(reqs, prefixes, strict=True):
        length = len(prefix)
        assign(adapter.rank.get_kv_record(req), kv_committed_len=length, kv_allocated_len=length)
        adapter.rank.write_extent(req, requests.get_tokens(req)[:length], prefix)
        # SGLang says so when it prefills a request again, which is not needed where all its KV is in the tree; else it
        # would drop each of the tokens, and the request would decode for ever.
        assign(req, is_retracted=False)
