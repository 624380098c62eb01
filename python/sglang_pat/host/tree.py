"""SGLang's radix tree (``RadixCache``): the KV of prompts and of requests that wait, found by tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.host.requests import Req, get_tokens


def keeps_kv(scheduler: Any) -> bool:
    """Whether there is a tree that keeps anything (``--disable-radix-cache``)."""
    return not scheduler.tree_cache.disable


def get_root(scheduler: Any) -> Any | None:
    """The root, which holds nothing; None where there is no tree."""
    return getattr(scheduler.tree_cache, "root_node", None)


def find_kv(scheduler: Any, req: Req) -> torch.Tensor:
    """Slots of the first tokens of ``req`` that the tree has, but for the last token, ``[tokens]``."""
    if not keeps_kv(scheduler) or not count_kept(scheduler, req):
        return torch.empty(0, dtype=torch.int64)
    tree, key = scheduler.tree_cache, adapter.rank.make_key(req, get_tokens(req)[:-1])
    return adapter.rank.read_slots(tree, tree.match_prefix(MatchPrefixParams(key=key)))


def count_kept(scheduler: Any, req: Req) -> int:
    """Number of first tokens of ``req`` that the tree may have.

    None where the tokens do not say all (``positional_embed_overrides``).  With ``--strip-thinking-cache`` SGLang frees
    all after the prompt at the end of a request that has reasoned, whoever has it.
    """
    if req.positional_embed_overrides is not None:
        return 0
    return len(req.origin_input_ids) if scheduler.server_args.strip_thinking_cache else req.seqlen


def leave_kv(scheduler: Any, req: Req, slots: np.ndarray) -> tuple[int, np.ndarray, Any]:
    """Put the KV of ``req``, which lies in ``slots``, into the tree.

    Returns:
        The number of its first tokens that the tree has had elsewhere, the slots of all now, and the last node.
    """
    tree: BasePrefixCache = scheduler.tree_cache
    key = adapter.rank.make_key(req, get_tokens(req)[: len(slots)])
    params = InsertParams(key=key, value=torch.from_numpy(slots), priority=getattr(req, "priority", 0) or 0)
    prefix_length = tree.insert(params).prefix_len
    match = tree.match_prefix(MatchPrefixParams(key=key))
    return prefix_length, adapter.rank.read_slots(tree, match).numpy(), match.last_device_node


def hold_kv(scheduler: Any, req: Req, node: Any, protected: int) -> None:
    """Keep what is in the tree up to ``node`` for ``req``, of whose tokens the tree has the first ``protected``."""
    assign(req, last_node=node, last_host_node=None, best_match_node=None)
    adapter.rank.hold(scheduler.tree_cache, req, node, protected)


def map_slots(scheduler: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the slots of all nodes, int64 ``[tokens]`` in one tensor, by what ``change`` makes of them."""
    nodes = list(scheduler.tree_cache.root_node.children.values())
    for node in nodes:  # grows meanwhile
        nodes += node.children.values()
    if nodes:
        flat = change(torch.cat([node.value for node in nodes]))
        for node, value in zip(nodes, flat.split([len(node.value) for node in nodes]), strict=True):
            assign(node, value=value)


def inject(scheduler: Any, prompts: list[list[int]]) -> None:
    """Let the tree believe that the KV of ``prompts`` (token ids) is in the slots that it gives them.

    It is for measuring, never for answers.

    What lies in these slots stays: the time of a step does not depend on it, as long as requests differ in their last
    tokens (a mixture's time depends on how many experts they choose).  Prompts that do not fit beside the live
    requests are left out, and so are all where the tree keeps nothing (``--disable-radix-cache``).
    """
    if not keeps_kv(scheduler):
        return
    tree = scheduler.tree_cache
    allocator = tree.token_to_kv_pool_allocator
    for ids in prompts:
        evict_from_tree_cache(tree, len(ids))
        slots = allocator.alloc(len(ids))
        if slots is None:
            return
        prefix_length = tree.insert(InsertParams(key=adapter.rank.make_key(None, ids), value=slots)).prefix_len
        allocator.free(slots[:prefix_length])
