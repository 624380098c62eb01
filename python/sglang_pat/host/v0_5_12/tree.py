"""SGLang's radix tree: it hands out slots, and a request holds the last node itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pat.host.assign import assign


def has_tree(scheduler: Any) -> bool:
    """Whether there is a tree, which may keep nothing."""
    return not scheduler.tree_cache.is_chunk_cache()


def make_key(req: Req | None, tokens: Sequence[int]) -> RadixKey:
    """The key of ``tokens`` of ``req``, or of nobody's."""
    return RadixKey(tokens, None if req is None else req.extra_key)


def read_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of what was found, int64 ``[tokens]``."""
    return match.device_indices


def hold(tree: Any, req: Req, node: Any, protected: int) -> None:
    """Keep what is in the tree up to ``node`` for ``req``, of whose tokens the tree has the first ``protected``."""
    assign(req, cache_protected_len=protected)
    tree.inc_lock_ref(node)
