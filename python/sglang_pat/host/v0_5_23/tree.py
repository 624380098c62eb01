"""SGLang's radix tree: slots are read off the path to a node, and a request holds a ``TreeLock``.

SGLang's own choice is ``UnifiedRadixCache``, for models with several kinds of state.  A switch fills the plain
``RadixCache``, which this version still has: :func:`register` makes it a back end that can be chosen by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_pat.host.assign import assign

BACKEND = "sglang_pat"
"""Value of ``--radix-cache-backend`` for :class:`RadixCache`."""


def register() -> None:
    """Make :data:`BACKEND` known to SGLang, in every process that reads its arguments."""
    if registry.get_radix_cache_factory(BACKEND) is None:
        registry.register_radix_cache_backend(BACKEND, lambda context: RadixCache(context.params))


def has_tree(scheduler: Any) -> bool:
    """Whether there is a tree, which may keep nothing."""
    return not scheduler.tree_cache.disable


def make_key(req: Req | None, tokens: Sequence[int]) -> RadixKey:
    """The key of ``tokens`` of ``req``, or of nobody's."""
    ids = tokens if isinstance(tokens, array) else array("q", tokens)
    return RadixKey(ids) if req is None else RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)


def read_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of what was found, int64 ``[tokens]``."""
    return tree.path_device_indices(match.last_device_node)


def hold(tree: Any, req: Req, node: Any, protected: int) -> None:
    """Keep what is in the tree up to ``node`` for ``req``, of whose tokens the tree has the first ``protected``."""
    assign(req.kv, cache_protected_len=protected, cache_inserted_len=protected)
    assign(req, lock=tree.lock(node))
