"""SGLang's table of routed experts."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

from sglang_pat.host.assign import assigned


class StockTable(RoutedExpertsCapturer):
    """The class that ours is made of."""

    def destroy(self) -> None:
        """Do nothing where SGLang lets go of its own table, which is pinned."""


def skip_table() -> AbstractContextManager[None]:
    """Have SGLang make a table without rows inside the block: it would map no bytes, and pin them."""
    return assigned(base, ALLOC_MEMORY_FUNCS=defaultdict(lambda: _make_plain))


def _make_plain(dims: tuple[int, ...], *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)
