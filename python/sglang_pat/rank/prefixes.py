"""Prompts that are in the radix cache without having been computed: for measuring, never for answers."""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey


def inject(tree_cache: BasePrefixCache, prompts: list[list[int]]) -> None:
    """Let ``tree_cache`` believe that the KV of ``prompts`` (token ids) is in the slots that it gives them.

    What lies in these slots stays: the time of a step does not depend on it, as long as requests differ in their last
    tokens (a mixture's time depends on how many experts they choose).  Prompts that do not fit beside the live
    requests are left out, and so are all where the tree keeps nothing (``--disable-radix-cache``).
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    if tree_cache.is_chunk_cache():
        return
    for ids in prompts:
        evict_from_tree_cache(tree_cache, len(ids))
        slots = allocator.alloc(len(ids))
        if slots is None:
            return
        known = tree_cache.insert(InsertParams(key=RadixKey(ids), value=slots)).prefix_len
        allocator.free(slots[:known])
