"""SGLang's sharded layers, which keep their degree in ``tp_size``."""

from __future__ import annotations

import torch


def get_degree(module: torch.nn.Module) -> int:
    """Number of ranks that the layer is sharded over."""
    return getattr(module, "tp_size", 1)


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether every rank has the whole of a linear layer whose class shards others: no layer is made so."""
    return False
