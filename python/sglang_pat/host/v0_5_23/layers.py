"""SGLang's sharded layers: linear ones keep the group that they are sharded over."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear


def get_degree(module: torch.nn.Module) -> int:
    """Number of ranks that the layer is sharded over."""
    group = getattr(module, "tp_group", None)
    return getattr(module, "tp_size", 1) if group is None else group.world_size


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether every rank has the whole of a linear layer whose class shards others."""
    return isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.parallel_group == "replicated"
